"""A mixture of experts in four launches: sort, up, down, and the sums with the way back into the streams.

The shared expert is one more group of the two grouped products, with its own weights and with every token. Its programs
come first: their number is known, and the others wait for nothing but the sorted pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.gemm import product, product_pair
from dscompile.templates.triton.device.moe import down_tile, store_act, up_tile
from dscompile.templates.triton.expert_sort import sort_pairs
from dscompile.templates.triton.experts import TEMPLATES as EXPERTS
from dscompile.templates.triton.experts import block_k
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.moe_sum import moe_sum, sum_applies
from dscompile.templates.triton.moe_tma import (
    moe_down_tma_kernel,
    moe_up_tma_kernel,
    prepared,
    refusal,
    tma_configs,
)
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate

(_EXPERTS,) = EXPERTS


@triton.jit
def moe_up_kernel(
    x, x_stride, weights, w13, w_expert, w_row, own_gate, gate_row, own_up, up_row, act, own_act, rows, tiles, N, TILES,
    limit,
    K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, CLAMP: tl.constexpr,
    BEFORE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act[slot] = clamped_silu(x w1^T, x w3^T), with BEFORE in fp32 and times the pair's weight; act [slots, INNER].

    own_act [N, SHARED] is that of the shared expert, whose weight is 1.
    """
    expert, first, width, w1, w1_row, w3, w3_row, token, alive, weight, to = up_tile(
        weights, w13, w_expert, w_row, own_gate, gate_row, own_up, up_row, act, own_act, rows, tiles, N, TILES,
        K, INNER, SHARED, BEFORE, BLOCK_T, BLOCK_I,
    )  # fmt: skip
    if expert < 0:
        return
    inner = first + tl.arange(0, BLOCK_I)
    inside = inner < width
    w1_rows, w3_rows = w1 + inner.to(tl.int64) * w1_row, w3 + inner.to(tl.int64) * w3_row
    gate, up = product_pair(w1_rows, w3_rows, inside, x + token * x_stride, alive, D, BLOCK_I, BLOCK_T, BLOCK_K)
    mask = alive[None, :] & inside[:, None]
    store_act(gate, up, limit, weight, to, inner, mask, act.dtype.element_ty, CLAMP, BEFORE)


@triton.jit
def moe_down_kernel(
    act, own_act, w2, w_expert, w_row, own_down, down_row, results, own_results, rows, tiles, N, TILES,
    D: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """results[pair] = act[slot] w2^T: [pairs, D], rounded to its dtype; own_results [N, D] of the shared expert."""
    expert, first, w, step, source, slot, alive, to = down_tile(
        act, own_act, w2, w_expert, w_row, own_down, down_row, results, own_results, rows, tiles, N, TILES, D, BLOCK_T,
        BLOCK_N,
    )  # fmt: skip
    if expert < 0:
        return
    column = first + tl.arange(0, BLOCK_N)
    inside = column < D
    w_rows = w + column.to(tl.int64) * step
    if SHARED == INNER:
        total = product(w_rows, inside, source + slot * INNER, alive, INNER, BLOCK_N, BLOCK_T, BLOCK_K)
    else:
        # How long the loop is stays known to the compiler.
        if tl.program_id(0) < tl.cdiv(N, BLOCK_T) * tl.cdiv(D, BLOCK_N):
            total = product(w_rows, inside, source + slot * SHARED, alive, SHARED, BLOCK_N, BLOCK_T, BLOCK_K)
        else:
            total = product(w_rows, inside, source + slot * INNER, alive, INNER, BLOCK_N, BLOCK_T, BLOCK_K)
    tl.store(to[None, :] + column[:, None], total.to(act.dtype.element_ty), mask=alive[None, :] & inside[:, None])


def moe(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float, weight_before_down: bool, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool, *, config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::moe`: x [N, D] -> [N, D], or with streams [N, n, D] their shape.

    An index outside [0, E) is skipped like -1; the reference raises for all but -1.
    """
    tokens, k = indices.shape
    count, size, inner, shared = w13.shape[0], x.shape[1], w2.shape[2], shared_gate.shape[0]
    x, w13, w2, own_gate, own_up, own_down = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (x, w13, w2, shared_gate, shared_up, shared_down)
    )
    indices, weights = indices.contiguous(), weights.contiguous()
    block_t, block_i, block_n = config["BLOCK_T"], config["BLOCK_I"], config["BLOCK_N"]
    rows, tiles = sort_pairs(indices, count, block_t)
    most, own_tiles = tiles.shape[1], triton.cdiv(tokens, block_t)
    act, own_act = x.new_empty((tokens * k, inner)), x.new_empty((tokens, shared))
    tma = dict(config.constants).get("TMA", 0) and prepared(x, w13, w2, own_gate, own_up, own_down)
    sizes = {"D": size, "INNER": inner, "BLOCK_T": block_t}
    up_kernel, variant = moe_up_kernel, dict[str, int]()
    if tma:
        up_kernel, variant = moe_up_tma_kernel, {"GATHER": target.has("tcgen05")}
    launch(
        up_kernel, (own_tiles * triton.cdiv(shared, block_i) + most * triton.cdiv(inner, block_i),),
        x, x.stride(0), weights, w13, w13.stride(0), w13.stride(1), own_gate, own_gate.stride(0), own_up,
        own_up.stride(0), act, own_act, rows, tiles, tokens, most, limit,
        config=config, K=k, **sizes, SHARED=shared, CLAMP=0 < limit < math.inf, BEFORE=weight_before_down,
        BLOCK_I=block_i, BLOCK_K=block_k(size, config["BLOCK_K"]), **variant,
    )  # fmt: skip
    results, own_results = x.new_empty((tokens * k, size)), x.new_empty((tokens, size))
    down_kernel, variant = moe_down_kernel, {"SHARED": shared}
    if tma:
        down_kernel, variant = moe_down_tma_kernel, {"SPECIAL": target.has("tcgen05")}
    launch(
        down_kernel, ((own_tiles + most) * triton.cdiv(size, block_n),),
        act, own_act, w2, w2.stride(0), w2.stride(1), own_down, own_down.stride(0), results, own_results, rows, tiles,
        tokens, most,
        config=config, **sizes, BLOCK_N=block_n, BLOCK_K=block_k(min(inner, shared), config["BLOCK_K"]), **variant,
    )  # fmt: skip
    return moe_sum(
        results, own_results, indices, weights, count, weight_before_down, routed_dtype, streams, post, comb, fp32
    )


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """Those of the experts, and copies by descriptor after the first that fits: which is faster has to be measured."""
    plain = list(_EXPERTS.configs(sizes, target))
    fitting = [place for place, config in enumerate(plain) if _EXPERTS.check(config, sizes, target) is None]
    place = fitting[0] + 1 if fitting else len(plain)
    yield from (*plain[:place], *tma_configs(sizes, target), *plain[place:])


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    why_not = refusal(sizes, target) if dict(config.constants).get("TMA", 0) else None
    return why_not or _EXPERTS.check(config, sizes, target)


def _applies(meta: Meta) -> str | None:
    if meta["shared_gate"].shape[0] == 0:
        return "the shared expert has no inner values, allowed: at least 1"
    return _EXPERTS.applies(meta) or sum_applies(meta)


TEMPLATES = (TritonTemplate("moe", "dsv4::moe", moe, _configs, _check, _applies),)
