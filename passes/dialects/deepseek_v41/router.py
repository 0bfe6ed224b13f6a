"""The router in float32 (model_v41 2.9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.engine import Pattern

_INPUTS = {"x": "act[N D]", "weight": "f32[E D]", "bias": "f32[E]"}


def _pick(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    scores = F.softplus(F.linear(x.float(), weight)).sqrt()
    experts = (scores + bias).topk(top_k).indices
    return scores.gather(-1, experts), experts


def _normalised(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, norm_eps: float
) -> tuple[Tensor, Tensor]:
    weights, experts = _pick(x, weight, bias, top_k)
    return weights / (weights.sum(-1, keepdim=True) + norm_eps) * scale, experts


def _normalised_op(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, norm_eps: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.dsv4.router(x, weight, bias, None, top_k, "sqrtsoftplus", True, norm_eps, scale, True)


def _plain(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    weights, experts = _pick(x, weight, bias, top_k)
    return weights * scale, experts


def _plain_op(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.dsv4.router(x, weight, bias, None, top_k, "sqrtsoftplus", False, 0.0, scale, True)


PATTERNS = (
    Pattern(
        "router.fp32", "router", "deepseek_v41", _normalised, _normalised_op, inputs=_INPUTS,
        scalars={"top_k": 113, "scale": 1.2347, "norm_eps": 3.1415e-9},
    ),
    Pattern(
        "router.fp32.unnormalised", "router", "deepseek_v41", _plain, _plain_op, inputs=_INPUTS,
        scalars={"top_k": 113, "scale": 1.2347},
    ),
)  # fmt: skip
