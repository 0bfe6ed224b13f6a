"""The kernel of `rows`. Importing this needs nvidia-cutlass-dsl. Compiled only: no GPU has run it."""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dscompile.templates.cute.device import (
    Device,
    bytes_after,
    load_int64,
    load_words,
    store_bytes,
    store_words,
)
from dscompile.templates.cute.rows import LANES, RowSpec, row


class RowWriter:
    """rows[i] = pool[slots[i]] = packed(rotated(normed(x[i]))).

    16 or 32 values a thread, a whole row within a warp: no shared memory, no barrier. A slot outside the pool is
    skipped like -1. Threads behind the last row compute it once more and store nothing.
    """

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        weight: cute.Pointer | None,
        cos: cute.Pointer | None,
        sin: cute.Pointer | None,
        slots: cute.Pointer,
        pool: cute.Pointer,
        rows: cute.Pointer,
        count: Int32,
        capacity: Int64,
        x_stride: Int64,
        cos_stride: Int64,
        sin_stride: Int64,
        pool_stride: Int64,
        eps: Float32,
        stream: Any,
    ):
        """Strides are bytes from row to row; count is at least 1."""
        each = self.spec.rows
        self.kernel(
            x, weight, cos, sin, slots, pool, rows, count, capacity, x_stride, cos_stride, sin_stride, pool_stride, eps
        ).launch(grid=[(count + each - 1) // each, 1, 1], block=[LANES * self.spec.warps, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        weight: cute.Pointer | None,
        cos: cute.Pointer | None,
        sin: cute.Pointer | None,
        slots: cute.Pointer,
        pool: cute.Pointer,
        rows: cute.Pointer,
        count: Int32,
        capacity: Int64,
        x_stride: Int64,
        cos_stride: Int64,
        sin_stride: Int64,
        pool_stride: Int64,
        eps: Float32,
    ):
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % spec.lanes
        given = block * spec.rows + thread // spec.lanes
        number = Int64(cutlass.min(given, count - 1))
        # Everything is asked for before anything is waited for.
        slot = load_int64(bytes_after(slots, number * 8))
        words = load_words(bytes_after(x, number * x_stride + lane * (2 * spec.values)), spec.values // 2)
        turn = cutlass.max(lane - spec.first_rotated, 0) * (2 * spec.values)
        factor, c, s = None, None, None
        if cutlass.const_expr(spec.rotated > 0):
            c = floats(load_words(bytes_after(cos, number * cos_stride + turn), spec.values // 2))
            s = floats(load_words(bytes_after(sin, number * sin_stride + turn), spec.values // 2))
        if cutlass.const_expr(spec.normed):
            factor = floats(load_words(bytes_after(weight, lane * (4 * spec.values)), spec.values))
        payload, scales = row(Device, spec, words, factor, (c, s), lane >= spec.first_rotated, eps)
        group = lane // spec.group_lanes
        first = lane % spec.group_lanes == 0
        scale_at = spec.payload_bytes + group * spec.scales
        if given < count:
            at = bytes_after(rows, number * spec.row_bytes)
            store_words(at + lane * 16, payload, spec.rows_unit)
            if first:
                store_bytes(at + scale_at, scales, spec.scales)
            if (slot >= 0) & (slot < capacity):
                there = bytes_after(pool, slot * pool_stride)
                store_words(there + lane * 16, payload, spec.stride_unit)
                if first:
                    store_bytes(there + scale_at, scales, spec.scales)


def floats(words: list[Any]) -> list[Any]:
    return [Device.from_bits(word) for word in words]


def arguments(spec: RowSpec) -> tuple[Any, ...]:
    """What stands for the arguments of `RowWriter.__call__` when it is compiled."""

    def pointer(dtype: Any, aligned: int = 16) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=aligned)

    angles = pointer(Float32) if spec.rotated else None
    return (
        pointer(BFloat16), pointer(Float32) if spec.normed else None, angles, angles, pointer(Int64),
        pointer(Uint8, spec.stride_unit), pointer(Uint8, spec.rows_unit), Int32(1), Int64(1), Int64(0), Int64(0),
        Int64(0), Int64(0), Float32(0.0), make_fake_stream(),
    )  # fmt: skip
