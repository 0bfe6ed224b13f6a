"""A row's format as the constants that kernels take, and what they demand of the memory that rows lie in."""

from __future__ import annotations

import math
from typing import Any

import triton
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.formats.record import PLAIN_DTYPES
from dscompile.ops.layout import PLAIN

LARGEST_ROW = 8192

#: What kernels get for rows of plain values, whose type is that of the pointer.
_NOT_QUANTISED: dict[str, Any] = {
    "PAYLOAD": "plain", "GROUP": 1, "SCALE": "none", "POW2": False, "FLOOR": 0.0, "TAIL": 0, "PAD": 0,
}  # fmt: skip


def is_plain(format: str) -> bool:
    return format == PLAIN or FORMATS[format].is_plain


def constants(format: str, dim: int) -> dict[str, Any]:
    """The record as `tl.constexpr` values, see `device/rows.py`."""
    if is_plain(format):
        return {**_NOT_QUANTISED, "HEAD": dim}
    record = FORMATS[format]
    return {
        "PAYLOAD": record.payload, "GROUP": record.group, "SCALE": record.scale,
        "POW2": record.scale == "ue8m0" or record.pow2, "FLOOR": record.amax_floor, "TAIL": record.tail,
        "PAD": record.pad_bytes, "HEAD": dim - record.tail,
    }  # fmt: skip


def reading(format: str, dim: int) -> dict[str, Any]:
    """Of `constants`, those that a reader needs."""
    return {k: v for k, v in constants(format, dim).items() if k not in ("POW2", "FLOOR", "PAD")}


def block(format: str, dim: int) -> int:
    """Columns of a tile that holds a row of `dim` values, and what `shift` puts before it."""
    group = 1 if is_plain(format) else FORMATS[format].group
    return max(16, group, triton.next_power_of_2(dim + shift(dim)))


def shift(dim: int) -> int:
    """Columns to leave free in front of a row, so that pairs counted from its end begin at even columns."""
    return dim % 2


def alignment(stride: int) -> int:
    """The largest power of two, at most 16, that divides the distance of rows."""
    return math.gcd(stride, 16)


def elements(rows: Tensor, format: str) -> Tensor:
    """Rows of bytes seen as what the kernels' pointers point to: values of a plain format, else bytes."""
    return rows.view(PLAIN_DTYPES[FORMATS[format].payload]) if format != PLAIN and is_plain(format) else rows


def as_rows(x: Tensor) -> Tensor:
    """[..., D] -> [N, D] with a dense last axis; a view where that is possible."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def refusal(format: str, dim: int) -> str | None:
    """Why no kernel serves rows of `dim` values in this format, or None."""
    if not 0 < dim <= LARGEST_ROW:
        return f"rows of {dim} values, allowed: 1 to {LARGEST_ROW}"
    if is_plain(format):
        return None
    record = FORMATS[format]
    if record.group & (record.group - 1):
        return f"{format}: groups of {record.group} values, allowed: a power of two"
    if record.tail % 2:
        return f"{format}: tail of {record.tail} values, allowed: an even number"
    return None


def aligned(rows: Tensor, format: str, dim: int) -> bool:
    """Whether the fp32 scales and the bf16 tail of packed rows can be accessed as such."""
    if is_plain(format):
        return True
    record = FORMATS[format]
    size = 4 if record.scale == "fp32" else 2 if record.tail else 1
    head = record.payload_bytes(dim) - 2 * record.tail
    places = (head, head + 2 * record.tail, rows.storage_offset(), *rows.stride()[:-1])
    return all(place % size == 0 for place in places)


def misaligned(argument: str, rows: Tensor, format: str) -> str | None:
    """Why rows of bytes cannot be seen as values of a plain format, or None."""
    if format == PLAIN or not is_plain(format) or (rows.dim() > 1 and rows.stride(-1) != 1):
        return None  # of what has gaps between bytes, a dense copy is made
    size = PLAIN_DTYPES[FORMATS[format].payload].itemsize
    bad = [distance for distance in (rows.storage_offset(), *rows.stride()[:-1]) if distance % size]
    return f"{argument}: offset or stride of {bad[0]} bytes, allowed: multiples of {size} ({format})" if bad else None
