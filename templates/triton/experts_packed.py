"""Routed experts on FP4 or FP8 weights with block scales, activations in FP8: the numbers of the V4.1 release.

    quantise x, sort -> act = silu(x w1^T) * x w3^T * weight, quantised -> act w2^T -> sum over the pairs of a token

Where the tensor cores take block scales, codes go into them as they are stored. Elsewhere weights are decoded to bf16
in registers, and the quantised activations are kept as bf16, which holds each of them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.moe import tile_of
from dscompile.templates.triton.device.packed_expert import (
    both_halves,
    packed_down_tile,
    packed_up_tile,
    store_rounded,
)
from dscompile.templates.triton.expert_sort import (
    BLOCK,
    CONFIG,
    FEW,
    chunk,
    few_programs,
    sort_few,
    sort_pairs,
    sorted_buffers,
)
from dscompile.templates.triton.experts import MOST_EXPERTS, combine, tokens_of_an_expert
from dscompile.templates.triton.launching import interpreting, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

GROUP = 32


@triton.jit
def quantise_kernel(
    x, x_stride, to, scales, plain, indices, rows, tiles, PAIRS, TILES,
    SIZE: tl.constexpr, HALVES: tl.constexpr, BLOCK_D: tl.constexpr, SORTING: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row of x a program, see `store_rounded`; plain, or None: the same in its order. The first SORTING programs sort
    instead, see `sort_few`."""
    program = tl.program_id(0)
    if program < SORTING:
        sort_few(program, indices, rows, tiles, PAIRS, TILES, EXPERTS, BINS, TILE, BLOCK, CHUNK)
    else:
        row = (program - SORTING).to(tl.int64) + tl.arange(0, 1)
        for first in range(0, SIZE, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            at = x + row[:, None] * x_stride + column[None, :]
            value = tl.load(at, mask=(column < SIZE)[None, :], other=0.0).to(tl.float32)
            store_rounded(value, to, scales, row, first, row >= 0, SIZE, HALVES, 1, BLOCK_D)
            if plain is not None:
                store_rounded(value, plain, None, row, first, row >= 0, SIZE, False, 1, BLOCK_D)


@triton.jit
def packed_up_kernel(
    x, x_scale, weights, w13, w13_scale, act, act_scale, kind, rows, tiles, TILES, limit,
    K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, CLAMP: tl.constexpr, E2M1: tl.constexpr,
    SCALED: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act[slot] = the quantised clamped_silu(x w1^T, x w3^T) * weight; sums and product are rounded to the type of
    `kind`, which is never accessed."""
    expert, slot, alive, pair = tile_of(tiles, rows, tl.program_id(1), TILES, BLOCK_T)
    if expert < 0:
        return
    PER_BYTE: tl.constexpr = 2 if E2M1 else 1
    SCALE_ROWS: tl.constexpr = 1 if E2M1 else 32
    first = tl.program_id(0) * BLOCK_I
    half, inner = both_halves(first, BLOCK_I)
    row = expert.to(tl.int64) * (2 * INNER) + half * INNER + inner
    weight = tl.load(weights + pair, mask=alive, other=0.0).to(tl.float32)
    packed_up_tile(
        w13 + row * (D // PER_BYTE), w13_scale + row // SCALE_ROWS * (D // 32), inner < INNER,
        x, x_scale, (pair // K).to(tl.int64), alive, weight, act, act_scale, slot, first, limit,
        D, INNER, CLAMP, kind.dtype.element_ty, E2M1, SCALED, WORDS, ASM, BLOCK_T, BLOCK_I, BLOCK_K,
    )  # fmt: skip


@triton.jit
def packed_down_kernel(
    act, act_scale, w2, w2_scale, results, rows, tiles, TILES,
    D: tl.constexpr, INNER: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """results[pair] = act[slot] w2^T: [pairs, D], rounded to its dtype."""
    expert, slot, alive, pair = tile_of(tiles, rows, tl.program_id(1), TILES, BLOCK_T)
    if expert < 0:
        return
    PER_BYTE: tl.constexpr = 2 if E2M1 else 1
    SCALE_ROWS: tl.constexpr = 1 if E2M1 else 32
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = expert.to(tl.int64) * D + column
    packed_down_tile(
        w2 + row * (INNER // PER_BYTE), w2_scale + row // SCALE_ROWS * (INNER // 32), column, act, act_scale, slot,
        alive, results, pair.to(tl.int64), D, INNER, E2M1, SCALED, WORDS, ASM, BLOCK_T, BLOCK_N, BLOCK_K,
    )  # fmt: skip


def rounded_buffers(like: Tensor, rows: int, size: int, scaled: bool) -> tuple[Tensor, Tensor | None]:
    """What `store_rounded` fills."""
    if not scaled:
        return like.new_empty((rows, size), dtype=torch.bfloat16), None
    return (
        like.new_empty((rows, size), dtype=torch.float8_e4m3fn),
        like.new_empty((rows, size // GROUP), dtype=torch.uint8),
    )


def prepare(
    x: Tensor, indices: Tensor, experts: int, tile: int, halves: bool, scaled: bool, plain: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Quantised x, its scales, and the sorted pairs, in one launch if there are few. plain: also gets quantised x, in
    its own order."""
    tokens, size = x.shape
    to, scales = rounded_buffers(x, tokens, size, scaled)
    few = indices.numel() <= FEW
    rows, tiles = (sorted_buffers if few else sort_pairs)(indices, experts, tile)
    sorting = few_programs(indices.numel()) if few else 0
    launch(
        quantise_kernel, (sorting + tokens,), x, x.stride(0), to, scales, plain, indices, rows, tiles,
        indices.numel(), tiles.shape[1], config=CONFIG, SIZE=size, HALVES=halves,
        BLOCK_D=min(2048, triton.next_power_of_2(size)), SORTING=sorting, EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1), TILE=tile, BLOCK=BLOCK, CHUNK=chunk(indices.numel()),
    )  # fmt: skip
    return to, scales, rows, tiles


def words(size: int, block: int) -> bool:
    """Whether scales of rows of `size` values can be loaded four at a time."""
    return size % (4 * GROUP) == 0 and block % (4 * GROUP) == 0


def experts_packed(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    limit: float, weight_format: str, out_dtype: torch.dtype, *, config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::experts_packed`: x [N, D] -> [N, D] in out_dtype.

    An index outside [0, E) is skipped like -1; the reference raises for all but -1.
    """
    tokens, k = indices.shape
    count, size, inner = w13.shape[0], x.shape[1], w13.shape[1] // 2
    e2m1, scaled = weight_format == "e2m1_1x32", target.has("block_scaled_mma")
    x = x if x.stride(-1) == 1 else x.contiguous()
    w13, w13_scale, w2, w2_scale, weights = (t.contiguous() for t in (w13, w13_scale, w2, w2_scale, weights))
    if not e2m1:
        w13, w2 = w13.view(torch.float8_e4m3fn), w2.view(torch.float8_e4m3fn)
    block_t, block_i, wanted = config["BLOCK_T"], config["BLOCK_I"], config["BLOCK_K"]
    rounded_x, x_scale, rows, tiles = prepare(x, indices.contiguous(), count, block_t, e2m1, scaled)
    most = tiles.shape[1]
    act, act_scale = rounded_buffers(x, tokens * k, inner, scaled)
    asm = target.has("wgmma") and not interpreting()
    kinds = {"E2M1": e2m1, "SCALED": scaled, "ASM": asm, "BLOCK_T": block_t}
    block_k = min(wanted, triton.next_power_of_2(size))
    launch(
        packed_up_kernel, (triton.cdiv(inner, block_i), most),
        rounded_x, x_scale, weights, w13, w13_scale, act, act_scale, x, rows, tiles, most, limit,
        config=config, K=k, D=size, INNER=inner, CLAMP=0 < limit < math.inf, **kinds, WORDS=words(size, block_k),
        BLOCK_I=block_i, BLOCK_K=block_k,
    )  # fmt: skip
    results = x.new_empty((tokens * k, size))
    block_k = min(wanted, triton.next_power_of_2(inner))
    launch(
        packed_down_kernel, (triton.cdiv(size, config["BLOCK_N"]), most),
        act, act_scale, w2, w2_scale, results, rows, tiles, most,
        config=config, D=size, INNER=inner, **kinds, WORDS=words(inner, block_k), BLOCK_N=config["BLOCK_N"],
        BLOCK_K=block_k,
    )  # fmt: skip
    out = x.new_empty(x.shape, dtype=out_dtype)
    combine(results, indices, weights, count, True, out, config)
    return out


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    average, fp4 = tokens_of_an_expert(sizes), sizes["weight_bytes"] < 1
    if target.has("block_scaled_mma"):  # takes 128 rows of weights, no fewer
        shapes = [(128, 4), (256, 3)] if fp4 else [(128, 4), (128, 3)]
        few = [config(4, s, BLOCK_T=t, BLOCK_I=64, BLOCK_N=128, BLOCK_K=k) for t in (16, 32) for k, s in shapes]
    else:
        few = [config(4, s, BLOCK_T=t, BLOCK_I=64, BLOCK_N=128, BLOCK_K=128) for t in (16, 32) for s in (4, 3)]
    tiles = [(128, 64), (64, 128), (64, 64)] if target.has("block_scaled_mma") else [(64, 64)]
    many = [config(8, s, BLOCK_T=t, BLOCK_I=i, BLOCK_N=128, BLOCK_K=128) for t, i in tiles for s in (4, 3)]
    yield from (*few, *many) if average <= 16 else (*many, *few)


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    activation = 1 if target.has("block_scaled_mma") else 2
    # FP4 is spread to a byte a value in shared memory.
    need = config.num_stages * config["BLOCK_K"] * (2 * config["BLOCK_I"] + config["BLOCK_T"] * activation)
    if need > target.smem_bytes_per_block:
        return f"{need} bytes of shared memory, allowed: {target.smem_bytes_per_block}"
    # Quantising what comes out of the sums needs as many again.
    registers = 2 * config["BLOCK_I"] * config["BLOCK_T"] // (32 * config.num_warps)
    return None if registers <= 64 else f"{registers} registers a thread for the sums, allowed: 64"


def _applies(meta: Meta) -> str | None:
    count, k = meta["w13"].shape[0], meta["indices"].shape[1]
    if not 1 <= count <= MOST_EXPERTS:
        return f"{count} experts, allowed: 1 to {MOST_EXPERTS}"
    return None if k > 0 and meta["w13"].numel() > 0 else f"{k} experts a token, weights {tuple(meta['w13'].shape)}"


TEMPLATES = (TritonTemplate("experts_packed", "dsv4::experts_packed", experts_packed, _configs, _check, _applies),)
