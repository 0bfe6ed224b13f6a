"""Spellings that models share: found where they are, in every dtype; left alone, with a reason, where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dscompile.ops  # noqa: F401 - registers the vocabulary
from dscompile.passes.dialects.common import mhc, norm, rope, sinkhorn
from dscompile.passes.engine import NearMiss, PassContext, PatternPass, normalise
from dscompile.passes.engine.testing import functional_graph, run_flat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rewrite(fn: Callable[..., Any], *inputs: Tensor, patterns: tuple, dynamic: bool | None = False
            ) -> tuple[list[str], tuple[NearMiss, ...], float, list[Any]]:  # fmt: skip
    """(patterns that matched, near misses, largest difference of the outputs, vocabulary calls) for the graph of fn."""
    gm = functional_graph(fn, *inputs, dynamic=dynamic)
    before = run_flat(gm)
    normalise(gm)
    result = PatternPass("test", patterns).run(gm, PassContext())
    after = run_flat(gm)
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True))
    calls = [n for n in gm.graph.nodes if str(n.target).startswith("dsv4.")]
    return [m.pattern for m in result.matches], result.near_misses, difference, calls


def fp32(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def before_weight(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return w * (h * torch.rsqrt((h * h).mean(-1, True) + 1e-6)).to(x.dtype)


def scale_cast(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spelling", "mode"), [(fp32, "fp32"), (before_weight, "cast_before_weight"),
                                               (scale_cast, "scale_cast")])  # fmt: skip
def test_norms(spelling: Callable[..., Tensor], mode: str, dtype: torch.dtype) -> None:
    """Each rounding is told apart; where x is float32 there is only one weighted form."""
    x, w = torch.randn(3, 5, 24).to(dtype), torch.rand(24)
    found, _, difference, calls = rewrite(spelling, x, w, patterns=norm.PATTERNS)
    assert difference == 0
    [call] = calls
    assert call.args[3] == (mode if dtype != torch.float32 or mode == "scale_cast" else "fp32")
    assert call.args[0].op == "placeholder" and call.args[0].meta["val"].dtype == dtype, found


@pytest.mark.parametrize(("spelling", "reason"), [
    (lambda x, w: w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), None),
    (lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)), "mean"),
    (lambda x, w: (w + 1) * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6)), "pow"),
])  # fmt: skip
def test_other_norms_stay(spelling: Callable[..., Tensor], reason: str | None) -> None:
    found, misses, _, calls = rewrite(spelling, torch.rand(3, 24), torch.rand(24), patterns=norm.PATTERNS)
    assert not found and not calls
    assert reason is None or any(reason in m.reason for m in misses)


def hf_rope(x: Tensor, cos: Tensor, sin: Tensor, axis: int = 1) -> Tensor:
    cos, sin = cos.repeat_interleave(2, dim=-1).unsqueeze(axis), sin.repeat_interleave(2, dim=-1).unsqueeze(axis)
    plain, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    half = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat([plain, (turned.float() * cos + half.float() * sin).to(x.dtype)], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("axis", "batch", "inverse"), [(1, 1, False), (1, 2, True), (2, 2, False), (2, 1, True)])
def test_rotations(axis: int, batch: int, inverse: bool, dtype: torch.dtype) -> None:
    """Heads before or after tokens, angles for each sequence or for all, forward and back."""
    shape = (2, 3, 5, 24) if axis == 1 else (2, 5, 3, 24)
    angles = torch.rand(batch, 5, 8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found, _, difference, calls = rewrite(
        lambda x, c, s: hf_rope(x, c, -s if inverse else s, axis), torch.randn(shape).to(dtype), cos, sin,
        patterns=rope.PATTERNS,
    )  # fmt: skip
    assert len(found) == 1 and calls[0].args[3] is inverse
    assert difference < (1e-6 if dtype == torch.float32 else 0.02)


def test_rotation_by_one_token_of_one_head() -> None:
    """Decoding: axes of size 1 everywhere."""
    angles = torch.rand(1, 1, 8)
    found, *_ = rewrite(hf_rope, torch.randn(1, 1, 1, 24), angles.cos(), angles.sin(), patterns=rope.PATTERNS)
    assert len(found) == 1


def test_rotation_of_halves_stays() -> None:
    """Llama's pairing (i, i + r) is other mathematics."""

    def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (t.repeat(1, 1, 2).unsqueeze(1) for t in (cos, sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    angles = torch.rand(1, 5, 8)
    found, _, _, calls = rewrite(halves, torch.randn(2, 3, 5, 16), angles.cos(), angles.sin(), patterns=rope.PATTERNS)
    assert not found and not calls


def unrolled(logits: Tensor, axes: tuple[int, ...], eps: tuple[float, ...] = (1e-6,)) -> Tensor:
    m = logits.softmax(-1) + eps[0]
    for i, axis in enumerate(axes):
        m = m / (m.sum(axis, keepdim=True) + eps[min(i, len(eps) - 1)])
    return m


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (3, 2, 2), (1, 1, 1, 1)])
def test_sinkhorn_counts_its_iterations(iters: int, shape: tuple[int, ...]) -> None:
    axes = (-2, *(-1, -2) * (iters - 1))
    found, misses, difference, calls = rewrite(
        lambda x: unrolled(x, axes), torch.randn(shape), patterns=sinkhorn.PATTERNS, dynamic=None
    )
    assert found == ["sinkhorn"] and not misses
    assert calls[0].args[1:] == (iters, 1e-6)
    assert difference < 1e-6


def shared(x: Tensor) -> tuple[Tensor, Tensor]:
    m = x.softmax(-1) + 1e-6
    first = m / (m.sum(-2, keepdim=True) + 1e-6)
    second = first / (first.sum(-1, keepdim=True) + 1e-6)
    return second / (second.sum(-2, keepdim=True) + 1e-6), second * 2


@pytest.mark.parametrize(("chain", "reason"), [
    (lambda x: unrolled(x, (-2, -1)), "ends on a division by row sums"),
    (lambda x: unrolled(x, (-2, -2, -1)), "a sum over axis 2"),
    (lambda x: unrolled(x, (-2, -1, -2), (1e-6, 1e-6, 1e-5)), "eps is"),
    (lambda x: unrolled(x, (-2, -1, -2), (1e-5, 1e-6)), None),
    (lambda x: unrolled(x, (-1, -2)), None),
    (shared, "also used elsewhere"),
])  # fmt: skip
def test_other_chains_stay(chain: Callable[..., Any], reason: str | None) -> None:
    """Order, eps and who else reads a matrix are checked step by step."""
    found, misses, difference, calls = rewrite(chain, torch.randn(2, 4, 4), patterns=sinkhorn.PATTERNS)
    assert not found and not calls and difference == 0
    assert misses and (reason is None or any(reason in m.reason for m in misses)), misses


def spread(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    moved = torch.matmul(comb.to(streams.dtype).transpose(-1, -2), streams)
    return post.to(streams.dtype).unsqueeze(-1) * y.unsqueeze(-2) + moved


def spread_in_fp32(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    moved = torch.matmul(comb.transpose(-1, -2), streams.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + moved).to(streams.dtype)


def spread_untransposed(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb, streams)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [(2, 5), (1, 1)])
def test_spread_over_streams(dtype: torch.dtype, tokens: tuple[int, int]) -> None:
    inputs = torch.randn(*tokens, 16).to(dtype), torch.randn(*tokens, 4, 16).to(dtype)
    mixes = torch.rand(*tokens, 4), torch.rand(*tokens, 4, 4)
    for fn, in_fp32 in ((spread, False), (spread_in_fp32, dtype != torch.float32)):
        found, _, difference, calls = rewrite(fn, *inputs, *mixes, patterns=mhc.PATTERNS)
        assert found and calls[0].args[4] is in_fp32
        assert difference < (1e-6 if dtype == torch.float32 else 0.05)


def test_another_direction_of_mixing_gets_the_transposed_matrix() -> None:
    """comb is not symmetric: what sums over columns is the same operation on another matrix."""
    inputs = torch.randn(2, 3, 16), torch.randn(2, 3, 4, 16), torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4)
    found, _, difference, calls = rewrite(spread_untransposed, *inputs, patterns=mhc.PATTERNS)
    assert found and difference < 1e-6
    assert calls[0].args[3].target is torch.ops.aten.permute.default


def test_a_write_in_between_stops_a_match() -> None:
    """R22: the two halves of a norm on either side of a write to its input are two programs."""

    def halves(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x.copy_(y)
        return w * (x * r)

    x, y, w = torch.rand(3, 8), torch.rand(3, 8) + 1, torch.rand(8)
    found, _, difference, _ = rewrite(halves, x.clone(), y, w, patterns=norm.PATTERNS)
    assert not found and difference == 0

    def before(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        out = fp32(x, w)
        x.copy_(y)
        return out + x

    found, _, difference, _ = rewrite(before, x.clone(), y, w, patterns=norm.PATTERNS)
    assert found == ["rms_norm.fp32"] and difference == 0


def test_linear_of_a_norm_is_not_a_norm() -> None:
    """A near miss needs most of a pattern: an ordinary layer has none."""
    _, misses, _, _ = rewrite(lambda x, w: F.relu(x @ w), torch.rand(3, 8), torch.rand(8, 8),
                              patterns=norm.PATTERNS + rope.PATTERNS + sinkhorn.PATTERNS + mhc.PATTERNS)  # fmt: skip
    assert misses == ()
