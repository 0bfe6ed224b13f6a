"""A mixture of experts with its shared expert and the way back: float64 oracles, roundings, arguments."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dscompile.ops  # noqa: F401

dsv4 = torch.ops.dsv4
FP32, BF16 = torch.float32, torch.bfloat16
E2M1, E4M3 = "e2m1_1x32", "e4m3_32x32"


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    if 0 < limit < math.inf:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (g / (1 + torch.exp(-g)) * u) @ down.double().T


def spread(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("nij,nid->njd", comb.double(), streams.double())
    return post.double()[..., None] * y[:, None] + mixed


def case(n: int, k: int, e: int, inner: int = 12, shared: int = 20, dtype: torch.dtype = FP32) -> list[Any]:
    x, indices, weights = torch.randn(n, 16), torch.randint(0, e, (n, k)), torch.rand(n, k)
    stacks = torch.randn(e, 2 * inner, 16), torch.randn(e, 16, inner)
    own = torch.randn(shared, 16), torch.randn(shared, 16), torch.randn(16, shared)
    return [x.to(dtype), indices, weights, *(t.to(dtype) for t in (*stacks, *own))]


def streams_of(n: int, size: int = 16, dtype: torch.dtype = FP32) -> list[Tensor]:
    return [torch.randn(n, 4, size).to(dtype), torch.rand(n, 4), torch.rand(n, 4, 4)]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("limit", [10.0, 0.7, 0.0, math.inf])
def test_matches_float64(before: bool, limit: float) -> None:
    args = case(7, 3, 5)
    args[1][2] = -1
    x, indices, weights, w13, w2, gate, up, down = args
    want = gated(x, gate, up, down, limit)
    for t in range(7):
        for j, e in enumerate(indices[t].tolist()):
            if e >= 0:
                w1, w3 = w13[e].chunk(2)
                want[t] += weights[t, j].double() * gated(x[t : t + 1], w1, w3, w2[e], limit)[0]
    y = dsv4.moe(*args, limit, before, FP32, None, None, None, True)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)
    given = streams_of(7)
    out = dsv4.moe(*args, limit, before, FP32, *given, True)
    torch.testing.assert_close(out.double(), spread(want, *given), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fp32", [True, False])
def test_equals_the_parts_it_stands_for(before: bool, fp32: bool) -> None:
    """Bit for bit: the graph of DeepSeek's layer, and with `before` False that of transformers' V4."""
    args, given = case(9, 2, 4, dtype=BF16), streams_of(9, dtype=BF16)
    x, indices, weights, w13, w2, gate, up, down = args
    kind, routed_dtype = (FP32, FP32) if before else (BF16, BF16)
    routed = dsv4.experts(x, indices, weights, w13, w2, 0.9, before, routed_dtype)
    g, u = (x @ gate.T).to(kind), (x @ up.T).to(kind)
    s = (torch.nn.functional.silu(g.clamp(max=0.9)) * u.clamp(-0.9, 0.9)).to(BF16) @ down.T
    y = (routed.float() + s.float()).to(BF16)
    if not before:
        assert torch.equal(y, routed + s)
    assert torch.equal(dsv4.moe(*args, 0.9, before, routed_dtype, None, None, None, True), y)
    want = dsv4.hc_post(y, *given, fp32)
    assert torch.equal(dsv4.moe(*args, 0.9, before, routed_dtype, *given, fp32), want)


def packed_case(n: int, kind: str, size: int = 64, inner: int = 32, shared: int = 96) -> list[Any]:
    def stored(*shape: int, kind: str = E4M3) -> tuple[Tensor, Tensor]:
        *lead, rows, columns = shape
        if kind == E2M1:
            return torch.randint(0, 256, (*lead, rows, columns // 2)).byte(), scales(*lead, rows, columns // 32)
        values = torch.randn(shape).mul(8).to(torch.float8_e4m3fn).view(torch.uint8)
        return values, scales(*lead, rows // 32, columns // 32)

    def scales(*shape: int) -> Tensor:
        return torch.randint(118, 121, shape, dtype=torch.uint8)

    x, indices, weights = torch.randn(n, size).to(BF16), torch.randint(0, 4, (n, 2)), torch.rand(n, 2)
    return [
        x, indices, weights, *stored(4, 2 * inner, size, kind=kind), *stored(4, size, inner, kind=kind),
        *stored(shared, size), *stored(shared, size), *stored(size, shared),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [E2M1, E4M3])
def test_the_packed_shared_expert_is_an_expert_of_every_token(kind: str) -> None:
    """With weight 1, in the format that `experts_packed` calls e4m3_32x32: equal but for sums in another order."""
    args, given = packed_case(6, kind), streams_of(6, 64, BF16)
    routed = dsv4.experts_packed(*args[:7], 10.0, kind, FP32)
    gate, gate_scale, up, up_scale, down, down_scale = args[7:]
    both, scale = torch.cat((gate, up))[None], torch.cat((gate_scale, up_scale))[None]
    one = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    s = dsv4.experts_packed(args[0], *one, both, scale, down[None], down_scale[None], 10.0, E4M3, BF16)
    y = (routed + s.float()).to(BF16)
    got = dsv4.moe_packed(*args, 10.0, kind, FP32, None, None, None, True)
    assert got.dtype == BF16 and (got == y).double().mean() > 0.95
    torch.testing.assert_close(got, y, rtol=0.05, atol=0.05 * float(y.abs().max()))
    out = dsv4.moe_packed(*args, 10.0, kind, FP32, *given, True)
    assert torch.equal(out, dsv4.hc_post(got, *given, True))


def test_the_packed_form_is_near_the_dense_one() -> None:
    """The same weights in bf16: only the activations' rounding to E4M3 differs."""
    args = packed_case(6, E4M3)
    dense = []
    for payload, scale in zip(args[3::2], args[4::2], strict=True):
        wide = scale.double().sub(127).exp2().repeat_interleave(32, -2).repeat_interleave(32, -1)
        dense.append((payload.view(torch.float8_e4m3fn).double() * wide).to(BF16))
    want = dsv4.moe(*args[:3], *dense, 10.0, True, FP32, None, None, None, True).double()
    got = dsv4.moe_packed(*args, 10.0, E4M3, FP32, None, None, None, True).double()
    assert (got - want).norm() < 0.08 * want.norm()


def test_arguments_are_checked() -> None:
    args, given = case(3, 2, 4), streams_of(3)
    rest = (10.0, True, FP32)
    with pytest.raises(IndexError, match="indices is 4; allowed: -1 <= indices < 4"):
        dsv4.moe(args[0], torch.full((3, 2), 4), *args[2:], *rest, *given, True)
    with pytest.raises(ValueError, match="all of streams, post and comb, or none"):
        dsv4.moe(*args, *rest, given[0], None, None, True)
    with pytest.raises(ValueError, match=r"shape of streams is \[2, 4, 16\]; allowed: \[3, 4, 16\]"):
        dsv4.moe(*args, *rest, given[0][:2], *given[1:], True)
    with pytest.raises(ValueError, match=r"shape of shared_down is \[16, 19\]; allowed: \[16, 20\]"):
        dsv4.moe(*args[:-1], args[-1][:, 1:], *rest, *given, True)
    with pytest.raises(TypeError, match=r"dtype of shared_up is torch.bfloat16; allowed: torch.float32"):
        dsv4.moe(*args[:6], args[6].to(BF16), args[7], *rest, *given, True)
    stored = packed_case(3, E2M1)
    with pytest.raises(ValueError, match=r"shape of shared_up_scale is \[2, 2\]; allowed: \[3, 2\]"):
        dsv4.moe_packed(*stored[:10], stored[10][1:], *stored[11:], 10.0, E2M1, FP32, None, None, None, True)
    with pytest.raises(ValueError, match="weight_format is 'fp4'"):
        dsv4.moe_packed(*stored, 10.0, "fp4", FP32, None, None, None, True)


def test_costs() -> None:
    """What it saves: the results that no longer leave the chip."""
    from dscompile.ops import OPS

    args, given = case(8, 2, 4, dtype=BF16), streams_of(8, dtype=BF16)
    experts = OPS["experts"].cost_of(*args[:5], 10.0, True, FP32).numbers()
    post = OPS["hc_post"].cost_of(args[0], *given, True).numbers()
    shared = sum(t.nbytes for t in args[5:])
    y = args[0].nbytes
    whole = OPS["moe"].cost_of(*args, 10.0, True, FP32, *given, True).numbers()
    assert whole["read_bytes"] == pytest.approx(experts["read_bytes"] + shared + post["read_bytes"] - y)
    assert whole["write_bytes"] == post["write_bytes"]
    assert whole["flops"] == experts["flops"] + post["flops"] + 6 * 8 * 16 * 20
    alone = OPS["moe"].cost_of(*args, 10.0, True, FP32, None, None, None, True).numbers()
    assert alone["write_bytes"] == y and alone["read_bytes"] == pytest.approx(experts["read_bytes"] + shared)
