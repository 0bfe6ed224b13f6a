"""Hyper-connections with a delayed pre-mix (model_v41 2.1, 2.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.engine import Pattern

_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor, norm_weight: Tensor, mix_eps: float,
    hc_eps: float, iters: int, norm_eps: float,
) -> _Four:  # fmt: skip
    n = streams.shape[-2]
    v = streams.flatten(-2).float()
    mix = F.linear(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + mix_eps)
    pre = torch.sigmoid(mix[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(mix[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mix[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = torch.ops.dsv4.sinkhorn(logits, iters, hc_eps)
    x = (pre_in.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)
    return comb, pre, post, torch.ops.dsv4.rms_norm(x, norm_weight, norm_eps, "fp32")


def _pre_op(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor, norm_weight: Tensor, mix_eps: float,
    hc_eps: float, iters: int, norm_eps: float,
) -> _Four:  # fmt: skip
    x, pre, post, comb = torch.ops.dsv4.hc_pre(
        streams, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps, False
    )
    return comb, pre, post, x


PATTERNS = (
    Pattern(
        "hc_pre.delayed", "mhc", "deepseek_v41", _pre, _pre_op,
        inputs={
            "streams": "act[b t n D]", "fn": "f32[(2+n)*n n*D]", "scale": "f32[3]", "base": "f32[(2+n)*n]",
            "pre_in": "f32[b t n]", "norm_weight": "f32[D]",
        },
        scalars={"mix_eps": 1.3579e-7, "hc_eps": 2.4681e-5, "iters": 113, "norm_eps": 3.5791e-7},
        required=(0, 3),
    ),
)  # fmt: skip
