"""Reading stored rows by index: what sparse attention reads, as an operation that several layers can share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.layout import check_rows, decode_rows
from dscompile.ops.registry import define

_GATHER, _USED = Check("gather_rows"), Check("unpack_used")


def gather_rows(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """The rows of each sequence that `indices` names, decoded; index -1 gives zeros.

    rows [B, C, row width], indices int64 [B, K] below C -> [B, K, dim] in `dtype` (a 16 or 32 bit float). Raises
    IndexError for an index below -1 or not below C.
    """
    _validate(_GATHER, rows, indices, 2, format, dim, dtype)
    _check_range(_GATHER, indices, rows.shape[1])
    if rows.shape[1] == 0:
        return rows.new_zeros((*indices.shape, dim), dtype=dtype)
    safe = indices.clamp(min=0).unsqueeze(-1).expand(-1, -1, rows.shape[2])
    values = decode_rows(rows.gather(1, safe), format, dim, dtype)
    return values.masked_fill((indices < 0).unsqueeze(-1), 0)


def unpack_used(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """The rows up to the last one that `indices` names, decoded in place of all rows; later ones are zeros.

    rows [B, C, row width], indices int64 [B, T, K], -1 for none -> [B, C, dim] in `dtype`. A pool is as long as the
    longest allowed sequence, of which a prompt uses only the beginning.
    """
    _validate(_USED, rows, indices, 3, format, dim, dtype)
    _check_range(_USED, indices, rows.shape[1])
    flat = indices.flatten(1)
    used = flat.amax(1, keepdim=True) + 1 if flat.shape[1] else flat.new_zeros((flat.shape[0], 1))
    beyond = torch.arange(rows.shape[1], device=rows.device) >= used
    return decode_rows(rows, format, dim, dtype).masked_fill(beyond.unsqueeze(-1), 0)


def _check_range(check: Check, indices: Tensor, capacity: int) -> None:
    if indices.numel() and (int(indices.min()) < -1 or int(indices.max()) >= capacity):
        value = f"{int(indices.min())} .. {int(indices.max())}"
        raise IndexError(check.message("range of indices", value, f"-1 .. {capacity - 1}"))


def _validate(
    check: Check, rows: Tensor, indices: Tensor, rank: int, format: str, dim: int, dtype: torch.dtype
) -> None:
    check.rank("rows", rows, 3, "[B, C, row width]")
    check.positive("dim", dim)
    if dtype not in FLOATS:
        raise TypeError(check.message("dtype", dtype, ", ".join(map(str, FLOATS))))
    check_rows(check, "rows", rows, "format", format, dim)
    check.dtype("indices", indices, INTEGERS)
    check.rank("indices", indices, rank, "[B, K]" if rank == 2 else "[B, T, K]")
    check.that(indices.shape[0] == rows.shape[0], "batch of indices", indices.shape[0], rows.shape[0])


def _gather_fake(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    _validate(_GATHER, rows, indices, 2, format, dim, dtype)
    return rows.new_empty((*indices.shape, dim), dtype=dtype)


def _used_fake(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    _validate(_USED, rows, indices, 3, format, dim, dtype)
    return rows.new_empty((*rows.shape[:2], dim), dtype=dtype)


@costed
def _cost(N: Any, D: Any, row_bytes: Any, x_bytes: Any = 2, M: Any = 0, index_bytes: Any = 8) -> Cost:
    """N rows of `row_bytes` bytes, named by M indices, become N rows of D values; one multiply a value. For
    `unpack_used`, N is an upper bound: all rows."""
    return Cost(N * row_bytes + M * index_bytes, N * D * x_bytes, N * D)


def _gather_sizes(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    row_bytes = rows.shape[2] * rows.element_size()
    return {
        "N": indices.numel(), "D": dim, "row_bytes": row_bytes, "x_bytes": dtype.itemsize, "M": indices.numel(),
        "index_bytes": indices.element_size(),
    }  # fmt: skip


def _used_sizes(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    return {**_gather_sizes(rows, indices, format, dim, dtype), "N": rows.shape[0] * rows.shape[1]}


define(
    "gather_rows(Tensor rows, Tensor indices, str format, int dim, ScalarType dtype) -> Tensor",
    family="quant", reference=gather_rows, fake=_gather_fake, cost=_cost, sizes=_gather_sizes,
)  # fmt: skip
define(
    "unpack_used(Tensor rows, Tensor indices, str format, int dim, ScalarType dtype) -> Tensor",
    family="quant", reference=unpack_used, fake=_used_fake, cost=_cost, sizes=_used_sizes,
)  # fmt: skip
