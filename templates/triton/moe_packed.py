"""`moe` on stored weights, in four launches: quantise and sort, up, down, sums. See `experts_packed` for its two forms.

The shared expert's weights are E4M3 in blocks of 32 x 32 whatever those of the others are, so its tiles are a branch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.moe import shared_tile, tile_of
from dscompile.templates.triton.device.packed_expert import both_halves, packed_down_tile, packed_up_tile
from dscompile.templates.triton.experts_packed import TEMPLATES as EXPERTS
from dscompile.templates.triton.experts_packed import prepare, rounded_buffers, words
from dscompile.templates.triton.launching import interpreting, launch
from dscompile.templates.triton.moe_sum import moe_sum, sum_applies
from dscompile.templates.triton.record import Config, Meta, TritonTemplate

(_EXPERTS,) = EXPERTS


@triton.jit
def moe_packed_up_kernel(
    x, x_scale, own_x, weights, w13, w13_scale, own_gate, own_gate_scale, own_up, own_up_scale, act, act_scale, own_act,
    own_act_scale, kind, rows, tiles, N, TILES, limit,
    K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, CLAMP: tl.constexpr,
    E2M1: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act [slots, INNER] and own_act [N, SHARED], see `packed_up_tile`. own_x: x in its own order, with x_scale."""
    program = tl.program_id(0)
    others = program - tl.cdiv(N, BLOCK_T) * tl.cdiv(SHARED, BLOCK_I)
    if others < 0:
        part, token, alive = shared_tile(program, N, BLOCK_T)
        first = part * BLOCK_I
        half, inner = both_halves(first, BLOCK_I)
        row = inner.to(tl.int64)
        # The compiler does not see that the choice of two aligned pointers is aligned.
        own_rows = tl.multiple_of(tl.where(half == 0, own_gate, own_up) + row * D, 16)
        packed_up_tile(
            own_rows,
            tl.where(half == 0, own_gate_scale, own_up_scale) + row // 32 * (D // 32), inner < SHARED,
            own_x, x_scale, token, alive, tl.full((BLOCK_T,), 1.0, tl.float32), own_act, own_act_scale, token, first,
            limit, D, SHARED, CLAMP, kind.dtype.element_ty, False, SCALED, WORDS, ASM, BLOCK_T, BLOCK_I, BLOCK_K,
        )  # fmt: skip
    else:
        expert, slot, alive, pair = tile_of(tiles, rows, others // tl.cdiv(INNER, BLOCK_I), TILES, BLOCK_T)
        if expert >= 0:
            PER_BYTE: tl.constexpr = 2 if E2M1 else 1
            SCALE_ROWS: tl.constexpr = 1 if E2M1 else 32
            first = others % tl.cdiv(INNER, BLOCK_I) * BLOCK_I
            half, inner = both_halves(first, BLOCK_I)
            row = expert.to(tl.int64) * (2 * INNER) + half * INNER + inner
            weight = tl.load(weights + pair, mask=alive, other=0.0).to(tl.float32)
            packed_up_tile(
                w13 + row * (D // PER_BYTE), w13_scale + row // SCALE_ROWS * (D // 32), inner < INNER,
                x, x_scale, (pair // K).to(tl.int64), alive, weight, act, act_scale, slot, first, limit,
                D, INNER, CLAMP, kind.dtype.element_ty, E2M1, SCALED, WORDS, ASM, BLOCK_T, BLOCK_I, BLOCK_K,
            )  # fmt: skip


@triton.jit
def moe_packed_down_kernel(
    act, act_scale, own_act, own_act_scale, w2, w2_scale, own_down, own_down_scale, results, own_results, rows, tiles,
    N, TILES,
    D: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr,
    WORDS: tl.constexpr, OWN_WORDS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """results[pair] = act[slot] w2^T: [pairs, D], rounded to its dtype; own_results [N, D] of the shared expert."""
    program = tl.program_id(0)
    others = program - tl.cdiv(N, BLOCK_T) * tl.cdiv(D, BLOCK_N)
    if others < 0:
        part, token, alive = shared_tile(program, N, BLOCK_T)
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)
        row = column.to(tl.int64)
        packed_down_tile(
            own_down + row * SHARED, own_down_scale + row // 32 * (SHARED // 32), column, own_act, own_act_scale, token,
            alive, own_results, token, D, SHARED, False, SCALED, OWN_WORDS, ASM, BLOCK_T, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        expert, slot, alive, pair = tile_of(tiles, rows, others // tl.cdiv(D, BLOCK_N), TILES, BLOCK_T)
        if expert >= 0:
            PER_BYTE: tl.constexpr = 2 if E2M1 else 1
            SCALE_ROWS: tl.constexpr = 1 if E2M1 else 32
            column = others % tl.cdiv(D, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
            row = expert.to(tl.int64) * D + column
            packed_down_tile(
                w2 + row * (INNER // PER_BYTE), w2_scale + row // SCALE_ROWS * (INNER // 32), column, act, act_scale,
                slot, alive, results, pair.to(tl.int64), D, INNER, E2M1, SCALED, WORDS, ASM, BLOCK_T, BLOCK_N, BLOCK_K,
            )  # fmt: skip


def aligned(t: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def moe_packed(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    shared_gate: Tensor, shared_gate_scale: Tensor, shared_up: Tensor, shared_up_scale: Tensor, shared_down: Tensor,
    shared_down_scale: Tensor, limit: float, weight_format: str, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool, *, config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::moe_packed`: x [N, D] -> [N, D], or with streams [N, n, D] their shape.

    An index outside [0, E) is skipped like -1; the reference raises for all but -1.
    """
    tokens, k = indices.shape
    count, size, inner, shared = w13.shape[0], x.shape[1], w13.shape[1] // 2, shared_gate.shape[0]
    e2m1, scaled = weight_format == "e2m1_1x32", target.has("block_scaled_mma")
    x = x if x.stride(-1) == 1 else x.contiguous()
    indices, weights, w13, w13_scale, w2, w2_scale = (
        t.contiguous() for t in (indices, weights, w13, w13_scale, w2, w2_scale)
    )
    own_gate, own_up, own_down = (aligned(t).view(torch.float8_e4m3fn) for t in (shared_gate, shared_up, shared_down))
    own_scales = [aligned(t) for t in (shared_gate_scale, shared_up_scale, shared_down_scale)]
    if not e2m1:
        w13, w2 = w13.view(torch.float8_e4m3fn), w2.view(torch.float8_e4m3fn)
    block_t, block_i, block_n, wanted = (config[name] for name in ("BLOCK_T", "BLOCK_I", "BLOCK_N", "BLOCK_K"))
    halves = e2m1 and not scaled
    plain = rounded_buffers(x, tokens, size, scaled)[0] if halves else None
    rounded_x, x_scale, rows, tiles = prepare(x, indices, count, block_t, e2m1, scaled, plain)
    most, own_tiles = tiles.shape[1], triton.cdiv(tokens, block_t)
    act, act_scale = rounded_buffers(x, tokens * k, inner, scaled)
    own_act, own_act_scale = rounded_buffers(x, tokens, shared, scaled)
    asm = target.has("wgmma") and not interpreting()
    kinds = {"INNER": inner, "SHARED": shared, "E2M1": e2m1, "SCALED": scaled, "ASM": asm, "BLOCK_T": block_t}
    block_k = min(wanted, triton.next_power_of_2(size))
    launch(
        moe_packed_up_kernel, (own_tiles * triton.cdiv(shared, block_i) + most * triton.cdiv(inner, block_i),),
        rounded_x, x_scale, rounded_x if plain is None else plain, weights, w13, w13_scale, own_gate, own_scales[0],
        own_up, own_scales[1], act, act_scale, own_act, own_act_scale, x, rows, tiles, tokens, most, limit,
        config=config, K=k, D=size, CLAMP=0 < limit < math.inf, **kinds, WORDS=words(size, block_k), BLOCK_I=block_i,
        BLOCK_K=block_k,
    )  # fmt: skip
    results, own_results = x.new_empty((tokens * k, size)), x.new_empty((tokens, size))
    block_k = min(wanted, triton.next_power_of_2(min(inner, shared)))
    launch(
        moe_packed_down_kernel, ((own_tiles + most) * triton.cdiv(size, block_n),),
        act, act_scale, own_act, own_act_scale, w2, w2_scale, own_down, own_scales[2], results, own_results, rows,
        tiles, tokens, most,
        config=config, D=size, **kinds, WORDS=words(inner, block_k), OWN_WORDS=words(shared, block_k), BLOCK_N=block_n,
        BLOCK_K=block_k,
    )  # fmt: skip
    return moe_sum(results, own_results, indices, weights, count, True, routed_dtype, streams, post, comb, fp32)


def _applies(meta: Meta) -> str | None:
    if meta["shared_gate"].shape[0] == 0:
        return "the shared expert has no inner values, allowed: at least 1"
    return _EXPERTS.applies(meta) or sum_applies(meta)


TEMPLATES = (TritonTemplate("moe_packed", "dsv4::moe_packed", moe_packed, _EXPERTS.configs, _EXPERTS.check, _applies),)
