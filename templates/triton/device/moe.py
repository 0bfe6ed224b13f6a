"""Parts of the kernels of a mixture of experts: which tile a program has, and the sums at the end.

The rows of act and of the results are those of the routed pairs, then one a token for the shared expert.
"""

import triton
import triton.language as tl

from dscompile.templates.triton.device.gemm import clamped_silu, rounded


@triton.jit
def tile_of(tiles, rows, tile, TILES, BLOCK_T: tl.constexpr):
    """(expert or -1, slots, alive, pairs) of a tile of the sorted pairs; slots, alive and pairs are [BLOCK_T]."""
    expert = tl.load(tiles + tile)
    begin = tl.load(tiles + TILES + tile, mask=expert >= 0, other=0)
    end = tl.load(tiles + 2 * TILES + tile, mask=expert >= 0, other=0)
    slot = begin + tl.arange(0, BLOCK_T)
    alive = slot < end
    pair = tl.load(rows + slot, mask=alive, other=0)
    return expert, slot.to(tl.int64), alive, pair


@triton.jit
def shared_tile(program, N, BLOCK_T: tl.constexpr):
    """(part, tokens int64, alive) of a program of the shared expert.

    Programs beside each other have the same part of the weights, which then comes from memory once.
    """
    tiles = tl.cdiv(N, BLOCK_T)
    token = program % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    return program // tiles, token.to(tl.int64), token < N


@triton.jit
def pair_sum(
    results, indices, weights, row, column, inside,
    K: tl.constexpr, D: tl.constexpr, EXPERTS: tl.constexpr, BEFORE: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_D]: sum over j of results[row K + j] (times the weight if not BEFORE), j rising.

    A pair without an expert adds nothing: its row of `results` was never written. ROUND: as if the addends and the sum
    were of the dtype of `results`.
    """
    total = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(K):
        pair = row * K + j
        index = tl.load(indices + pair + tl.arange(0, 1)).to(tl.int64)  # [1]: the same for all columns
        has = (index >= 0) & (index < EXPERTS)
        value = tl.load(results + pair * D + column, mask=inside & has, other=0.0).to(tl.float32)
        if not BEFORE:
            value = value * tl.load(weights + pair + tl.arange(0, 1), mask=has, other=0.0).to(tl.float32)
            if ROUND:
                value = rounded(value, results.dtype.element_ty)
        total += value
    if ROUND:
        total = rounded(total, results.dtype.element_ty)
    return total


@triton.jit
def up_tile(
    weights, w13, w_expert, w_row, own_gate, gate_row, own_up, up_row, act, own_act, rows, tiles, N, TILES,
    K: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, BEFORE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """(expert or -1, first inner value, how many there are, where the gate's rows begin, their stride, where up's rows
    begin, their stride, tokens int64, alive, weights, rows of act) of this program; the last four [BLOCK_T].

    The programs of the shared expert, of which tokens have weight 1, come first.
    """
    program = tl.program_id(0)
    others = program - tl.cdiv(N, BLOCK_T) * tl.cdiv(SHARED, BLOCK_I)
    weight = tl.full((BLOCK_T,), 1.0, tl.float32)
    if others < 0:
        expert = program * 0
        part, token, alive = shared_tile(program, N, BLOCK_T)
        inner = SHARED + program * 0
        gate, gate_step, up, up_step = own_gate, gate_row, own_up, up_row
        to = own_act + token * SHARED
    else:
        expert, slot, alive, pair = tile_of(tiles, rows, others // tl.cdiv(INNER, BLOCK_I), TILES, BLOCK_T)
        part = others % tl.cdiv(INNER, BLOCK_I)
        token = (pair // K).to(tl.int64)
        inner = INNER + program * 0
        gate = w13 + expert.to(tl.int64) * w_expert
        up = gate + INNER * w_row
        gate_step, up_step = w_row, w_row
        if BEFORE:
            weight = tl.load(weights + pair, mask=alive, other=0.0).to(tl.float32)
        to = act + slot * INNER
    return expert, part * BLOCK_I, inner, gate, gate_step, up, up_step, token, alive, weight, to


@triton.jit
def store_act(gate, up, limit, weight, to, inner, mask, KIND: tl.constexpr, CLAMP: tl.constexpr, BEFORE: tl.constexpr):
    """to[inner] = clamped_silu of gate and up [inner, tokens] rounded to KIND; BEFORE: in fp32, times the weight."""
    gate, up = rounded(gate, KIND), rounded(up, KIND)
    if BEFORE:
        result = clamped_silu(gate, up, limit, CLAMP, tl.float32) * weight[None, :]
    else:
        result = clamped_silu(gate, up, limit, CLAMP, KIND)
    tl.store(to[None, :] + inner[:, None], result.to(KIND), mask=mask)


@triton.jit
def down_tile(
    act, own_act, w2, w_expert, w_row, own_down, down_row, results, own_results, rows, tiles, N, TILES,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(expert or -1, first column, where the weight's rows begin, their stride, act, slots in it int64, alive, rows of
    the results) of this program."""
    program = tl.program_id(0)
    others = program - tl.cdiv(N, BLOCK_T) * tl.cdiv(D, BLOCK_N)
    if others < 0:
        expert = program * 0
        part, slot, alive = shared_tile(program, N, BLOCK_T)
        w, step, source = own_down, down_row, own_act
        to = own_results + slot * D
    else:
        expert, slot, alive, pair = tile_of(tiles, rows, others // tl.cdiv(D, BLOCK_N), TILES, BLOCK_T)
        part = others % tl.cdiv(D, BLOCK_N)
        w, step, source = w2 + expert.to(tl.int64) * w_expert, w_row, act
        to = results + pair.to(tl.int64) * D
    return expert, part * BLOCK_N, w, step, source, slot, alive, to
