"""Rows written into a pool: norm, rotation, quantisation, packing and store in one launch; or bytes as they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.ops.checks import Check
from dscompile.ops.layout import row_dtype, row_width
from dscompile.targets import Target
from dscompile.templates.triton import row_layout
from dscompile.templates.triton.device.rotation import load_angles, rotate_tail
from dscompile.templates.triton.device.rows import encode, write_rows
from dscompile.templates.triton.launching import interpreting, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

VALUES_PER_THREAD = 32
_CHECK = Check("norm_rope_store")


@triton.jit
def make_rows_kernel(
    x, weight, cos, sin, slots, pool, rows, count, capacity, x_stride, cos_stride, sin_stride, pool_stride, eps,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr,
    UNIT: tl.constexpr, PAYLOAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, POW2: tl.constexpr,
    FLOOR: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, PAD: tl.constexpr, HW: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr, POOL_ALIGNED: tl.constexpr,
):  # fmt: skip
    """rows[i] = pool[slots[i]] = packed(rotated(normed(x[i]))); without weight, cos or pool that part is left out.

    N rows of D values a program, in tiles whose first SHIFT columns are empty. Strides are in elements, that of the
    pool in UNITs of them, so that the compiler knows how rows are aligned; ROW is the length of a returned row.
    """
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)[:, None]
    live = row < count
    column = tl.arange(0, BLOCK)[None, :] - SHIFT
    inside = (column >= 0) & (column < D)
    # Everything is asked for before anything is waited for.
    if pool is not None:
        slot = tl.load(slots + row, mask=live, other=-1)
        write = (slot >= 0) & (slot < capacity)
    if R > 0:
        FIRST: tl.constexpr = SHIFT + D - R
        c = load_angles(cos + row * cos_stride, live, BLOCK, FIRST, R)
        s = load_angles(sin + row * sin_stride, live, BLOCK, FIRST, R)
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(x + row * x_stride + column, mask=live & inside, other=0.0)
    values = given.to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(values * values, 1) / D + eps)
        values = (factor * (values * tl.expand_dims(scale, 1))).to(given.dtype).to(tl.float32)
    if R > 0:
        values = rotate_tail(values, c, s, N, BLOCK, FIRST, R).to(given.dtype).to(tl.float32)
    if PAYLOAD == "plain":
        plain = values.to(rows.dtype.element_ty)
        tl.store(rows + row * ROW + column, plain, mask=live & inside)
        if pool is not None:
            tl.store(pool + slot * pool_stride * UNIT + column, plain, mask=write & inside)
    else:
        payload, scales = encode(values, N, BLOCK, PAYLOAD, GROUP, SCALE, POW2, FLOOR, HW)
        write_rows(
            rows + row * ROW, live, payload, scales, values, N, BLOCK, PAYLOAD, GROUP, SCALE, HEAD, TAIL, PAD,
            ROWS_ALIGNED,
        )  # fmt: skip
        if pool is not None:
            write_rows(
                pool + slot * pool_stride * UNIT, write, payload, scales, values, N, BLOCK, PAYLOAD, GROUP, SCALE, HEAD,
                TAIL, PAD, POOL_ALIGNED,
            )  # fmt: skip


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def make_rows(
    x: Tensor, format: str, config: Config, target: Target, weight: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, slots: Tensor | None = None, pool: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """x [N, D] -> the packed rows [N, R], and the same in pool [S, R] at slots [N] if there is a pool."""
    x, dim = row_layout.as_rows(x), x.shape[-1]
    out = x.new_empty((x.shape[0], row_width(_CHECK, "format", format, dim)), dtype=row_dtype(format, x.dtype))
    rotated = 0 if cos is None else 2 * cos.shape[1]
    if cos is None or sin is None or not rotated:
        cos = sin = None
    else:
        cos, sin = row_layout.as_rows(cos), row_layout.as_rows(sin)
    rows = row_layout.elements(out, format)
    pool = None if pool is None else row_layout.elements(pool, format)
    unit = 1 if pool is None else row_layout.alignment(pool.stride(0))
    count = config["N"]
    launch(
        make_rows_kernel, (triton.cdiv(x.shape[0], count),),
        x, _dense(weight), cos, sin, _dense(slots), pool, rows, x.shape[0],
        0 if pool is None else pool.shape[0], x.stride(0), 0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0), 0 if pool is None else pool.stride(0) // unit, eps,
        config=config, D=dim, R=rotated, BLOCK=row_layout.block(format, dim), SHIFT=row_layout.shift(dim), N=count,
        ROW=rows.shape[1], UNIT=unit, HW=target.has("e2m1_cvt") and not interpreting(),
        ROWS_ALIGNED=row_layout.aligned(rows, format, dim),
        POOL_ALIGNED=pool is None or row_layout.aligned(pool, format, dim),
        **row_layout.constants(format, dim),
    )  # fmt: skip
    return out


def norm_rope_store(
    pool: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, slots: Tensor, eps: float, format: str,
    *, config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::norm_rope_store`: rows x [N, D] -> packed rows [N, R], also written to pool [S, R] at slots int64 [N].

    A slot outside the pool is skipped like -1: nothing of its row is written there. Rows with equal slots are written
    by programs that run at the same time, and what stays may be part of one and part of another; the reference, and
    the interpreter, keep the last one.
    """
    return make_rows(x, format, config, target, weight, cos, sin, slots, pool, eps)


@triton.jit
def store_rows_kernel(
    pool, rows, slots, count, capacity, pool_stride, rows_stride, R: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    POOL_UNIT: tl.constexpr, ROWS_UNIT: tl.constexpr,
):  # fmt: skip
    """pool[slots[i]] = rows[i], R bytes each. Strides in units, as in `make_rows_kernel`."""
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)[:, None]
    slot = tl.load(slots + row, mask=row < count, other=-1)
    write = (slot >= 0) & (slot < capacity)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = write & (byte < R)
    tl.store(
        pool + slot * pool_stride * POOL_UNIT + byte,
        tl.load(rows + row * rows_stride * ROWS_UNIT + byte, mask=inside, other=0),
        mask=inside,
    )


def store_rows(pool: Tensor, rows: Tensor, slots: Tensor, *, config: Config, target: Target) -> None:
    """`dsv4::store_rows`: pool [S, R] at slots int64 [N] = rows [N, R], of any dtype. See `norm_rope_store`."""
    to, given = pool.view(torch.uint8), row_layout.as_rows(rows).view(torch.uint8)
    size, tile, count = to.shape[1], config["BLOCK"], config["N"]
    if size == 0:
        return
    units = row_layout.alignment(to.stride(0)), row_layout.alignment(given.stride(0))
    launch(
        store_rows_kernel, (triton.cdiv(given.shape[0], count), triton.cdiv(size, tile)), to, given, slots.contiguous(),
        given.shape[0], to.shape[0], to.stride(0) // units[0], given.stride(0) // units[1], config=config, R=size,
        BLOCK=tile, N=count, POOL_UNIT=units[0], ROWS_UNIT=units[1],
    )  # fmt: skip


def row_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """One warp with 8 values a thread or more: a row that stays in a warp needs no barrier and no shared memory.

    More rows a program than that make Triton move values between threads, where one row keeps them in place.
    """
    width = triton.next_power_of_2(sizes["D"])
    warps, least = max(1, min(8, width // 1024)), max(1, 256 // width)
    for factor in (1, 2, 4):
        yield config(warps, 1, N=least * factor)
    yield config(4 * warps, 1, N=4 * least)


def _store_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    tile = max(16, min(2048, triton.next_power_of_2(sizes["row_bytes"])))
    few = max(1, 512 // tile)
    for factor in (1, 2, 4):
        yield config(1, 1, BLOCK=tile, N=few * factor)


def check(config: Config, sizes: Sizes, target: Target) -> str | None:
    """Values that a thread holds: each is there as bf16, as fp32 and as a code for a while."""
    held = config["N"] * triton.next_power_of_2(sizes["D"]) // (32 * config.num_warps)
    return None if held <= VALUES_PER_THREAD else f"{held} values a thread, allowed: {VALUES_PER_THREAD}"


def _dense_pool(meta: Meta) -> str | None:
    pool = meta["pool"]
    if pool.dim() == 2 and pool.shape[1] > 1 and pool.stride(1) != 1:
        return f"pool: {pool.stride(1)} from one value to the next, allowed: 1 (it is written in place)"
    return None


def _applies(meta: Meta) -> str | None:
    format = meta["format"]
    return (
        _dense_pool(meta)
        or row_layout.refusal(format, meta["x"].shape[1])
        or row_layout.misaligned("pool", meta["pool"], format)
    )


TEMPLATES = (
    TritonTemplate("norm_rope_store", "dsv4::norm_rope_store", norm_rope_store, row_configs, check, _applies),
    TritonTemplate("store_rows", "dsv4::store_rows", store_rows, _store_configs, applies=_dense_pool),
)
