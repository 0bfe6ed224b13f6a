"""The Triton experts on stored weights against their reference: both formats and forms, skipped pairs, bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.targets import Target, get_target
from dscompile.templates.triton.experts_packed import TEMPLATES, prepare
from support.kernels import reference, runs, space
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E2M1, E4M3 = "e2m1_1x32", "e4m3_32x32"
KINDS = [E2M1, E4M3]


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Case R18: what nobody wrote is NaN, in integers the largest value."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case(n: int, k: int, e: int, kind: str, size: int = 64, inner: int = 32, dtype: torch.dtype = BF16) -> list[Any]:
    def stored(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        low = 127 - int(columns.bit_length())
        if kind == E2M1:
            scale = torch.randint(low, low + 3, (e, rows, columns // 32))
            return torch.randint(0, 256, (e, rows, columns // 2)).byte(), scale.byte()
        scale = torch.randint(low, low + 3, (e, rows // 32, columns // 32))
        return torch.randn(e, rows, columns).to(torch.float8_e4m3fn).view(torch.uint8), scale.byte()

    x, indices, weights = torch.randn(n, size), torch.randint(0, e, (n, k)), torch.rand(n, k)
    return [x.to(dtype), indices, weights, *stored(2 * inner, size), *stored(size, inner)]


def close(got: Tensor, want: Tensor) -> None:
    """Sums of exact products, in another order: nearly always the same after rounding to bf16. Where gate, up or act
    falls the other way, one value that enters the down projection moves by a step of E4M3, 1/8 of itself at most."""
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).abs()
    assert (error <= 0.1 * want.double().abs().amax(-1, keepdim=True) + 1e-6).all()
    assert (error <= 2 * torch.finfo(BF16).eps * want.double().abs() + 1e-6).double().mean() > 0.8


@settings(max_examples=16)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    n, k, e = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    kind, name = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(["sm_90a", "sm_103a"]))
    size, inner = data.draw(st.sampled_from([(64, 32), (96, 160), (128, 128), (416, 32)]))
    dtype, out = data.draw(st.sampled_from([BF16, FP16])), data.draw(st.sampled_from([FP32, BF16]))
    limit = data.draw(st.sampled_from([10.0, 0.7, 0.0]))
    torch.manual_seed(n * k * e)
    x, _, weights, *stored = case(n, k, e, kind, size, inner, dtype)
    flat = data.draw(st.lists(st.integers(-1, e - 1), min_size=n * k, max_size=n * k))
    indices = torch.tensor(flat).view(n, k)
    weights[indices < 0] = float("nan")
    args = (x, indices, weights, *stored, limit, kind, out)
    got = next(runs(TEMPLATE, args, get_target(name), 1))
    close(got, reference(TEMPLATE, *args))
    assert (got[(indices < 0).all(-1)] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_small_integers_are_exact(kind: str, target: Target) -> None:
    """No sum is rounded, no clamp, one expert, weight 1: only silu may differ, and only in the last bit of bf16."""
    x, indices, weights, w13, s13, w2, s2 = case(5, 1, 1, kind)
    x = torch.randint(-3, 4, x.shape).to(BF16)
    weights[:] = 1
    if kind == E4M3:
        w13 = torch.randint(-2, 3, w13.shape).float().to(torch.float8_e4m3fn).view(torch.uint8)
    s13[:], s2[:] = 124, 127
    args = (x, indices, weights, w13, s13, w2, s2, 0.0, kind, FP32)
    got, want = next(runs(TEMPLATE, args, target, 1)), reference(TEMPLATE, *args)
    close(got, want)
    assert (got == want).double().mean() > 0.5


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("size", [32, 96, 1056])
def test_activations_are_the_window_format(size: int, scaled: bool) -> None:
    """Codes and scales, or the values in halves, bit for bit; zeros, NaN, the floor and saturation included."""
    x = torch.randn(7, size) * torch.logspace(-8, 8, 7)[:, None]
    x[0], x[1, 3], x[2, :5] = 0, float("nan"), torch.tensor([-0.0, 1e30, -1e30, 448.0, 1e-30])
    x = x.to(BF16)
    to, scales, *_ = prepare(x, torch.zeros(7, 0, dtype=torch.int64), 4, 16, not scaled, scaled)
    format = FORMATS["fp8_g32_ue8m0"]
    if scaled:
        assert scales is not None
        payload, factors = format.encode(x)
        good = ~x.isnan().unflatten(-1, (-1, 32)).any(-1)
        assert torch.equal(scales[good], factors[good])
        grouped = good.repeat_interleave(32, -1)
        assert torch.equal(to.view(torch.uint8)[grouped], payload[grouped])
        assert to[~grouped].float().isnan().all() or (scales[~good] == 255).all()
    else:
        even_odd = to.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        torch.testing.assert_close(even_odd.float(), format.fake_quant(x.float()), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 2, 7, 9])
def test_unwritten_memory_never_shows(tokens: int, unwritten_is_nan: None, target: Target) -> None:
    """Case R18: repeats are bitwise equal; experts without a token, whose scales are NaN, add exactly 0."""
    args = case(tokens, 2, 8, E2M1)
    args[1] %= 5
    args[1][-1] = -1
    args[4][5:], args[6][5:] = 255, 255
    call = (*args, 10.0, E2M1, BF16)
    results = [next(runs(TEMPLATE, call, target, 1)) for _ in range(2)]
    close(results[0], reference(TEMPLATE, *call))
    assert torch.equal(*results) and (results[0][-1] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_size(kind: str, target: Target) -> None:
    """One crowded expert fills more than one tile of 16."""
    args = (*case(20, 2, 2, kind, 96, 64), 10.0, kind, FP32)
    args[1][:, 0] = 1
    want = reference(TEMPLATE, *args)
    sizes = {c["BLOCK_T"]: c for c in space(TEMPLATE, args, target)}
    assert sizes.keys() >= {16, 32, 64}
    for config in sizes.values():
        close(TEMPLATE.fn(*args, config=config, target=target), want)


def test_an_index_out_of_range_is_skipped(unwritten_is_nan: None) -> None:
    args = case(6, 3, 4, E2M1)
    skipped, wild = args[1].clone(), args[1].clone()
    skipped[:, 1], wild[:, 1] = -1, torch.tensor([4, -2, 2**31, -(2**31), 2**32 + 1, 2**40])
    target = get_target("sm_103a")
    got = [next(runs(TEMPLATE, (args[0], i, *args[2:], 10.0, E2M1, FP32), target, 1)) for i in (skipped, wild)]
    assert torch.equal(*got)


def test_bytes() -> None:
    """Codes and scales of the experts that got a token, once."""
    args = case(8, 2, 9, E2M1, 128, 128)
    args[1] = torch.tensor([[0, 3], [3, 5], [5, 0], [0, 5], [3, 0], [5, 3], [0, 3], [3, 5]])
    with count_traffic() as traffic:
        next(runs(TEMPLATE, (*args, 10.0, E2M1, BF16), get_target("sm_103a"), 1))
    inputs = sum(t.nbytes for t in args[:3]) + 3 * sum(t[0].nbytes for t in args[3:])
    assert len(traffic._read - traffic._written) == inputs


def test_refuses() -> None:
    named = {"w13": torch.empty(5000, 64, 16, device="meta"), "indices": torch.empty(1, 2)}
    refusal = TEMPLATE.applies(named)
    assert refusal is not None and "5000" in refusal
