"""Products of stored FP4 or FP8 weights with FP8 activations, block scales on both sides.

Two forms. SCALED: `tl.dot_scaled` on codes and scales, one instruction of the tensor core. Otherwise weights are
decoded to bf16 in registers, which is exact, and the rounded activations come as bf16. A byte of two FP4 weights would
then give two neighbouring columns; so that no column has to move, the activations lie with all even columns first
("halves"), and low and high nibbles are two products.
"""

import triton
import triton.language as tl

from dscompile.templates.triton.device.formats import e2m1_value, ue8m0_value
from dscompile.templates.triton.device.gemm import load_tile


@triton.jit
def load_scales(rows, alive, first, GROUPS: tl.constexpr, R: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """rows: pointers uint8 [R] to GROUPS scales each -> uint8 [R, COUNT] from `first` on.

    WORDS: the rows begin at multiples of 4 bytes and GROUPS is one, so four are loaded at once: copies to shared
    memory are at least that wide, and narrower loads would not be pipelined.
    """
    if WORDS:
        word = first // 4 + tl.arange(0, COUNT // 4)
        at = rows.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
        if GROUPS % COUNT == 0:
            four = tl.load(at, mask=alive[:, None], other=0)
        else:
            four = tl.load(at, mask=alive[:, None] & (word < GROUPS // 4)[None, :], other=0)
        byte = (four[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255
        return tl.reshape(byte, (R, COUNT)).to(tl.uint8)
    else:
        group = first + tl.arange(0, COUNT)
        return tl.load(rows[:, None] + group[None, :], mask=alive[:, None] & (group < GROUPS)[None, :], other=0)


@triton.jit
def spread(scales, R: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr):
    """uint8 [R, COUNT] -> bf16 [R, COUNT * EACH]: the scale of every column."""
    wide = tl.expand_dims(ue8m0_value(scales).to(tl.bfloat16), 2)
    return tl.reshape(tl.broadcast_to(wide, (R, COUNT, EACH)), (R, COUNT * EACH))


@triton.jit
def e2m1_pair(payload, scale, ASM: tl.constexpr):
    """Bytes and their scales bf16 [R, C] -> bf16 [R, C] of the low nibbles and of the high ones, times the scales.

    ASM: four bytes at a time. A nibble seem becomes s00000eem000000, the bf16 number of value * 2^-126; multiplying by
    2^126 and by the scale is exact. The other form is for machines without the instructions, and for the interpreter.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, s, m;
            prmt.b32 p, $4, 0, 0x4140;
            prmt.b32 q, $4, 0, 0x4342;
            shl.b32 s, p, 12; and.b32 s, s, 0x80008000; shl.b32 m, p, 6; and.b32 m, m, 0x01C001C0; or.b32 $0, s, m;
            shl.b32 s, q, 12; and.b32 s, s, 0x80008000; shl.b32 m, q, 6; and.b32 m, m, 0x01C001C0; or.b32 $1, s, m;
            shl.b32 s, p, 8; and.b32 s, s, 0x80008000; shl.b32 m, p, 2; and.b32 m, m, 0x01C001C0; or.b32 $2, s, m;
            shl.b32 s, q, 8; and.b32 s, s, 0x80008000; shl.b32 m, q, 2; and.b32 m, m, 0x01C001C0; or.b32 $3, s, m;
            mov.b32 m, 0x7E807E80;
            mul.rn.bf16x2 $0, $0, m; mul.rn.bf16x2 $1, $1, m; mul.rn.bf16x2 $2, $2, m; mul.rn.bf16x2 $3, $3, m;
            mul.rn.bf16x2 $0, $0, $5; mul.rn.bf16x2 $1, $1, $6; mul.rn.bf16x2 $2, $2, $5; mul.rn.bf16x2 $3, $3, $6;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r", [payload, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    wide, factor = payload.to(tl.int32), scale.to(tl.float32)
    low, high = e2m1_value(wide & 15) * factor, e2m1_value(wide >> 4) * factor
    return low.to(tl.bfloat16), high.to(tl.bfloat16)


@triton.jit
def load_x(
    x_rows, x_scales, x_alive, start,
    SIZE: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns from `start` on -> a pair: [BLOCK_K, TOKENS] and scales [TOKENS, BLOCK_K / 32], or two halves, or twice
    the same."""
    if SCALED:
        x = load_tile(x_rows, start + tl.arange(0, BLOCK_K), x_alive, SIZE, BLOCK_K)
        return tl.trans(x), load_scales(x_scales, x_alive, start // 32, SIZE // 32, TOKENS, BLOCK_K // 32, WORDS)
    elif E2M1:
        column = start // 2 + tl.arange(0, BLOCK_K // 2)
        even = load_tile(x_rows, column, x_alive, SIZE // 2, BLOCK_K // 2)
        return tl.trans(even), tl.trans(load_tile(x_rows + SIZE // 2, column, x_alive, SIZE // 2, BLOCK_K // 2))
    else:
        x = tl.trans(load_tile(x_rows, start + tl.arange(0, BLOCK_K), x_alive, SIZE, BLOCK_K))
        return x, x


@triton.jit
def packed_dot(
    total, w_rows, w_scales, w_alive, x, other, start,
    SIZE: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total + the columns from `start` on of the weight rows times what `load_x` gave: fp32 [ROWS, TOKENS]."""
    PER_BYTE: tl.constexpr = 2 if E2M1 else 1
    COUNT: tl.constexpr = BLOCK_K // 32
    column = start // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
    w = load_tile(w_rows, column, w_alive, SIZE // PER_BYTE, BLOCK_K // PER_BYTE)
    scales = load_scales(w_scales, w_alive, start // 32, SIZE // 32, ROWS, COUNT, WORDS)
    if SCALED:
        return tl.dot_scaled(w, scales, "e2m1" if E2M1 else "e4m3", x, other, "e4m3", total)
    elif E2M1:
        low, high = e2m1_pair(w, spread(scales, ROWS, COUNT, 16), ASM)
        return tl.dot(high, other, tl.dot(low, x, total))
    else:
        return tl.dot(w.to(tl.bfloat16) * spread(scales, ROWS, COUNT, 32), x, total)


@triton.jit
def packed_product(
    w_rows, w_scales, w_alive, x_rows, x_scales, x_alive,
    SIZE: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stored weight rows times activations: fp32 [ROWS, TOKENS]. x_rows: E4M3 if SCALED, else bf16 values."""
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        x, other = load_x(x_rows, x_scales, x_alive, start, SIZE, E2M1, SCALED, WORDS, TOKENS, BLOCK_K)
        total = packed_dot(
            total, w_rows, w_scales, w_alive, x, other, start, SIZE, E2M1, SCALED, WORDS, ASM, ROWS, BLOCK_K
        )
    return total
