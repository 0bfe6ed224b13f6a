"""The way back into the residual streams and the mix of the next sublayer."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern

_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_FLAGS = ((True, False), (True, True), (False, False), (False, True))


def _pattern(delayed: bool, fp32: bool, norm_first: bool) -> Pattern:
    def search(
        y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
        norm_weight: Tensor, mix_eps: float, hc_eps: float, iters: int, norm_eps: float, pre_in: Tensor | None = None,
    ) -> _Five:  # fmt: skip
        new = torch.ops.dsv4.hc_post(y, streams, post, comb, fp32)
        x, pre, post, comb = torch.ops.dsv4.hc_pre(
            new, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps, norm_first
        )
        return x, new, pre, post, comb

    def replace(
        y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
        norm_weight: Tensor, mix_eps: float, hc_eps: float, iters: int, norm_eps: float, pre_in: Tensor | None = None,
    ) -> _Five:  # fmt: skip
        new, x, pre, post, comb = torch.ops.dsv4.hc_post_pre(
            y, streams, post, comb, fp32, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps,
            norm_first,
        )  # fmt: skip
        return x, new, pre, post, comb

    inputs = {
        "y": "act[b t D]", "streams": "act[b t n D]", "post": "f32[b t n]", "comb": "f32[b t n n]",
        "fn": "w[(2+n)*n n*D]", "scale": "w[3]", "base": "w[(2+n)*n]", "norm_weight": "w[D]",
    }  # fmt: skip
    if delayed:
        inputs["pre_in"] = "f32[b t n]"
    name = f"hc_post_pre.{'delayed' if delayed else 'own'}.{int(fp32)}{int(norm_first)}"
    return Pattern(
        name, "mhc", "fusing", search, replace, inputs=inputs,
        scalars={"mix_eps": 1.3579e-7, "hc_eps": 2.4681e-5, "iters": 113, "norm_eps": 3.5791e-7},
    )  # fmt: skip


PATTERNS = tuple(_pattern(delayed, *flags) for delayed in (True, False) for flags in _FLAGS)
