"""Rotary embedding of the last values of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton import row_layout
from dscompile.templates.triton.device.rotation import load_angles, rotate_tail
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config
from dscompile.templates.triton.store import check

AXES = 3
MOST_ROWS = 1 << 30


@triton.jit
def _place(outer, middle, inner, outer_stride, middle_stride, inner_stride):
    return outer * outer_stride + middle * middle_stride + inner * inner_stride


@triton.jit
def rope_kernel(
    x, cos, sin, out, count, middle_size, inner_size, x_outer, x_middle, x_inner, cos_outer, cos_middle, cos_inner,
    sin_outer, sin_middle, sin_inner,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, N: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """N rows of D values a program; row = (outer * middle_size + middle) * inner_size + inner. out is dense.

    Tiles begin with SHIFT empty columns.
    """
    row = tl.program_id(0) * N + tl.arange(0, N)[:, None]  # in 32 bits, in which divisions are much shorter
    live = row < count
    rest = row // inner_size
    inner = (row % inner_size).to(tl.int64)
    middle, outer = (rest % middle_size).to(tl.int64), (rest // middle_size).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :] - SHIFT
    inside = live & (column >= 0) & (column < D)
    given = tl.load(x + _place(outer, middle, inner, x_outer, x_middle, x_inner) + column, mask=inside, other=0.0)
    values = given.to(tl.float32)
    if R > 0:
        FIRST: tl.constexpr = SHIFT + D - R
        c = load_angles(cos + _place(outer, middle, inner, cos_outer, cos_middle, cos_inner), live, BLOCK, FIRST, R)
        s = load_angles(sin + _place(outer, middle, inner, sin_outer, sin_middle, sin_inner), live, BLOCK, FIRST, R)
        values = rotate_tail(values, c, s, N, BLOCK, FIRST, R, INVERSE)
    tl.store(out + row.to(tl.int64) * D + column, values.to(out.dtype.element_ty), mask=inside)


def merge_axes(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Leading axes joined wherever every tensor steps through both as through one: fewer sizes, and strides of each."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(of[-1] == size * given[axis] for of, given in zip(kept, strides)):
            sizes[-1] *= size
            for of, given in zip(kept, strides):
                of[-1] = given[axis]
        else:
            sizes.append(size)
            for of, given in zip(kept, strides):
                of.append(given[axis])
    return sizes, kept


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, *, config: Config, target: Target) -> Tensor:
    """`dsv4::rope`: x [..., D]; cos, sin broadcastable to [..., R / 2] -> [..., D] in x.dtype."""
    lead, dim, half = x.shape[:-1], x.shape[-1], cos.shape[-1]
    x, cos, sin = _dense(x), (_dense(cos)).expand(*lead, half), (_dense(sin)).expand(*lead, half)
    out = x.new_empty(x.shape)
    sizes, strides = merge_axes(lead, *(t.stride()[:-1] for t in (x, cos, sin)))
    if len(sizes) > AXES:  # x is read as it lies only if its rows can be counted with three numbers
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        sizes, strides = merge_axes(lead, *(t.stride()[:-1] for t in (x, cos, sin)))
    missing = AXES - len(sizes)
    sizes, strides = [1] * missing + sizes, [[0] * missing + of for of in strides]
    count = math.prod(lead)
    launch(
        rope_kernel, (triton.cdiv(count, config["N"]),), x, cos, sin, out, count, sizes[1], sizes[2], *strides[0],
        *strides[1], *strides[2], config=config, D=dim, R=2 * half, BLOCK=row_layout.block(row_layout.PLAIN, dim),
        SHIFT=row_layout.shift(dim), N=config["N"], INVERSE=bool(inverse),
    )  # fmt: skip
    return out


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """16 values a thread; one row of 512 is one warp."""
    width = triton.next_power_of_2(sizes["D"])
    for warps, values in ((1, 16), (4, 8), (4, 16), (2, 32)):
        yield config(warps, 1, N=max(1, 32 * warps * values // width))
    for warps in (4, 8):
        if width >= 2048:
            yield config(warps, 1, N=1)


def _applies(meta: Meta) -> str | None:
    rows = math.prod(meta["x"].shape[:-1])
    if rows >= MOST_ROWS:
        return f"{rows} rows, allowed: below {MOST_ROWS}"
    return row_layout.refusal(row_layout.PLAIN, meta["x"].shape[-1])


TEMPLATES = (TritonTemplate("rope", "dsv4::rope", rope, _configs, check, _applies),)
