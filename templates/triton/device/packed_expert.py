"""A tile of an expert on stored weights: up with what follows it, and down. See `packed` for the two forms."""

import triton
import triton.language as tl

from dscompile.templates.triton.device.formats import divide_by_scales, e4m3_bytes, scales_of
from dscompile.templates.triton.device.gemm import clamped_silu, rounded
from dscompile.templates.triton.device.packed import packed_product


@triton.jit
def store_rounded(
    x, to, scales, row, first, alive, SIZE: tl.constexpr, HALVES: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    """fp32 [N, D] rounded to E4M3 with a power-of-two scale per 32, from column `first` of the rows of `to`, which has
    SIZE columns: as codes and scales, or, where `scales` is None, as bf16 values. HALVES: even columns first."""
    factor, stored = scales_of(x, N, D, 32, 448.0, 1e-4, True)
    column = first + tl.arange(0, D)
    inside = alive[:, None] & (column < SIZE)[None, :]
    at = to + row[:, None] * SIZE + column[None, :]
    codes = e4m3_bytes(divide_by_scales(x, factor, N, D, 32, 448.0)).to(tl.float8e4nv, bitcast=True)
    if scales is None:
        grouped = tl.reshape(codes.to(tl.float32), (N, D // 32, 32)) * tl.expand_dims(factor, 2)
        values = tl.reshape(grouped, (N, D)).to(tl.bfloat16)
        if HALVES:
            even, odd = tl.split(tl.reshape(values, (N, D // 2, 2)))
            column = first // 2 + tl.arange(0, D // 2)
            at = to + row[:, None] * SIZE + column[None, :]
            inside = alive[:, None] & (column < SIZE // 2)[None, :]
            tl.store(at, even, mask=inside)
            tl.store(at + SIZE // 2, odd, mask=inside)
        else:
            tl.store(at, values, mask=inside)
    else:
        tl.store(at, codes, mask=inside)
        group = first // 32 + tl.arange(0, D // 32)
        there = scales + row[:, None] * (SIZE // 32) + group[None, :]
        tl.store(there, stored, mask=alive[:, None] & (group < SIZE // 32)[None, :])


@triton.jit
def both_halves(first, BLOCK_I: tl.constexpr):
    """(0 for a row of the gate or 1 for one of up, inner index), both [2 BLOCK_I], of a tile that begins at `first`.

    One product over rows of both: two with the same scales of x do not compile with Triton 3.6.
    """
    both = tl.arange(0, 2 * BLOCK_I)
    return both // BLOCK_I, first + both % BLOCK_I


@triton.jit
def packed_up_tile(
    w_rows, w_scales, inside, x, x_scale, token, alive, weight, act, act_scale, slot, first, limit,
    D: tl.constexpr, INNER: tl.constexpr, CLAMP: tl.constexpr, ROUNDING: tl.constexpr, E2M1: tl.constexpr,
    SCALED: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act[slot] = the quantised clamped_silu(x w1^T, x w3^T) * weight; sums and product are rounded to ROUNDING.

    w_rows, w_scales: pointers to the rows that `both_halves` names.
    """
    token_scale = None
    if SCALED:
        token_scale = x_scale + token * (D // 32)
    total = packed_product(
        w_rows, w_scales, inside, x + token * D, token_scale, alive, D, E2M1, SCALED, WORDS, ASM, 2 * BLOCK_I, BLOCK_T,
        BLOCK_K,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_I, BLOCK_T)), (1, 2, 0)))
    gate, up = rounded(gate, ROUNDING), rounded(up, ROUNDING)
    result = rounded(clamped_silu(gate, up, limit, CLAMP, tl.float32) * weight[None, :], ROUNDING)
    store_rounded(tl.trans(result), act, act_scale, slot, first, alive, INNER, E2M1, BLOCK_T, BLOCK_I)


@triton.jit
def packed_down_tile(
    w_rows, w_scales, column, act, act_scale, slot, alive, results, row,
    D: tl.constexpr, INNER: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """results[row] = act[slot] times the weight rows, whose numbers are `column`; rounded to its dtype."""
    slot_scale = None
    if SCALED:
        slot_scale = act_scale + slot * (INNER // 32)
    inside = column < D
    total = packed_product(
        w_rows, w_scales, inside, act + slot * INNER, slot_scale, alive, INNER, E2M1, SCALED, WORDS, ASM, BLOCK_N,
        BLOCK_T, BLOCK_K,
    )  # fmt: skip
    at = results + row[None, :] * D + column[:, None]
    tl.store(at, total.to(results.dtype.element_ty), mask=alive[None, :] & inside[:, None])
