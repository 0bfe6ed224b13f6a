"""Parts of the kernels of a mixture of experts: which tile a program has, and the sums at the end.

The rows of act and of the results are those of the routed pairs, then one a token for the shared expert.
"""

import triton
import triton.language as tl

from dscompile.templates.triton.device.gemm import rounded


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
