"""From a sublayer's result into the next sublayer: the streams are read once and written once, the mix is made of what
is in registers. Same kernels as `hc`, with a y. Many tokens: the kernel of `hc_post`, then that of `hc`; both at once
do not fit into the registers."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton import hc
from dscompile.templates.triton.hc_post import MANY, hc_post, streams_fit
from dscompile.templates.triton.record import Config, Meta, TritonTemplate


def hc_post_pre(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool, fn: Tensor, scale: Tensor, base: Tensor,
    pre_in: Tensor | None, norm_weight: Tensor | None, mix_eps: float, hc_eps: float, iters: int, norm_eps: float,
    norm_first: bool, *, config: Config, target: Target,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`dsv4::hc_post_pre`: y [..., D], streams [..., n, D], post fp32 [..., n], comb fp32 [..., n, n] -> streams
    [..., n, D], x [..., D], pre and post fp32 [..., n], comb fp32 [..., n, n]."""
    shape, n = streams.shape[:-1], streams.shape[-2]
    pre = streams.new_empty(shape, dtype=torch.float32)
    gates = pre, torch.empty_like(pre), pre.new_empty((*shape, n))
    rest = fn, scale, base, pre_in, norm_weight, gates, (mix_eps, hc_eps, norm_eps), iters, config
    if not config["SPAN"]:
        made = hc_post(y, streams, post, comb, fp32, config=MANY, target=target)
        return made, hc.run(made, *rest), *gates
    made = streams.new_empty(streams.shape)
    return made, hc.run(streams, *rest, (y, post, comb, made, fp32)), *gates


def _applies(meta: Meta) -> str | None:
    return streams_fit(meta["streams"])


TEMPLATES = (TritonTemplate("hc_post_pre", "dsv4::hc_post_pre", hc_post_pre, hc.configs, hc.check, _applies),)
