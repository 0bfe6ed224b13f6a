"""The machine of `arithmetic` inside a kernel, and accesses to memory of a width that is said, not hoped for.

Importing this needs nvidia-cutlass-dsl. Compiled only: no GPU has run it.
"""

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

ptx = cute.arch.inline_ptx


def _two(instruction: str, result: Any = Float32) -> Any:
    def apply(a: Any, b: Any) -> Any:
        return ptx(instruction + " {$w0}, {$r0}, {$r1};", write_only_types=[result], read_only_args=[a, b])

    return staticmethod(apply)


class Device:
    """Scalars of one thread. Roundings are named in the instruction, so that nothing is fused."""

    number, integer = Float32, Int32
    mul, add, sub, div = (_two(f"{name}.rn.f32") for name in ("mul", "add", "sub", "div"))
    min_number = _two("min.f32")  # a number where the other is NaN
    max_number = _two("max.f32")
    max_int = _two("max.s32", Int32)

    @staticmethod
    def negative(x: Any) -> Any:
        return (x.bitcast(Int32) ^ -0x80000000).bitcast(Float32)

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])

    @staticmethod
    def max_of_warp(value: Any) -> Any:
        return cute.arch.warp_redux_sync(value, "max")

    @staticmethod
    def neighbour(value: Any, step: int) -> Any:
        return cute.arch.shuffle_sync_bfly(value, step)

    @staticmethod
    def bits(x: Any) -> Any:
        return x.bitcast(Int32)

    @staticmethod
    def from_bits(bits: Any) -> Any:
        return bits.bitcast(Float32)

    @staticmethod
    def abs(x: Any) -> Any:
        return (x.bitcast(Int32) & 0x7FFFFFFF).bitcast(Float32)

    @staticmethod
    def exp(x: Any) -> Any:
        power = Device.mul(x, math.log2(math.e))
        return ptx("ex2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[power])

    @staticmethod
    def reciprocal(x: Any) -> Any:
        return ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])

    @staticmethod
    def rsqrt(x: Any) -> Any:
        return ptx("rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])

    @staticmethod
    def select(condition: Any, a: Any, b: Any) -> Any:
        return type(a)(cutlass.select_(condition, a, b))

    @staticmethod
    def bf16x2(low: Any, high: Any) -> Any:
        return ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high])

    @staticmethod
    def e4m3x2(low: Any, high: Any) -> Any:
        """Two codes in the lowest 16 bits; saturates, NaN is kept. sm_89 and newer."""
        code = "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {$r1}, {$r0}; cvt.u32.u16 {$w0}, pair; }"
        return ptx(code, write_only_types=[Int32], read_only_args=[low, high])

    @staticmethod
    def e2m1x2(low: Any, high: Any) -> Any:
        """Two codes in the lowest 8 bits. sm_100a and newer."""
        code = "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, {$r1}, {$r0}; cvt.u32.u8 {$w0}, pair; }"
        return ptx(code, write_only_types=[Int32], read_only_args=[low, high])

    @staticmethod
    def from_e4m3(code: Any) -> Any:
        text = (
            "{ .reg .b16 pair, half; .reg .b32 two; cvt.u16.u32 pair, {$r0}; cvt.rn.f16x2.e4m3x2 two, pair; "
            "cvt.u16.u32 half, two; cvt.f32.f16 {$w0}, half; }"
        )
        return ptx(text, write_only_types=[Float32], read_only_args=[code])

    @staticmethod
    def from_e4m3x2(pair: Any) -> Any:
        """The two codes in the lowest 16 bits -> fp32."""
        text = (
            "{ .reg .b16 pair, a, b; .reg .b32 two; cvt.u16.u32 pair, {$r0}; cvt.rn.f16x2.e4m3x2 two, pair; "
            "mov.b32 {a, b}, two; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }"
        )
        return ptx(text, write_only_types=[Float32, Float32], read_only_args=[pair])

    @staticmethod
    def from_e2m1x2(byte: Any) -> Any:
        """The two codes in the lowest 8 bits -> fp32. sm_100a and newer."""
        text = (
            "{ .reg .b8 pair; .reg .b16 a, b; .reg .b32 two; cvt.u8.u32 pair, {$r0}; cvt.rn.f16x2.e2m1x2 two, pair; "
            "mov.b32 {a, b}, two; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }"
        )
        return ptx(text, write_only_types=[Float32, Float32], read_only_args=[byte])

    @staticmethod
    def max_float_of_warp(value: Any) -> Any:
        return cute.arch.warp_redux_sync(value, "fmax")

    @staticmethod
    def of_lane(value: Any, lane: int) -> Any:
        return cute.arch.shuffle_sync(value, lane)


def bytes_after(pointer: Any, offset: Any) -> Any:
    """An address, int64. Offsets of pools exceed 32 bits."""
    return pointer.toint() + Int64(offset)


def load_words(address: Any, count: int) -> list[Any]:
    """`count` words from a 16-byte aligned address, which nothing in the kernel writes; 4 an instruction."""
    words: list[Any] = []
    for first in range(0, count, 4):
        words.extend(
            ptx(
                "ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4, read_only_args=[address + 4 * first],
            )
        )  # fmt: skip
    return words


def load_int64(address: Any) -> Any:
    return ptx("ld.global.nc.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def load_two_words(address: Any) -> list[Any]:
    code = "ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
    return list(ptx(code, write_only_types=[Int32] * 2, read_only_args=[address]))


def store_shared(address: Any, words: list[Any]) -> None:
    """Four words to a 16-byte aligned address of shared memory."""
    ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


def store_shared_word(address: Any, word: Any) -> None:
    ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def tensor_load(address: Any, columns: int) -> list[Any]:
    """Columns of this thread's lane of tensor memory; the address names the first lane of the warp."""
    words: list[Any] = []
    for first in range(0, columns, 16):
        names = ", ".join(f"{{$w{i}}}" for i in range(16))
        code = "tcgen05.ld.sync.aligned.32x32b.x16.b32 {" + names + "}, [{$r0}];"
        words.extend(ptx(code, write_only_types=[Int32] * 16, read_only_args=[address + first]))
    cute.arch.fence_view_async_tmem_load()
    return words


def tensor_store(address: Any, words: list[Any]) -> None:
    """16 columns of this thread's lane; done when the function is."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(16))
    code = "tcgen05.st.sync.aligned.32x32b.x16.b32 [{$r0}], {" + names + "};"
    ptx(code, read_only_args=[address, *words])
    cute.arch.fence_view_async_tmem_store()


def load_int32(address: Any) -> Any:
    return ptx("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_shared(address: Any) -> list[Any]:
    """Four words from a 16-byte aligned address of shared memory."""
    code = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(ptx(code, write_only_types=[Int32] * 4, read_only_args=[address]))


def load_shared_word(address: Any) -> Any:
    return ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_shared_byte(address: Any, word: Any) -> None:
    ptx("st.shared.u8 [{$r0}], {$r1};", read_only_args=[address, word])


def store_shared_half(address: Any, word: Any) -> None:
    ptx("{ .reg .b16 part; cvt.u16.u32 part, {$r1}; st.shared.b16 [{$r0}], part; }", read_only_args=[address, word])


def store_words(address: Any, words: list[Any], aligned: int) -> None:
    """Words to an address that is a multiple of `aligned`: 4, 8 or 16 bytes."""
    each = aligned // 4
    for first in range(0, len(words), each):
        part = words[first : first + each]
        names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(part)))
        vector = f".v{len(part)}" if len(part) > 1 else ""
        value = "{" + names + "}" if vector else names
        ptx(f"st.global{vector}.b32 [{{$r0}}], {value};", read_only_args=[address + 4 * first, *part])


def store_bytes(address: Any, value: Any, count: int) -> None:
    """The lowest 1, 2 or 4 bytes of a word, to an address that is a multiple of `count`."""
    if count == 4:
        ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])
    elif count == 2:
        code = "{ .reg .b16 part; cvt.u16.u32 part, {$r1}; st.global.b16 [{$r0}], part; }"
        ptx(code, read_only_args=[address, value])
    else:
        ptx("st.global.u8 [{$r0}], {$r1};", read_only_args=[address, value])
