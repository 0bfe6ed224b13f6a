"""RMS normalisation over the last axis, in the three roundings that DeepSeek models use."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

MODES = ("fp32", "scale_cast", "cast_before_weight")
_CHECK = Check("rms_norm")


def _validate(x: Tensor, weight: Tensor | None, eps: float, mode: str) -> torch.dtype:
    """Check the arguments and return the dtype of the result."""
    _CHECK.choice("mode", mode, MODES)
    _CHECK.dtype("x", x, FLOATS)
    _CHECK.min_rank("x", x, 1, "[..., D]")
    _CHECK.that(eps >= 0, "eps", eps, ">= 0")
    if weight is None:
        return x.dtype
    _CHECK.dtype("weight", weight, FLOATS)
    _CHECK.shape("weight", weight, x.shape[-1:])
    return x.dtype if mode == "fp32" else torch.promote_types(x.dtype, weight.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, mode: str) -> Tensor:
    """x [..., D], weight [D] or None -> [..., D].

    With r = rsqrt(mean(x.float()^2) + eps):
    "fp32": (weight * (x.float() * r)).to(x.dtype), one rounding at the end (DeepSeek's code, transformers V4);
    "scale_cast": x * r.to(x.dtype) [* weight] (V4's weightless norms);
    "cast_before_weight": weight * (x.float() * r).to(x.dtype) (transformers V4.1).
    The last two give the promoted dtype of x and weight, as the expressions do.
    """
    _validate(x, weight, eps, mode)
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if mode == "scale_cast":
        out = x * scale.to(x.dtype)
        return out if weight is None else out * weight
    normed = values * scale
    if weight is None:
        return normed.to(x.dtype)
    if mode == "cast_before_weight":
        return weight * normed.to(x.dtype)
    return (weight.float() * normed).to(x.dtype)


def _fake(x: Tensor, weight: Tensor | None, eps: float, mode: str) -> Tensor:
    return x.new_empty(x.shape, dtype=_validate(x, weight, eps, mode))


@costed
def _cost(N: Any, D: Any, x_bytes: Any = 2, weight_bytes: Any = 4) -> Cost:
    """N rows of D values."""
    return Cost(N * D * x_bytes + D * weight_bytes, N * D * x_bytes, 4 * N * D)


def _sizes(x: Tensor, weight: Tensor | None, eps: float, mode: str) -> dict[str, Any]:
    rows = math.prod(x.shape[:-1])
    weight_bytes = 0 if weight is None else weight.element_size()
    return {"N": rows, "D": x.shape[-1], "x_bytes": x.element_size(), "weight_bytes": weight_bytes}


define(
    "rms_norm(Tensor x, Tensor? weight, float eps, str mode) -> Tensor",
    family="norm", reference=rms_norm, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
