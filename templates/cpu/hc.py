"""Hyper-connections on the CPU: the mixes, Sinkhorn and collapse of a block in one pass over the streams.

`cxx/hc.cpp.jinja` is generated for a number of streams n. A few tokens at a time are multiplied with `fn` and squared
for the norm; sigmoid and Sinkhorn run on sixteen tokens side by side; the collapse and its RMSNorm then find the
streams in the cache. Many bf16 tokens are multiplied on AMX tiles, with `fn` as the sum of three bf16 matrices, which
loses nothing against an fp32 product. Scaling by the inverse root mean square always follows the product: for a linear
map that differs from norming first only in fp32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.native import ELEMENT, plain, pointer
from dscompile.templates.cpu.record import CpuTemplate

MAX_STREAMS = 8


def _fits(streams: Tensor, rows: int, fn: Tensor, scale: Tensor, scales: int, base: Tensor) -> bool:
    if streams.dim() < 2 or streams.dtype not in ELEMENT or not 1 <= streams.shape[-2] <= MAX_STREAMS:
        return False
    n, d = streams.shape[-2:]
    return d > 0 and fn.shape == (rows, n * d) and scale.numel() == scales and base.numel() == rows


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_in: Tensor | None,
    norm_weight: Tensor | None,
    mix_eps: float,
    hc_eps: float,
    iters: int,
    norm_eps: float,
    norm_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dsv4::hc_pre`: streams [..., n, D] -> (x [..., D], pre [..., n], post [..., n], comb [..., n, n])."""
    n = streams.shape[-2] if streams.dim() >= 2 else 0
    fits = (
        _fits(streams, n * (n + 2), fn, scale, 3, base)
        and iters > 0
        and (pre_in is None or pre_in.shape == streams.shape[:-1])
        and (norm_weight is None or norm_weight.shape == streams.shape[-1:])
    )
    kernel = native.function("hc", "hc_mixes", "pqqpqppppffifppppi", streams.dtype, n=n) if fits else None
    if kernel is None:
        out: tuple[Tensor, Tensor, Tensor, Tensor] = OPS["hc_pre"].reference(
            streams, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps, norm_first
        )
        return out
    d = streams.shape[-1]
    lead = streams.shape[:-2]
    streams = streams.contiguous()
    fn, scale, base = plain(fn, torch.float32), plain(scale, torch.float32), plain(base, torch.float32)
    pre_in = None if pre_in is None else plain(pre_in, torch.float32)
    norm_weight = None if norm_weight is None else plain(norm_weight, torch.float32)
    x = streams.new_empty((*lead, d))
    pre = streams.new_empty((*lead, n), dtype=torch.float32)
    post = torch.empty_like(pre)
    comb = streams.new_empty((*lead, n, n), dtype=torch.float32)
    kernel(
        streams.data_ptr(), pre.numel() // n, d, fn.data_ptr(), fn.shape[0],
        scale.data_ptr(), base.data_ptr(), pointer(pre_in), pointer(norm_weight), mix_eps, hc_eps, iters, norm_eps,
        x.data_ptr(), pre.data_ptr(), post.data_ptr(), comb.data_ptr(), native.threads(),
    )  # fmt: skip
    return x, pre, post, comb


def hc_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float) -> Tensor:
    """`dsv4::hc_head`: streams [..., n, D] -> [..., D]."""
    n = streams.shape[-2] if streams.dim() >= 2 else 0
    fits = _fits(streams, n, fn, scale, 1, base)
    kernel = native.function("hc", "hc_mixes", "pqqpqppppffifppppi", streams.dtype, n=n) if fits else None
    if kernel is None:
        out: Tensor = OPS["hc_head"].reference(streams, fn, scale, base, mix_eps, hc_eps)
        return out
    d = streams.shape[-1]
    streams = streams.contiguous()
    fn, scale, base = plain(fn, torch.float32), plain(scale, torch.float32), plain(base, torch.float32)
    x = streams.new_empty((*streams.shape[:-2], d))
    pre = streams.new_empty(streams.shape[:-1], dtype=torch.float32)
    kernel(
        streams.data_ptr(), pre.numel() // n, d, fn.data_ptr(), n,
        scale.data_ptr(), base.data_ptr(), None, None, mix_eps, hc_eps, 0, 0.0,
        x.data_ptr(), pre.data_ptr(), None, None, native.threads(),
    )  # fmt: skip
    return x


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool) -> Tensor:
    """`dsv4::hc_post`: y [..., D], streams [..., n, D], post [..., n], comb [..., n, n] -> [..., n, D]."""
    fits = (
        streams.dim() >= 2
        and streams.dtype in ELEMENT
        and y.dtype == streams.dtype
        and 1 <= streams.shape[-2] <= MAX_STREAMS
        and y.shape == (*streams.shape[:-2], streams.shape[-1])
        and post.shape == streams.shape[:-1]
        and comb.shape == (*streams.shape[:-1], streams.shape[-2])
    )
    n = streams.shape[-2] if fits else 0
    kernel = native.function("hc", "hc_post", "ppppqqipi", streams.dtype, n=n) if fits else None
    if kernel is None:
        reference: Tensor = OPS["hc_post"].reference(y, streams, post, comb, fp32)
        return reference
    y, streams = y.contiguous(), streams.contiguous()
    post, comb = plain(post, torch.float32), plain(comb, torch.float32)
    out = torch.empty_like(streams)
    kernel(
        y.data_ptr(), streams.data_ptr(), post.data_ptr(), comb.data_ptr(),
        post.numel() // n, streams.shape[-1], int(fp32), out.data_ptr(), native.threads(),
    )  # fmt: skip
    return out


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """`dsv4::sinkhorn`: logits [..., n, n] -> fp32 [..., n, n]."""
    n = logits.shape[-1] if logits.dim() >= 2 else 0
    fits = 1 <= n <= MAX_STREAMS and logits.shape[-2] == n and logits.dtype in ELEMENT and iters > 0
    kernel = native.function("hc", "hc_sinkhorn", "pqifpi", torch.float32, n=n) if fits else None
    if kernel is None:
        reference: Tensor = OPS["sinkhorn"].reference(logits, iters, eps)
        return reference
    logits = plain(logits, torch.float32)
    out = torch.empty_like(logits)
    kernel(logits.data_ptr(), logits.numel() // (n * n), iters, eps, out.data_ptr(), native.threads())
    return out


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("hc_pre", "dsv4::hc_pre", "opaque", hc_pre),
    CpuTemplate("hc_head", "dsv4::hc_head", "opaque", hc_head),
    CpuTemplate("hc_post", "dsv4::hc_post", "opaque", hc_post),
    CpuTemplate("sinkhorn", "dsv4::sinkhorn", "opaque", sinkhorn),
)
