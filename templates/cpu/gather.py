"""Rows read by index on the CPU: the packed rows are picked first, then decoded, so that the work follows the picks."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu.record import CpuTemplate
from dscompile.templates.cpu.rows import unpack_rows


def _in_range(rows: Tensor, indices: Tensor, rank: int) -> bool:
    if rows.dim() != 3 or indices.dim() != rank or rows.shape[0] != indices.shape[0] or rows.shape[1] == 0:
        return False
    low, high = (-1, -1) if indices.numel() == 0 else (int(indices.min()), int(indices.max()))
    return low >= -1 and high < rows.shape[1]


def gather_rows(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """`dsv4::gather_rows`: rows [B, C, row bytes], indices [B, K] -> [B, K, dim]; zeros for -1."""
    values = None
    if _in_range(rows, indices, 2):
        batch = torch.arange(rows.shape[0]).unsqueeze(1)
        values = unpack_rows(rows[batch, indices.clamp(min=0)], format, dim, dtype)
    if values is None:
        reference: Tensor = OPS["gather_rows"].reference(rows, indices, format, dim, dtype)
        return reference
    return values.masked_fill_((indices < 0).unsqueeze(-1), 0)


def unpack_used(rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """`dsv4::unpack_used`: rows [B, C, row bytes], indices [B, T, K] -> [B, C, dim]; zeros behind the last one."""
    if not _in_range(rows, indices, 3):
        reference: Tensor = OPS["unpack_used"].reference(rows, indices, format, dim, dtype)
        return reference
    out = rows.new_zeros((*rows.shape[:2], dim), dtype=dtype)
    if indices.numel() == 0:
        return out
    for sequence, used in enumerate((indices.flatten(1).amax(1) + 1).tolist()):
        if used:
            values = unpack_rows(rows[sequence, :used], format, dim, dtype)
            if values is None:
                reference = OPS["unpack_used"].reference(rows, indices, format, dim, dtype)
                return reference
            out[sequence, :used] = values
    return out


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("gather_rows", "dsv4::gather_rows", "opaque", gather_rows),
    CpuTemplate("unpack_used", "dsv4::unpack_used", "opaque", unpack_used),
)
