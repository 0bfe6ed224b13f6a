"""The first kernel of `experts`. Importing this needs nvidia-cutlass-dsl. Compiled only: no GPU has run it."""

from typing import Any

from cutlass import BFloat16, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dscompile.templates.cute.device import (
    Device,
    bytes_after,
    load_int32,
    load_words,
    store_bytes,
    store_words,
)
from dscompile.templates.cute.experts import VALUES, four_scales, gathered
from dscompile.templates.cute.layouts import BLOCK_BYTES


class Gather:
    """codes[slot] = the quantised x[slot_pair[slot] / k], a block a slot; scales a block of 128 rows a tile."""

    def __init__(self, size: int, block_t: int) -> None:
        self.size, self.block_t = size, block_t

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        slot_pair: cute.Pointer,
        codes: cute.Pointer,
        scales: cute.Pointer,
        slots: Int32,
        k: Int32,
        x_stride: Int64,
        stream: Any,
    ):
        """x bf16 [N, size], x_stride in bytes; slot_pair int32 [slots]; codes [slots, size]."""
        self.kernel(x, slot_pair, codes, scales, k, x_stride).launch(
            grid=[slots, 1, 1], block=[self.size // VALUES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        slot_pair: cute.Pointer,
        codes: cute.Pointer,
        scales: cute.Pointer,
        k: Int32,
        x_stride: Int64,
    ):
        thread, _, _ = cute.arch.thread_idx()
        slot, _, _ = cute.arch.block_idx()
        pair = load_int32(bytes_after(slot_pair, slot * 4))
        if pair >= 0:
            at = bytes_after(x, Int64(pair // k) * x_stride + thread * (2 * VALUES))
            payload, stored = gathered(Device, load_words(at, VALUES // 2))
            store_words(bytes_after(codes, Int64(slot) * self.size + thread * VALUES), payload, 16)
            word = four_scales(Device, stored, thread % 32)
            if thread % 8 == 0:
                tile, row = slot // self.block_t, slot % self.block_t
                block = Int64(tile * (self.size // 128) + thread // 8) * BLOCK_BYTES
                store_bytes(bytes_after(scales, block + row % 32 * 16 + row // 32 * 4), word, 4)


def arguments() -> tuple[Any, ...]:
    """What stands for the arguments of `Gather.__call__` when it is compiled."""

    def pointer(dtype: Any) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=128)

    return (
        pointer(BFloat16), pointer(Int32), pointer(Uint8), pointer(Uint8), Int32(1), Int32(1), Int64(0),
        make_fake_stream(),
    )  # fmt: skip
