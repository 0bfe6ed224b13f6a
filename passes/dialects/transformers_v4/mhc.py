"""Hyper-connections whose input is normalised before the product with `fn`, and whose own pre-mix collapses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.dialects.transformers_v4.autocast import WidenProducts
from dscompile.passes.dialects.transformers_v4.parameters import WidenParameters
from dscompile.passes.engine import Pattern

_Three = tuple[Tensor, Tensor, Tensor]


def _mix(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float, iters: int) -> _Three:
    """comb, post and the collapsed streams; near misses are looked for at a Sinkhorn chain, so comb comes first."""
    n = streams.shape[-2]
    flat = torch.ops.dsv4.rms_norm(streams.flatten(-2).float(), None, mix_eps, "scale_cast")
    pre, post, comb = F.linear(flat, fn).split([n, n, n * n], -1)
    pre_base, post_base, comb_base = base.split([n, n, n * n])
    pre_scale, post_scale, comb_scale = scale.unbind(0)
    pre = torch.sigmoid(pre * pre_scale + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * post_scale + post_base)
    comb = comb.reshape(*comb.shape[:-1], n, n) * comb_scale + comb_base.view(n, n)
    comb = torch.ops.dsv4.sinkhorn(comb, iters, hc_eps)
    return comb, post, (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


def _pre(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float, iters: int) -> _Three:
    return _mix(streams, fn, scale, base, mix_eps, hc_eps, iters)


def _pre_op(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float, iters: int
) -> _Three:
    x, _, post, comb = torch.ops.dsv4.hc_pre(
        streams, fn, scale, base, None, None, mix_eps, hc_eps, iters, 0.0, True
    )  # fmt: skip
    return comb, post, x


def _pre_norm(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, mix_eps: float, hc_eps: float,
    iters: int, norm_eps: float,
) -> _Three:  # fmt: skip
    comb, post, x = _mix(streams, fn, scale, base, mix_eps, hc_eps, iters)
    return comb, post, torch.ops.dsv4.rms_norm(x, norm_weight, norm_eps, "fp32")


def _pre_norm_op(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, mix_eps: float, hc_eps: float,
    iters: int, norm_eps: float,
) -> _Three:  # fmt: skip
    x, _, post, comb = torch.ops.dsv4.hc_pre(
        streams, fn, scale, base, None, norm_weight, mix_eps, hc_eps, iters, norm_eps, True
    )  # fmt: skip
    return comb, post, x


def _head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float) -> Tensor:
    flat = torch.ops.dsv4.rms_norm(streams.flatten(-2).float(), None, mix_eps, "scale_cast")
    pre = torch.sigmoid(F.linear(flat, fn) * scale + base) + hc_eps
    return (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


def _head_op(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float) -> Tensor:
    return torch.ops.dsv4.hc_head(streams, fn, scale, base, mix_eps, hc_eps)


_INPUTS = {
    "streams": "act[b t n D]", "fn": "f32[(2+n)*n n*D]", "scale": "f32[3]", "base": "f32[(2+n)*n]",
}  # fmt: skip
_SCALARS = {"mix_eps": 1.3579e-7, "hc_eps": 2.4681e-5, "iters": 113}

#: What leads to comb is a third of it all; a Sinkhorn chain hardly stands anywhere else.
_SHARE = 0.1

HC_PRE_NORM = Pattern(
    name="hc_pre.norm_first.with_norm", family="mhc", dialect="transformers_v4", search=_pre_norm,
    replace=_pre_norm_op, inputs={**_INPUTS, "norm_weight": "w[D]"}, scalars={**_SCALARS, "norm_eps": 3.5791e-7},
    key=torch.ops.dsv4.sinkhorn.default, required=(0, 2), share=_SHARE,
)  # fmt: skip
HC_PRE = Pattern(
    name="hc_pre.norm_first", family="mhc", dialect="transformers_v4", search=_pre, replace=_pre_op,
    inputs=_INPUTS, scalars=_SCALARS, key=torch.ops.dsv4.sinkhorn.default, required=(0, 2), share=_SHARE,
)  # fmt: skip
HC_HEAD = Pattern(
    name="hc_head", family="mhc", dialect="transformers_v4", search=_head, replace=_head_op,
    inputs={"streams": "act[b t n D]", "fn": "f32[n n*D]", "scale": "f32[1]", "base": "f32[n]"},
    scalars={"mix_eps": 1.3579e-7, "hc_eps": 2.4681e-5}, key=torch.ops.dsv4.rms_norm.default,
    share=0.8,  # without a product with fn it is most of a hyper-connection
)  # fmt: skip

PATTERNS = (HC_PRE_NORM, HC_PRE, HC_HEAD)
PASSES = (WidenProducts(), WidenParameters())
