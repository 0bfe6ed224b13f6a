"""Manifold-constrained hyper-connections: collapse the residual streams into one, and spread the result back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.norm import rms_norm
from dscompile.ops.registry import define
from dscompile.ops.sinkhorn import sinkhorn

_PRE, _POST, _HEAD = Check("hc_pre"), Check("hc_post"), Check("hc_head")


def _check_streams(check: Check, streams: Tensor) -> tuple[Any, Any]:
    check.dtype("streams", streams, FLOATS)
    check.min_rank("streams", streams, 2, "[..., n, D]")
    return streams.shape[-2], streams.shape[-1]


def _check_mix(check: Check, fn: Tensor, scale: Tensor, base: Tensor, mixes: Any, width: Any, scales: int) -> None:
    for name, tensor, shape in (("fn", fn, (mixes, width)), ("scale", scale, (scales,)), ("base", base, (mixes,))):
        check.dtype(name, tensor, FLOATS)
        check.shape(name, tensor, shape)


def mix_streams(streams: Tensor, fn: Tensor, eps: float, norm_first: bool) -> Tensor:
    """streams [..., n, D], fn [m, nD] -> fp32 [..., m]: the normalised, flattened streams times fn transposed."""
    flat = streams.flatten(-2).float()
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    if norm_first:
        return F.linear(flat * scale, fn.float())
    return F.linear(flat, fn.float()) * scale


def split_mixes(
    mixes: Tensor, scale: Tensor, base: Tensor, n: int, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """mixes fp32 [..., (2 + n) n] -> pre, post [..., n] and comb [..., n, n], all fp32."""
    pre_mix, post_mix, comb_mix = mixes.split([n, n, n * n], -1)
    pre_base, post_base, comb_base = base.float().split([n, n, n * n])
    pre_scale, post_scale, comb_scale = scale.float().unbind(0)
    pre = torch.sigmoid(pre_mix * pre_scale + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post_mix * post_scale + post_base)
    comb = sinkhorn((comb_mix * comb_scale + comb_base).unflatten(-1, (n, n)), iters, hc_eps)
    return pre, post, comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum over j of pre[..., j] * streams[..., j, :] in fp32, rounded once to streams.dtype."""
    return (pre.float().unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


def _validate_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor | None, norm_weight: Tensor | None,
    mix_eps: float, hc_eps: float, iters: int, norm_eps: float,
) -> None:  # fmt: skip
    n, width = _check_streams(_PRE, streams)
    _check_mix(_PRE, fn, scale, base, (2 + n) * n, n * width, 3)
    _PRE.positive("iters", iters)
    for name, eps in (("mix_eps", mix_eps), ("hc_eps", hc_eps), ("norm_eps", norm_eps)):
        _PRE.that(eps >= 0, name, eps, ">= 0")
    if pre_in is not None:
        _PRE.dtype("pre_in", pre_in, FLOATS)
        _PRE.shape("pre_in", pre_in, streams.shape[:-1])
    if norm_weight is not None:
        _PRE.dtype("norm_weight", norm_weight, FLOATS)
        _PRE.shape("norm_weight", norm_weight, (width,))


def hc_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor | None, norm_weight: Tensor | None,
    mix_eps: float, hc_eps: float, iters: int, norm_eps: float, norm_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Mix weights of one sublayer and its collapsed, normalised input.

    streams [..., n, D]; fn [(2 + n) n, n D], scale [3], base [(2 + n) n]; pre_in [..., n] or None; norm_weight [D] or
    None. Returns x [..., D] in streams.dtype, and pre, post [..., n], comb [..., n, n] in fp32.

    The mix is the product of fn with the flattened streams, divided by their root mean square before it
    (`norm_first`, transformers) or after it (DeepSeek's code). pre = sigmoid + hc_eps, post = 2 sigmoid,
    comb = sinkhorn. The collapse uses pre_in where given (V4.1: the previous sublayer's pre), else pre (V4); it is
    rounded to streams.dtype and then RMS-normalised ("fp32" rounding) unless norm_weight is None.
    """
    _validate_pre(streams, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps)
    mixes = mix_streams(streams, fn, mix_eps, norm_first)
    pre, post, comb = split_mixes(mixes, scale, base, streams.shape[-2], hc_eps, iters)
    x = collapse(streams, pre if pre_in is None else pre_in)
    return (x if norm_weight is None else rms_norm(x, norm_weight, norm_eps, "fp32")), pre, post, comb


def _validate_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> None:
    n, width = _check_streams(_POST, streams)
    lead = streams.shape[:-2]
    for name, tensor, shape in (("y", y, (*lead, width)), ("post", post, (*lead, n)), ("comb", comb, (*lead, n, n))):
        _POST.dtype(name, tensor, FLOATS)
        _POST.shape(name, tensor, shape)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool) -> Tensor:
    """out[..., j, :] = post[j] * y + sum over i of comb[i, j] * streams[i]: y [..., D] -> [..., n, D].

    fp32 True: fp32 arithmetic, rounded once to streams.dtype (DeepSeek's code). False: post and comb are rounded to
    streams.dtype first and the arithmetic is in that dtype (transformers V4).
    """
    _validate_post(y, streams, post, comb)
    dtype = torch.float32 if fp32 else streams.dtype
    spread = post.to(dtype).unsqueeze(-1) * y.to(dtype).unsqueeze(-2)
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams.to(dtype))
    return (spread + mixed).to(streams.dtype)


def _validate_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float) -> None:
    n, width = _check_streams(_HEAD, streams)
    _check_mix(_HEAD, fn, scale, base, n, n * width, 1)
    _HEAD.that(mix_eps >= 0, "mix_eps", mix_eps, ">= 0")
    _HEAD.that(hc_eps >= 0, "hc_eps", hc_eps, ">= 0")


def hc_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float) -> Tensor:
    """V4's learned last collapse: streams [..., n, D], fn [n, n D], scale [1], base [n] -> [..., D]."""
    _validate_head(streams, fn, scale, base, mix_eps, hc_eps)
    mixes = mix_streams(streams, fn, mix_eps, norm_first=True)
    return collapse(streams, torch.sigmoid(mixes * scale.float() + base.float()) + hc_eps)


def _pre_fake(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor | None, norm_weight: Tensor | None,
    mix_eps: float, hc_eps: float, iters: int, norm_eps: float, norm_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _validate_pre(streams, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps)
    lead, n = streams.shape[:-2], streams.shape[-2]
    gates = streams.new_empty((*lead, n), dtype=torch.float32)
    comb = streams.new_empty((*lead, n, n), dtype=torch.float32)
    return streams.new_empty((*lead, streams.shape[-1])), gates, torch.empty_like(gates), comb


def _post_fake(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool) -> Tensor:
    _validate_post(y, streams, post, comb)
    return streams.new_empty(streams.shape)


def _head_fake(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float) -> Tensor:
    _validate_head(streams, fn, scale, base, mix_eps, hc_eps)
    return streams.new_empty((*streams.shape[:-2], streams.shape[-1]))


@costed
def _pre_cost(N: Any, n: Any, D: Any, x_bytes: Any = 2, fn_bytes: Any = 4) -> Cost:
    """N tokens of n streams: one product with fn of (2 + n) n rows."""
    mixes = (2 + n) * n
    read = N * n * D * x_bytes + mixes * n * D * fn_bytes
    return Cost(read, N * (D * x_bytes + mixes * 4), 2 * N * mixes * n * D)


@costed
def _post_cost(N: Any, n: Any, D: Any, x_bytes: Any = 2) -> Cost:
    """N tokens: y and n streams in, n streams out."""
    return Cost(N * ((n + 1) * D * x_bytes + (n + n * n) * 4), N * n * D * x_bytes, 2 * N * n * (n + 1) * D)


@costed
def _head_cost(N: Any, n: Any, D: Any, x_bytes: Any = 2, fn_bytes: Any = 4) -> Cost:
    """N tokens of n streams: one product with fn of n rows, one weighted sum."""
    return Cost(N * n * D * x_bytes + n * n * D * fn_bytes, N * D * x_bytes, 2 * N * n * n * D + 2 * N * n * D)


def _stream_sizes(streams: Tensor) -> dict[str, Any]:
    n, width = streams.shape[-2:]
    return {"N": math.prod(streams.shape[:-2]), "n": n, "D": width, "x_bytes": streams.element_size()}


def _mix_sizes(streams: Tensor, fn: Tensor, *rest: Any) -> dict[str, Any]:
    return {**_stream_sizes(streams), "fn_bytes": fn.element_size()}


def _post_sizes(y: Tensor, streams: Tensor, *rest: Any) -> dict[str, Any]:
    return _stream_sizes(streams)


define(
    "hc_pre(Tensor streams, Tensor fn, Tensor scale, Tensor base, Tensor? pre_in, Tensor? norm_weight, float mix_eps, "
    "float hc_eps, int iters, float norm_eps, bool norm_first) -> (Tensor x, Tensor pre, Tensor post, Tensor comb)",
    family="mhc", reference=hc_pre, fake=_pre_fake, cost=_pre_cost, sizes=_mix_sizes,
)  # fmt: skip
define(
    "hc_post(Tensor y, Tensor streams, Tensor post, Tensor comb, bool fp32) -> Tensor",
    family="mhc", reference=hc_post, fake=_post_fake, cost=_post_cost, sizes=_post_sizes,
)  # fmt: skip
define(
    "hc_head(Tensor streams, Tensor fn, Tensor scale, Tensor base, float mix_eps, float hc_eps) -> Tensor",
    family="mhc", reference=hc_head, fake=_head_fake, cost=_head_cost, sizes=_mix_sizes,
)  # fmt: skip
