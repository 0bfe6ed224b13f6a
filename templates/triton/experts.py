"""Routed experts: pairs sorted by expert, two grouped products, and a sum per token in a fixed order.

    sort -> act = silu(x w1^T) * x w3^T [* weight] -> act w2^T, one row a pair -> sum over the pairs of a token

No index is looked at on the host, every buffer has a static size, and nothing is added atomically: results repeat bit
for bit. An expert without a token has no tile, and a pair without an expert is left out of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.gemm import clamped_silu, product, product_pair, rounded
from dscompile.templates.triton.device.moe import pair_sum, tile_of
from dscompile.templates.triton.expert_sort import sort_pairs
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

MOST_EXPERTS = 4095


@triton.jit
def expert_up_kernel(
    x, x_stride, weights, w13, w_expert, w_row, act, rows, tiles, TILES, limit,
    K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, CLAMP: tl.constexpr, BEFORE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act[slot] = clamped_silu(x w1^T, x w3^T), with BEFORE in fp32 and times the pair's weight; act [slots, INNER]."""
    expert, slot, alive, pair = tile_of(tiles, rows, tl.program_id(1), TILES, BLOCK_T)
    if expert < 0:
        return
    inner = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = inner < INNER
    w1 = w13 + expert.to(tl.int64) * w_expert + inner.to(tl.int64) * w_row
    w3 = w1 + INNER * w_row
    token = x + (pair // K).to(tl.int64) * x_stride
    gate, up = product_pair(w1, w3, inside, token, alive, D, BLOCK_I, BLOCK_T, BLOCK_K)
    kind = act.dtype.element_ty
    gate, up = rounded(gate, kind), rounded(up, kind)
    if BEFORE:
        weight = tl.load(weights + pair, mask=alive, other=0.0).to(tl.float32)
        result = clamped_silu(gate, up, limit, CLAMP, tl.float32) * weight[None, :]
    else:
        result = clamped_silu(gate, up, limit, CLAMP, kind)
    at = act + slot[None, :] * INNER + inner[:, None]
    tl.store(at, result.to(kind), mask=alive[None, :] & inside[:, None])


@triton.jit
def expert_down_kernel(
    act, w2, w_expert, w_row, results, rows, tiles, TILES,
    D: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """results[pair] = act[slot] w2^T: [pairs, D], rounded to its dtype."""
    expert, slot, alive, pair = tile_of(tiles, rows, tl.program_id(1), TILES, BLOCK_T)
    if expert < 0:
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < D
    w = w2 + expert.to(tl.int64) * w_expert + column.to(tl.int64) * w_row
    total = product(w, inside, act + slot * INNER, alive, INNER, BLOCK_N, BLOCK_T, BLOCK_K)
    at = results + pair.to(tl.int64)[None, :] * D + column[:, None]
    tl.store(at, total.to(results.dtype.element_ty), mask=alive[None, :] & inside[:, None])


@triton.jit
def combine_kernel(
    results, indices, weights, out,
    K: tl.constexpr, D: tl.constexpr, EXPERTS: tl.constexpr, BEFORE: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[n] = the `pair_sum` of its pairs."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    total = pair_sum(results, indices, weights, row, column, inside, K, D, EXPERTS, BEFORE, ROUND, BLOCK_D)
    tl.store(out + row * D + column, total.to(out.dtype.element_ty), mask=inside)


def combine(
    results: Tensor, indices: Tensor, weights: Tensor, experts: int, before: bool, out: Tensor, config: Config
) -> None:
    tokens, k = indices.shape
    size = out.shape[1]
    block = min(1024, triton.next_power_of_2(size))
    launch(
        combine_kernel, (tokens, triton.cdiv(size, block)), results, indices.contiguous(), weights, out,
        config=config, K=k, D=size, EXPERTS=experts, BEFORE=before,
        ROUND=not before and weights.dtype == results.dtype, BLOCK_D=block,
    )  # fmt: skip


def block_k(size: int, wanted: int) -> int:
    """No longer than the product is, and no shorter than tensor cores take."""
    return max(16, min(wanted, triton.next_power_of_2(size)))


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, weight_before_down: bool,
    out_dtype: torch.dtype, *, config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::experts`: x [N, D] -> [N, D] in out_dtype.

    An index outside [0, E) is skipped like -1; the reference raises for all but -1.
    """
    tokens, k = indices.shape
    count, size, inner = w13.shape[0], x.shape[1], w2.shape[2]
    x, w13, w2 = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, w13, w2))
    weights = weights.contiguous()
    block_t = config["BLOCK_T"]
    rows, tiles = sort_pairs(indices, count, block_t)
    most = tiles.shape[1]
    act = x.new_empty((tokens * k, inner))
    launch(
        expert_up_kernel, (triton.cdiv(inner, config["BLOCK_I"]), most),
        x, x.stride(0), weights, w13, w13.stride(0), w13.stride(1), act, rows, tiles, most, limit,
        config=config, K=k, D=size, INNER=inner, CLAMP=0 < limit < math.inf, BEFORE=weight_before_down,
        BLOCK_T=block_t, BLOCK_I=config["BLOCK_I"], BLOCK_K=block_k(size, config["BLOCK_K"]),
    )  # fmt: skip
    results = x.new_empty((tokens * k, size))
    launch(
        expert_down_kernel, (triton.cdiv(size, config["BLOCK_N"]), most),
        act, w2, w2.stride(0), w2.stride(1), results, rows, tiles, most,
        config=config, D=size, INNER=inner, BLOCK_T=block_t, BLOCK_N=config["BLOCK_N"],
        BLOCK_K=block_k(inner, config["BLOCK_K"]),
    )  # fmt: skip
    out = x.new_empty(x.shape, dtype=out_dtype)
    combine(results, indices, weights, count, weight_before_down, out, config)
    return out


def tokens_of_an_expert(sizes: Sizes) -> float:
    """On average, among those that get any."""
    pairs = sizes["N"] * sizes["k"]
    return pairs / max(1, min(sizes["E"], pairs))


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    if sizes["weight_bytes"] == 4:
        yield config(8, 2, BLOCK_T=16, BLOCK_I=64, BLOCK_N=64, BLOCK_K=32)
        yield config(8, 2, BLOCK_T=32, BLOCK_I=64, BLOCK_N=64, BLOCK_K=32)
        return
    average = tokens_of_an_expert(sizes)
    few = [config(4, s, BLOCK_T=t, BLOCK_I=128, BLOCK_N=128, BLOCK_K=k)
           for t in (16, 32) for k, s in ((128, 3), (64, 4))]  # fmt: skip
    many = [config(8, s, BLOCK_T=t, BLOCK_I=i, BLOCK_N=128, BLOCK_K=64)
            for t, i in ((128, 128), (128, 64), (64, 128)) for s in (3, 4)]  # fmt: skip
    if average <= 16:
        yield from (*few, *many)
    else:
        yield from (*(many if average > 64 else reversed(many)), *few)


def shared_bytes(config: Config, value_bytes: int) -> int:
    """What the pipeline of the first product keeps in shared memory."""
    return config.num_stages * config["BLOCK_K"] * (2 * config["BLOCK_I"] + config["BLOCK_T"]) * value_bytes


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    need = shared_bytes(config, sizes["weight_bytes"])
    if need > target.smem_bytes_per_block:
        return f"{need} bytes of shared memory, allowed: {target.smem_bytes_per_block}"
    registers = 2 * config["BLOCK_I"] * config["BLOCK_T"] // (32 * config.num_warps)
    # In tensor memory the sums only pass through registers at the end.
    most = 128 if target.has("tcgen05") else 64
    return None if registers <= most else f"{registers} registers a thread for the sums, allowed: {most}"


def _applies(meta: Meta) -> str | None:
    count = meta["w13"].shape[0]
    if not 1 <= count <= MOST_EXPERTS:
        return f"{count} experts, allowed: 1 to {MOST_EXPERTS}"
    sizes = (meta["x"].shape[1], meta["w2"].shape[2], meta["indices"].shape[1])
    return None if min(sizes) > 0 else f"width, inner width and experts a token are {sizes}, allowed: at least 1 each"


TEMPLATES = (TritonTemplate("experts", "dsv4::experts", experts, _configs, _check, _applies),)
