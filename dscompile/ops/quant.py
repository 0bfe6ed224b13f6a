"""Conversion between values and stored rows; the formats themselves live in `dscompile.formats`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.layout import check_rows, decode_rows, fresh, lookup, row_dtype, row_width
from dscompile.ops.registry import define

_FAKE_QUANT, _PACK, _UNPACK = Check("fake_quant"), Check("quant_pack"), Check("unpack")


def _validate(check: Check, x: Tensor, format: str) -> Any:
    """Check the arguments and return the width of a stored row."""
    check.dtype("x", x, FLOATS)
    check.min_rank("x", x, 1, "[..., D]")
    return row_width(check, "format", format, x.shape[-1])


def fake_quant(x: Tensor, format: str) -> Tensor:
    """x [..., D] -> [..., D], x.dtype: what a reader sees after x was stored in this format. "none" copies."""
    _validate(_FAKE_QUANT, x, format)
    fmt = lookup(_FAKE_QUANT, "format", format)
    return fresh(x if fmt is None else fmt.fake_quant(x), x)


def quant_pack(x: Tensor, format: str) -> Tensor:
    """x [..., D] -> rows uint8 [..., row bytes]: payload, then scales. "none" copies x."""
    _validate(_PACK, x, format)
    fmt = lookup(_PACK, "format", format)
    return fresh(x if fmt is None else fmt.pack(x), x)


def unpack(rows: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """rows [..., row bytes] -> values [..., dim] in `dtype` (a 16 or 32 bit float)."""
    _validate_unpack(rows, format, dim, dtype)
    return fresh(decode_rows(rows, format, dim, dtype), rows)


def _validate_unpack(rows: Tensor, format: str, dim: int, dtype: torch.dtype) -> None:
    _UNPACK.positive("dim", dim)
    _UNPACK.min_rank("rows", rows, 1, "[..., row width]")
    if dtype not in FLOATS:
        raise TypeError(_UNPACK.message("dtype", dtype, ", ".join(map(str, FLOATS))))
    check_rows(_UNPACK, "rows", rows, "format", format, dim)


def _fake_quant_fake(x: Tensor, format: str) -> Tensor:
    _validate(_FAKE_QUANT, x, format)
    return x.new_empty(x.shape)


def _pack_fake(x: Tensor, format: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _validate(_PACK, x, format)), dtype=row_dtype(format, x.dtype))


def _unpack_fake(rows: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    _validate_unpack(rows, format, dim, dtype)
    return rows.new_empty((*rows.shape[:-1], dim), dtype=dtype)


@costed
def _fake_quant_cost(N: Any, D: Any, x_bytes: Any = 2) -> Cost:
    """N rows of D values; absolute maximum, divide, clamp, round, multiply."""
    return Cost(N * D * x_bytes, N * D * x_bytes, 5 * N * D)


@costed
def _pack_cost(N: Any, D: Any, row_bytes: Any, x_bytes: Any = 2) -> Cost:
    """N rows of D values become N rows of `row_bytes` bytes; absolute maximum, divide, clamp, round."""
    return Cost(N * D * x_bytes, N * row_bytes, 4 * N * D)


@costed
def _unpack_cost(N: Any, D: Any, row_bytes: Any, x_bytes: Any = 2) -> Cost:
    """N rows of `row_bytes` bytes become N rows of D values; one multiply a value."""
    return Cost(N * row_bytes, N * D * x_bytes, N * D)


def _fake_quant_sizes(x: Tensor, format: str) -> dict[str, Any]:
    return {"N": math.prod(x.shape[:-1]), "D": x.shape[-1], "x_bytes": x.element_size()}


def _pack_sizes(x: Tensor, format: str) -> dict[str, Any]:
    width = row_width(_PACK, "format", format, x.shape[-1])
    row_bytes = width * row_dtype(format, x.dtype).itemsize
    return {**_fake_quant_sizes(x, format), "row_bytes": row_bytes}


def _unpack_sizes(rows: Tensor, format: str, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    row_bytes = rows.shape[-1] * rows.element_size()
    return {"N": math.prod(rows.shape[:-1]), "D": dim, "row_bytes": row_bytes, "x_bytes": dtype.itemsize}


define(
    "fake_quant(Tensor x, str format) -> Tensor",
    family="quant", reference=fake_quant, fake=_fake_quant_fake, cost=_fake_quant_cost, sizes=_fake_quant_sizes,
)  # fmt: skip
define(
    "quant_pack(Tensor x, str format) -> Tensor",
    family="quant", reference=quant_pack, fake=_pack_fake, cost=_pack_cost, sizes=_pack_sizes,
)  # fmt: skip
define(
    "unpack(Tensor rows, str format, int dim, ScalarType dtype) -> Tensor",
    family="quant", reference=unpack, fake=_unpack_fake, cost=_unpack_cost, sizes=_unpack_sizes,
)  # fmt: skip
