"""Interleaved RoPE in real arithmetic: pairs (x[2i], x[2i+1]) of the last dimensions, full-width cos and sin."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) for adjacent pairs of the last axis."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, heads_axis: int | None) -> Tensor:
    """The trailing 2 * cos.shape[-1] values of x rotated, arithmetic in float32; `heads_axis` is inserted into cos."""
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    if heads_axis is not None:
        cos, sin = cos.unsqueeze(heads_axis), sin.unsqueeze(heads_axis)
    width = cos.shape[-1]
    kept, turned = x[..., :-width], x[..., -width:]
    rotated = (turned.float() * cos + rotate_half(turned).float() * sin).to(x.dtype)
    return torch.cat((kept, rotated), -1)


def _pattern(layout: str, cos_batch: str, inverse: bool) -> Pattern:
    """x "B H T" (heads in front of tokens), cos and sin [B or 1, T, r]."""
    axis = {"B H T": 1, "B T H": 2}[layout]

    def search(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rope(x, cos, -sin if inverse else sin, axis)

    def replace(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.ops.dsv4.rope(x, cos.unsqueeze(axis), sin.unsqueeze(axis), inverse)

    name = ".".join(["rope", "heads_first" if axis == 1 else "tokens_first", "one_row" if cos_batch == "1" else "rows"])
    return Pattern(
        name=name + (".inverse" if inverse else ""), family="rope", dialect="common", search=search, replace=replace,
        inputs={"x": f"act[{layout} p+2*r]", "cos": f"w[{cos_batch} T r]", "sin": f"w[{cos_batch} T r]"},
        dtypes={"w": ("act", torch.float32)},
    )  # fmt: skip


#: The inverse (-sin) contains the forward rotation, so it comes first.
PATTERNS = tuple(
    _pattern(layout, batch, inverse)
    for inverse, layout, batch in itertools.product((True, False), ("B H T", "B T H"), ("B", "1"))
)
