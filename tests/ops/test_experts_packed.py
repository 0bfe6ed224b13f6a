"""Experts on stored weights: a float64 oracle with its own decoding, both formats, skipped pairs, arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dscompile.ops  # noqa: F401
from support.quant import E2M1_GRID, fp8

experts_packed = torch.ops.dsv4.experts_packed
FP32, BF16 = torch.float32, torch.bfloat16
E2M1, E4M3 = "e2m1_1x32", "e4m3_32x32"


def decoded(payload: Tensor, scale: Tensor, kind: str) -> Tensor:
    factors = 2.0 ** (scale.double() - 127)
    if kind == E4M3:
        values = payload.view(torch.float8_e4m3fn).double()
        return values * factors.repeat_interleave(32, -2).repeat_interleave(32, -1)
    grid = torch.cat((E2M1_GRID, -E2M1_GRID)).double()
    codes = torch.stack((payload % 16, payload // 16), -1).flatten(-2).long()
    return grid[codes] * factors.repeat_interleave(32, -1)


def case(n: int, k: int, e: int, kind: str, size: int = 64, inner: int = 32) -> tuple[Tensor, ...]:
    def stored(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        if kind == E2M1:
            return torch.randint(0, 256, (e, rows, columns // 2)).byte(), _scales(e, rows, columns // 32)
        values = torch.randn(e, rows, columns).mul(8).to(torch.float8_e4m3fn).view(torch.uint8)
        return values, _scales(e, rows // 32, columns // 32)

    x, indices, weights = torch.randn(n, size), torch.randint(0, e, (n, k)), torch.rand(n, k)
    return x.to(BF16), indices, weights, *stored(2 * inner, size), *stored(size, inner)


def _scales(*shape: int) -> Tensor:
    return torch.randint(120, 124, shape, dtype=torch.uint8)


def oracle(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor,
           limit: float, kind: str) -> Tensor:  # fmt: skip
    """The roundings of the release in float64: activations to E4M3, gate, up, act and the result to bf16."""
    up_all, down_all = decoded(w13, s13, kind), decoded(w2, s2, kind)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(indices.shape[1]):
            e = int(indices[t, j])
            if e < 0:
                continue
            gate, up = (up_all[e] @ fp8(x[t])).to(BF16).double().chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            act = (gate / (1 + torch.exp(-gate)) * up * weights[t, j].double()).to(BF16)
            out[t] += (down_all[e] @ fp8(act)).to(BF16).double()
    return out


@pytest.mark.parametrize("kind", [E2M1, E4M3])
def test_matches_float64(kind: str) -> None:
    """Equal up to a rounding of gate, up or act that falls the other way: rare, and then one step of E4M3."""
    args = case(9, 2, 5, kind)
    args[1][2, 0] = -1
    want = oracle(*args, 10.0, kind)
    got = experts_packed(*args, 10.0, kind, FP32).double()
    assert ((got - want).abs() <= 0.06 * want.abs().amax(-1, keepdim=True)).all()
    assert (got == want).double().mean() > 0.9
    half = experts_packed(*args, 10.0, kind, BF16)
    assert half.dtype == BF16 and torch.equal(half, got.to(BF16))


def test_unused_experts_and_skipped_pairs() -> None:
    x, indices, weights, w13, s13, w2, s2 = case(5, 2, 4, E2M1)
    indices %= 3
    indices[1] = -1
    weights[1] = float("nan")
    s13[3], s2[3] = 255, 255  # NaN
    out = experts_packed(x, indices, weights, w13, s13, w2, s2, 10.0, E2M1, FP32)
    assert out.isfinite().all() and (out[1] == 0).all()


def test_e4m3_tensors_are_their_bytes() -> None:
    args = list(case(4, 2, 3, E4M3))
    want = experts_packed(*args, 10.0, E4M3, FP32)
    args[3], args[5] = args[3].view(torch.float8_e4m3fn), args[5].view(torch.float8_e4m3fn)
    assert torch.equal(experts_packed(*args, 10.0, E4M3, FP32), want)


def test_arguments_are_checked() -> None:
    names = ("x", "indices", "weights", "w13", "s13", "w2", "s2")
    good = dict(zip(names, case(3, 2, 4, E2M1)))

    def call(kind: str = E2M1, **change: Any) -> None:
        experts_packed(*(good | change).values(), 10.0, kind, FP32)

    with pytest.raises(IndexError, match="indices is 4; allowed: -1 <= indices < 4"):
        call(indices=torch.full((3, 2), 4))
    with pytest.raises(ValueError, match="weight_format is 'fp4'; allowed: 'e2m1_1x32', 'e4m3_32x32'"):
        call("fp4")
    with pytest.raises(ValueError, match=r"shape of w13 is \[4, 64, 32\]; allowed: \[4, 64, 64\]"):
        call(E4M3)
    with pytest.raises(ValueError, match="last axis of x is 48; allowed: a multiple of 32"):
        call(x=good["x"][:, :48])
    with pytest.raises(ValueError, match=r"shape of w2_scale is \[4, 64, 2\]; allowed: \[4, 64, 1\]"):
        call(s2=torch.zeros(4, 64, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match="dtype of w13_scale is torch.float32; allowed: torch.uint8"):
        call(s13=good["s13"].float())
