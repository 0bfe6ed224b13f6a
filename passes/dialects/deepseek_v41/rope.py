"""Rotary positions on adjacent pairs, written with the even and the odd half of each pair (model_v41 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    split = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., split:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :split], rotated.to(x.dtype)), -1)


def _rotate_all(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def _back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotate(x, cos, -sin)


def _back_all(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotate_all(x, cos, -sin)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.ops.dsv4.rope(x, cos, sin, False)


def _inverse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.ops.dsv4.rope(x, cos, sin, True)


def _patterns() -> tuple[Pattern, ...]:
    made = []
    # the inverse first: it contains the forward rotation
    for name, search, whole, replace in (
        ("inverse", _back, _back_all, _inverse),
        ("rope", _rotate, _rotate_all, _rope),
    ):
        for heads, x_dims, table in (("rows", "b t", "b t"), ("heads", "b t h", "b t 1")):
            tables = {"cos": f"f32[{table} r]", "sin": f"f32[{table} r]"}
            made.append(
                Pattern(
                    f"rope.pairs.{name}.{heads}",
                    "rope",
                    "deepseek_v41",
                    search,
                    replace,
                    inputs={"x": f"act[{x_dims} p+2*r]", **tables},
                )  # fmt: skip
            )
            made.append(
                Pattern(
                    f"rope.pairs.{name}.{heads}.whole",
                    "rope",
                    "deepseek_v41",
                    whole,
                    replace,
                    inputs={"x": f"act[{x_dims} 2*r]", **tables},
                )  # fmt: skip
            )
    return tuple(made)


PATTERNS = _patterns()
