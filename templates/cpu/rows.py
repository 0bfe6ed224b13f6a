"""Cache rows on the CPU: pack, unpack, fake quantisation, and the fused norm + RoPE + pack + store.

`cxx/rows.cpp.jinja` takes the format as data, so one library serves every record of `dscompile.formats`. Each value
goes through the same single-precision operations as the reference, which makes packing bit-exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.layout import PLAIN, format_pointer, known, row_bytes
from dscompile.templates.cpu.native import ELEMENT, plain, pointer
from dscompile.templates.cpu.record import CpuTemplate


def _packable(x: Tensor, format: str) -> bool:
    return x.dim() > 0 and x.dtype in ELEMENT and format != PLAIN and known(format, x.shape[-1])


def quant_pack(x: Tensor, format: str) -> Tensor:
    """`dsv4::quant_pack`: x [..., D] -> rows uint8 [..., row bytes]."""
    kernel = native.function("rows", "rows_pack", "ppqqpi", x.dtype) if _packable(x, format) else None
    if kernel is None:
        reference: Tensor = OPS["quant_pack"].reference(x, format)
        return reference
    x, dim = x.contiguous(), x.shape[-1]
    out = x.new_empty((*x.shape[:-1], row_bytes(format, dim, x.dtype)), dtype=torch.uint8)
    count = x.numel() // dim
    pointer_ = format_pointer(format, dim, x.dtype)
    kernel(pointer_, x.data_ptr(), count, dim, out.data_ptr(), native.threads())
    return out


def fake_quant(x: Tensor, format: str) -> Tensor:
    """`dsv4::fake_quant`: x [..., D] -> [..., D] in x.dtype."""
    kernel = native.function("rows", "rows_fake", "ppqqpi", x.dtype) if _packable(x, format) else None
    if kernel is None:
        reference: Tensor = OPS["fake_quant"].reference(x, format)
        return reference
    x, dim = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    count = x.numel() // dim
    pointer_ = format_pointer(format, dim, x.dtype)
    kernel(pointer_, x.data_ptr(), count, dim, out.data_ptr(), native.threads())
    return out


def unpack_rows(rows: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor | None:
    """Packed rows uint8 [..., row bytes] -> [..., dim]; None if the kernel cannot take them."""
    fits = (
        rows.dim() > 0
        and rows.dtype == torch.uint8
        and dtype in ELEMENT
        and format != PLAIN
        and dim > 0
        and known(format, dim)
        and rows.shape[-1] == row_bytes(format, dim, dtype)
    )
    kernel = native.function("rows", "rows_unpack", "ppqqqpi", dtype) if fits else None
    if kernel is None:
        return None
    # Rows with a gap between them (a slice of a pool) are read where they lie.
    if not (rows.dim() == 2 and rows.stride(1) == 1):
        rows = rows.contiguous()
    stride = rows.stride(0) if rows.dim() == 2 else rows.shape[-1]
    out = rows.new_empty((*rows.shape[:-1], dim), dtype=dtype)
    kernel(
        format_pointer(format, dim, dtype), rows.data_ptr(), stride, rows.numel() // rows.shape[-1],
        dim, out.data_ptr(), native.threads(),
    )  # fmt: skip
    return out


def unpack(rows: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """`dsv4::unpack`: rows [..., row bytes] -> values [..., dim]."""
    out = unpack_rows(rows, format, dim, dtype)
    if out is None:
        reference: Tensor = OPS["unpack"].reference(rows, format, dim, dtype)
        return reference
    return out


def _storable(pool: Tensor, rows: Tensor, slots: Tensor) -> bool:
    return (
        pool.dim() == 2
        and rows.dim() == 2
        and pool.dtype == rows.dtype
        and pool.shape[1] == rows.shape[1]
        and slots.dtype == torch.int64
        and slots.shape == rows.shape[:1]
        and (pool.stride(1) == 1 or pool.shape[1] <= 1)
    )


def _write(pool: Tensor, rows: Tensor, slots: Tensor, dtype: torch.dtype) -> bool:
    """Put contiguous rows into their slots; False, with nothing written, if a slot is out of range.

    Bytes are copied; dtype only says whose library does it, so that no other one has to be compiled.
    """
    kernel = native.function("rows", "rows_store", "pqpqpqq", dtype)
    if kernel is None:
        return False
    size = rows.element_size()
    slots = slots.contiguous()
    failed = kernel(
        pool.data_ptr(), pool.stride(0) * size, rows.data_ptr(), rows.shape[1] * size, slots.data_ptr(),
        slots.shape[0], pool.shape[0],
    )  # fmt: skip
    return failed == 0


def store_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """`dsv4::store_rows`: pool[slots[i]] = rows[i], -1 skipped."""
    dtype = pool.dtype if pool.dtype in ELEMENT else torch.bfloat16
    if not (_storable(pool, rows, slots) and _write(pool, rows.contiguous(), slots, dtype)):
        OPS["store_rows"].reference(pool, rows, slots)  # also raises what there is to say about a bad slot


def norm_rope_store(
    pool: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    eps: float,
    format: str,
) -> Tensor:
    """`dsv4::norm_rope_store`: x [N, D] normalised, rotated, packed into rows, written to pool; returns the rows."""
    fits = (
        x.dim() == 2
        and x.dtype in ELEMENT
        and x.shape[1] > 0
        and known(format, x.shape[1])
        and cos.dim() == 2
        and cos.shape == sin.shape
        and cos.shape[0] == x.shape[0]
        and 2 * cos.shape[1] <= x.shape[1]
        and (weight is None or weight.shape == x.shape[1:])
        and pool.dim() == 2
        and pool.shape[1] * pool.element_size() == row_bytes(format, x.shape[1], x.dtype)
        and pool.dtype == (x.dtype if format == PLAIN else torch.uint8)
    )
    kernel = native.function("rows", "rows_make", "ppqqqpfppiqpi", x.dtype) if fits else None
    if kernel is None:
        reference: Tensor = OPS["norm_rope_store"].reference(pool, x, weight, cos, sin, slots, eps, format)
        return reference
    count, dim = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = None if weight is None else plain(weight, torch.float32)
    cos, sin, wide = native.angles(cos, sin, x.dtype)
    rows = pool.new_empty((count, pool.shape[1]))
    kernel(
        format_pointer(format, dim, x.dtype), x.data_ptr(), x.stride(0), count, dim,
        pointer(weight), eps, cos.data_ptr(), sin.data_ptr(), wide, cos.shape[1], rows.data_ptr(), native.threads(),
    )  # fmt: skip
    if not (_storable(pool, rows, slots) and _write(pool, rows, slots, x.dtype)):
        OPS["store_rows"].reference(pool, rows, slots)
    return rows


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("quant_pack", "dsv4::quant_pack", "opaque", quant_pack),
    CpuTemplate("fake_quant", "dsv4::fake_quant", "opaque", fake_quant),
    CpuTemplate("unpack", "dsv4::unpack", "opaque", unpack),
    CpuTemplate("store_rows", "dsv4::store_rows", "opaque", store_rows),
    CpuTemplate("norm_rope_store", "dsv4::norm_rope_store", "opaque", norm_rope_store),
)
