"""Rows read by index on the CPU: each row is decoded where it is picked."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.layout import PLAIN, format_pointer, known, row_bytes
from dscompile.templates.cpu.native import ELEMENT, plain
from dscompile.templates.cpu.record import CpuTemplate


def _launch(
    name: str, rows: Tensor, indices: Tensor, rank: int, format: str, dim: int, dtype: torch.dtype
) -> Tensor | None:
    """Run one of the two kernels; None if it cannot take the arguments or an index is out of range."""
    fits = (
        rows.dim() == 3
        and indices.dim() == rank
        and indices.shape[0] == rows.shape[0]
        and dim > 0
        and dtype in ELEMENT
        and known(format, dim)
        and rows.dtype == (dtype if format == PLAIN else torch.uint8)
        and rows.shape[2] * rows.element_size() == row_bytes(format, dim, dtype)
    )
    kernel = native.function("rows", name, "ppqqqpqqqpi", dtype) if fits else None
    if kernel is None:
        return None
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    batch, capacity = rows.shape[:2]
    indices = plain(indices, torch.int64)
    count = indices.shape[1] if rank == 2 else indices.shape[1] * indices.shape[2]
    out = rows.new_empty((batch, count if rank == 2 else capacity, dim), dtype=dtype)
    size = rows.element_size()
    failed = kernel(
        format_pointer(format, dim, dtype), rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size, capacity,
        indices.data_ptr(), batch, count, dim, out.data_ptr(), native.threads(),
    )  # fmt: skip
    return None if failed else out


def gather_rows(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """`dsv4::gather_rows`: rows [B, C, row bytes], indices [B, K] -> [B, K, dim]; zeros for -1."""
    out = _launch("rows_gather", rows, indices, 2, format, dim, dtype)
    if out is None:
        out = OPS["gather_rows"].reference(rows, indices, format, dim, dtype)
    assert out is not None
    return out


def unpack_used(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """`dsv4::unpack_used`: rows [B, C, row bytes], indices [B, T, K] -> [B, C, dim]; zeros behind the last one."""
    out = _launch("rows_used", rows, indices, 3, format, dim, dtype)
    if out is None:
        out = OPS["unpack_used"].reference(rows, indices, format, dim, dtype)
    assert out is not None
    return out


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("gather_rows", "dsv4::gather_rows", "opaque", gather_rows),
    CpuTemplate("unpack_used", "dsv4::unpack_used", "opaque", unpack_used),
)
