"""Stored rows decoded: those that indices name, or all up to the last one that is named."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton import row_layout
from dscompile.templates.triton.device.rows import read_rows, read_tails
from dscompile.templates.triton.launching import interpreting, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config
from dscompile.templates.triton.store import check


@triton.jit
def decode_rows_kernel(
    rows, indices, used, out, count, capacity, batch_stride, row_stride, index_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TAIL: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
    PAYLOAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    ALIGNED: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """out[b, i] = values of rows[b, indices[b, i]], of `count` places i; without indices that of rows[b, i].

    Zeros where an index is outside [0, capacity), and for i >= used[b] if that is given; such rows are not read.
    N places a program. Strides of rows are in UNITs of elements, so that the compiler knows how rows are aligned.
    """
    programs = tl.cdiv(count, N)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    place = (tl.program_id(0) % programs).to(tl.int64) * N + tl.arange(0, N)[:, None]
    live = place < count
    if indices is not None:
        source = tl.load(indices + batch * index_stride + place, mask=live, other=-1).to(tl.int64)
    else:
        source = place
    read = live & (source >= 0) & (source < capacity)
    if used is not None:
        read = read & (place < tl.load(used + batch))
    at = rows + (batch * batch_stride + source * row_stride) * UNIT
    column = tl.arange(0, BLOCK)[None, :]
    to = out + (batch * count + place) * D
    if PAYLOAD == "plain":
        values = tl.load(at + column, mask=read & (column < D), other=0.0)
    else:
        values = read_rows(at, read, N, BLOCK, PAYLOAD, GROUP, SCALE, HEAD, TAIL, ALIGNED, HW)
    tl.store(to + column, values.to(out.dtype.element_ty), mask=live & (column < HEAD))
    if TAIL > 0:
        tail = read_tails(at, read, BLOCK_TAIL, PAYLOAD, HEAD, TAIL, ALIGNED)
        column = tl.arange(0, BLOCK_TAIL)[None, :]
        tl.store(to + HEAD + column, tail.to(out.dtype.element_ty), mask=live & (column < TAIL))


@triton.jit
def last_index_kernel(indices, used, count, capacity, index_stride, BLOCK: tl.constexpr):
    """used[b] = max(used[b], 1 + the largest of indices[b] within [0, capacity)), a block of them a program."""
    programs = tl.cdiv(count, BLOCK)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    place = (tl.program_id(0) % programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + batch * index_stride + place, mask=place < count, other=-1).to(tl.int64)
    largest = tl.max(tl.where(index < capacity, index, -1), 0)
    tl.atomic_max(used + batch, largest + 1, mask=largest >= 0)


def decode(
    rows: Tensor, indices: Tensor | None, used: Tensor | None, format: str, dim: int, dtype: torch.dtype,
    config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """rows [B, C, row width] -> values [B, K, dim] at indices [B, K], or [B, C, dim] of all rows."""
    batch, capacity = rows.shape[:2]
    count = capacity if indices is None else indices.shape[1]
    out = rows.new_empty((batch, count, dim), dtype=dtype)
    rows = row_layout.elements(rows, format)
    unit = min(row_layout.alignment(rows.stride(0)), row_layout.alignment(rows.stride(1)))
    tail = row_layout.constants(format, dim)["TAIL"]
    launch(
        decode_rows_kernel, (batch * triton.cdiv(count, config["N"]),), rows, indices, used, out, count, capacity,
        rows.stride(0) // unit, rows.stride(1) // unit, 0 if indices is None else indices.stride(0), config=config,
        D=dim, BLOCK=row_layout.block(format, dim), BLOCK_TAIL=triton.next_power_of_2(max(tail, 1)), N=config["N"],
        UNIT=unit, ALIGNED=row_layout.aligned(rows, format, dim), HW=target.has("e2m1_cvt") and not interpreting(),
        **row_layout.reading(format, dim),
    )  # fmt: skip
    return out


def dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def gather_rows(
    rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype, *, config: Config, target: Target
) -> Tensor:
    """`dsv4::gather_rows`: rows [B, C, row width], indices int [B, K] -> [B, K, dim] in `dtype`.

    An index that is not below C gives zeros like -1.
    """
    return decode(dense(rows), dense(indices), None, format, dim, dtype, config, target)


def unpack_used(
    rows: Tensor, indices: Tensor, format: str, dim: int, dtype: torch.dtype, *, config: Config, target: Target
) -> Tensor:
    """`dsv4::unpack_used`: rows [B, C, row width], indices int [B, T, K] -> [B, C, dim] in `dtype`.

    An index that is not below C names no row, like -1.
    """
    flat = dense(indices.flatten(1))
    used = rows.new_zeros((rows.shape[0],), dtype=torch.int64)
    tile = config["BLOCK"]
    launch(
        last_index_kernel, (flat.shape[0] * triton.cdiv(flat.shape[1], tile),), flat, used, flat.shape[1],
        rows.shape[1], flat.stride(0), config=config, BLOCK=tile,
    )  # fmt: skip
    return decode(dense(rows), None, used, format, dim, dtype, config, target)


def read_configs(sizes: Sizes, target: Target, **constants: int) -> Iterable[Config]:
    """Tiles of 16 values a thread, of which FP8 rows are read 16 bytes at a time."""
    width = triton.next_power_of_2(sizes["D"])
    for warps, values in ((1, 16), (1, 32), (4, 16), (4, 32)):
        yield config(warps, 1, N=max(1, 32 * warps * values // width), **constants)
    for warps in (2, 4, 8):
        if width >= 2048:
            yield config(warps, 1, N=1, **constants)


def _used_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    return read_configs(sizes, target, BLOCK=1024)


def applies(meta: Meta) -> str | None:
    format = meta["format"]
    return row_layout.refusal(format, meta["dim"]) or row_layout.misaligned("rows", meta["rows"], format)


TEMPLATES = (
    TritonTemplate("gather_rows", "dsv4::gather_rows", gather_rows, read_configs, check, applies),
    TritonTemplate("unpack_used", "dsv4::unpack_used", unpack_used, _used_configs, check, applies),
)
