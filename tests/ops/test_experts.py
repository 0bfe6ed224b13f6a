"""Routed experts: float64 oracle, both roundings, skipped entries, stale memory."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401

experts = torch.ops.dsv4.experts
FP32, BF16 = torch.float32, torch.bfloat16


def silu64(v: Tensor) -> Tensor:
    return v / (1 + torch.exp(-v))


def oracle(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    inner = w2.shape[2]
    for t in range(x.shape[0]):
        for j in range(indices.shape[1]):
            e = int(indices[t, j])
            if e < 0:
                continue
            h = w13[e].double() @ x[t].double()
            gate, up = h[:inner], h[inner:]
            if 0 < limit < math.inf:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[t] += w2[e].double() @ (silu64(gate) * up) * weights[t, j].double()
    return out


def case(n: int, k: int, e: int, dtype: torch.dtype = FP32) -> tuple[Tensor, ...]:
    x, indices, weights = torch.randn(n, 16), torch.randint(0, e, (n, k)), torch.rand(n, k)
    return x.to(dtype), indices, weights, torch.randn(e, 24, 16).to(dtype), torch.randn(e, 16, 12).to(dtype)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("limit", [10.0, 0.7, 0.0, -1.0, math.inf])
def test_experts_match_float64(before: bool, limit: float) -> None:
    args = case(7, 3, 5)
    out = experts(*args, limit, before, FP32)
    torch.testing.assert_close(out.double(), oracle(*args, limit), rtol=1e-5, atol=1e-4)


@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Empty experts, one crowded expert, an expert twice in a token, skipped entries, no tokens at all."""
    n, k, e = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    x, _, weights, w13, w2 = case(n, k, e)
    flat = data.draw(st.lists(st.integers(-1, e - 1), min_size=n * k, max_size=n * k))
    indices = torch.tensor(flat, dtype=torch.int64).view(n, k)
    weights[indices < 0] = float("nan")
    for before in (True, False):
        out = experts(x, indices, weights, w13, w2, 10.0, before, FP32)
        torch.testing.assert_close(out.double(), oracle(x, indices, weights, w13, w2, 10.0), rtol=1e-5, atol=1e-4)
        assert (out[(indices < 0).all(-1)] == 0).all()


def test_roundings_of_the_two_dialects() -> None:
    x, indices, weights, w13, w2 = case(6, 1, 1, BF16)
    h = x @ w13[0].T
    gate, up, w = h[:, :12], h[:, 12:], weights.to(BF16)
    act = (torch.nn.functional.silu(gate.float()) * up.float() * weights).to(BF16)
    before = experts(x, indices * 0, weights, w13, w2, 0.0, True, BF16)
    torch.testing.assert_close(before, act @ w2[0].T, rtol=2**-7, atol=2**-7)
    late = ((torch.nn.functional.silu(gate) * up) @ w2[0].T) * w
    after = experts(x, indices * 0, w, w13, w2, 0.0, False, BF16)
    torch.testing.assert_close(after, late, rtol=2**-7, atol=2**-7)
    assert experts(x, indices, weights, w13, w2, 0.0, True, FP32).dtype == FP32


@pytest.mark.parametrize("tokens", [1, 2, 7, 9])
@pytest.mark.parametrize("before", [True, False])
def test_stale_memory_never_shows(tokens: int, before: bool) -> None:
    """Case R18: NaN-filled blocks of every size in play are freed between calls; all repeats are bitwise equal."""
    args = case(tokens, 2, 8, BF16)
    sizes = [tokens * 2 * 16, tokens * 2 * 24, tokens * 2 * 12, tokens * 16, 16 * 16, 24 * 16]
    want = experts(*args, 10.0, before, BF16)
    torch.testing.assert_close(want.double(), oracle(*args, 10.0), rtol=0.05, atol=0.5)
    for _ in range(20):
        for dtype in (BF16, FP32):
            junk = [torch.full((size,), float("nan"), dtype=dtype) for size in sizes]
            del junk
        assert torch.equal(experts(*args, 10.0, before, BF16), want)


def test_a_nan_token_or_expert_stays_where_it_is() -> None:
    x, _, weights, w13, w2 = case(5, 2, 6)
    indices = torch.tensor([[0, 1], [1, 2], [3, 0], [4, 4], [2, 1]])
    clean = experts(x, indices, weights, w13, w2, 10.0, True, FP32)
    x[3], w13[5], w2[5] = float("nan"), float("nan"), float("nan")
    out = experts(x, indices, weights, w13, w2, 10.0, True, FP32)
    keep = [0, 1, 2, 4]
    assert torch.equal(out[keep], clean[keep]) and out[3].isnan().all()


def test_arguments_are_checked() -> None:
    x, indices, weights, w13, w2 = case(3, 2, 4)

    def call(**change: object) -> None:
        args = {
            "x": x,
            "indices": indices,
            "weights": weights,
            "w13": w13,
            "w2": w2,
            "limit": 10.0,
            "before": True,
            "dtype": FP32,
        } | change
        experts(*args.values())

    with pytest.raises(IndexError, match=r"dsv4::experts: indices is 4; allowed: -1 <= indices < 4 \(number of exp"):
        call(indices=torch.full((3, 2), 4))
    with pytest.raises(IndexError, match="indices is -2"):
        call(indices=torch.full((3, 2), -2))
    with pytest.raises(ValueError, match=r"middle axis of w13 is 23; allowed: an even number"):
        call(w13=w13[:, :23])
    with pytest.raises(ValueError, match=r"shape of w2 is \[4, 16, 11\]; allowed: \[4, 16, 12\]"):
        call(w2=w2[..., :11])
    with pytest.raises(ValueError, match=r"shape of weights is \[3, 1\]; allowed: \[3, 2\]"):
        call(weights=weights[:, :1])
    with pytest.raises(TypeError, match=r"dtype of w2 is torch.bfloat16; allowed: torch.float32"):
        call(w2=w2.bfloat16())
    with pytest.raises(TypeError, match=r"out_dtype is torch.int32"):
        call(dtype=torch.int32)
