"""Rotary position embedding of the tail of the last axis, adjacent pairs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

_CHECK = Check("rope")


def _validate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _CHECK.dtype("x", x, FLOATS)
    _CHECK.dtype("cos", cos, FLOATS)
    _CHECK.dtype("sin", sin, FLOATS)
    _CHECK.min_rank("x", x, 1, "[..., D]")
    _CHECK.min_rank("cos", cos, 1, "[..., rotated // 2]")
    _CHECK.shape("sin", sin, cos.shape)
    half = cos.shape[-1]
    _CHECK.that(2 * half <= x.shape[-1], "2 * last axis of cos", 2 * half, f"<= last axis of x, {x.shape[-1]}")
    _CHECK.broadcasts("cos", cos, (*x.shape[:-1], half))


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """x [..., D]; cos, sin broadcastable to [..., R/2] -> [..., D], x.dtype.

    Rotates the pairs (x[2i], x[2i+1]) of the last R values by (cos, sin), in fp32, rounded once. `inverse` rotates
    back (uses -sin). The leading D - R values pass unchanged.
    """
    _validate(x, cos, sin)
    kept = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., kept:].float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.float(), sin.float()
    if inverse:
        s = -s
    rotated = torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)
    return torch.cat((x[..., :kept], rotated.to(x.dtype)), -1)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    _validate(x, cos, sin)
    return x.new_empty(x.shape)


@costed
def _cost(N: Any, D: Any, R: Any, P: Any, x_bytes: Any = 2, cos_bytes: Any = 4) -> Cost:
    """N rows of D values, of which R are rotated with P distinct rows of cos and sin; 6 operations a pair."""
    return Cost(N * D * x_bytes + P * R * cos_bytes, N * D * x_bytes, 3 * N * R)


def _sizes(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> dict[str, Any]:
    return {
        "N": math.prod(x.shape[:-1]), "D": x.shape[-1], "R": 2 * cos.shape[-1], "P": math.prod(cos.shape[:-1]),
        "x_bytes": x.element_size(), "cos_bytes": cos.element_size(),
    }  # fmt: skip


define(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    family="rope", reference=rope, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
