"""The two products of `moe` with tiles that are copied by descriptor instead of by addresses.

A descriptor is made by each program for its expert, in memory that the launch allocates. Rows behind those of the
expert come as zeros; where a tile has fewer pairs, the rest of it is token 0, in columns that nobody stores. On
Blackwell tokens are gathered by descriptor too, and copies, tensor cores and the rest run in warps of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.gemm import load_tile
from dscompile.templates.triton.device.moe import down_tile, store_act, up_tile
from dscompile.templates.triton.experts import tokens_of_an_expert
from dscompile.templates.triton.launching import interpreting
from dscompile.templates.triton.record import Config, Sizes, config

#: Fewer tokens of an expert would leave most of the tiles that these kernels are for empty.
LEAST = 64


@triton.jit
def moe_up_tma_kernel(
    x, x_stride, weights, w13, w_expert, w_row, own_gate, gate_row, own_up, up_row, act, own_act, rows, tiles, N, TILES,
    limit,
    K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, CLAMP: tl.constexpr,
    BEFORE: tl.constexpr, GATHER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """See `moe.moe_up_kernel`."""
    expert, first, width, w1, w1_row, w3, w3_row, token, alive, weight, to = up_tile(
        weights, w13, w_expert, w_row, own_gate, gate_row, own_up, up_row, act, own_act, rows, tiles, N, TILES,
        K, INNER, SHARED, BEFORE, BLOCK_T, BLOCK_I,
    )  # fmt: skip
    if expert < 0:
        return
    w1_tiles = tl.make_tensor_descriptor(w1, [width, D], [w1_row, 1], [BLOCK_I, BLOCK_K])
    w3_tiles = tl.make_tensor_descriptor(w3, [width, D], [w3_row, 1], [BLOCK_I, BLOCK_K])
    gate = tl.zeros((BLOCK_I, BLOCK_T), tl.float32)
    up = tl.zeros((BLOCK_I, BLOCK_T), tl.float32)
    if GATHER:
        tokens = tl.make_tensor_descriptor(x, [N, D], [x_stride, 1], [1, BLOCK_K])
        which = token.to(tl.int32)
        for start in tl.range(0, D, BLOCK_K, warp_specialize=True):
            right = tokens.gather(which, start).T
            gate = tl.dot(w1_tiles.load([first, start]), right, gate)
            up = tl.dot(w3_tiles.load([first, start]), right, up)
    else:
        column = tl.arange(0, BLOCK_K)
        for start in range(0, D, BLOCK_K):
            right = tl.trans(load_tile(x + token * x_stride, start + column, alive, D, BLOCK_K))
            gate = tl.dot(w1_tiles.load([first, start]), right, gate)
            up = tl.dot(w3_tiles.load([first, start]), right, up)
    inner = first + tl.arange(0, BLOCK_I)
    mask = alive[None, :] & (inner < width)[:, None]
    store_act(gate, up, limit, weight, to, inner, mask, act.dtype.element_ty, CLAMP, BEFORE)


@triton.jit
def moe_down_tma_kernel(
    act, own_act, w2, w_expert, w_row, own_down, down_row, results, own_results, rows, tiles, N, TILES,
    D: tl.constexpr, INNER: tl.constexpr, SPECIAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """See `moe.moe_down_kernel`; the shared expert has as many inner values as the others."""
    expert, first, w, step, source, slot, alive, to = down_tile(
        act, own_act, w2, w_expert, w_row, own_down, down_row, results, own_results, rows, tiles, N, TILES, D, BLOCK_T,
        BLOCK_N,
    )  # fmt: skip
    if expert < 0:
        return
    begin = tl.min(slot, 0).to(tl.int32)
    end = begin + tl.sum(alive.to(tl.int32), 0)
    acts = tl.make_tensor_descriptor(source, [end, INNER], [INNER, 1], [BLOCK_T, BLOCK_K])
    w_tiles = tl.make_tensor_descriptor(w, [D, INNER], [step, 1], [BLOCK_N, BLOCK_K])
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(0, INNER, BLOCK_K, warp_specialize=SPECIAL):
        total = tl.dot(w_tiles.load([first, start]), acts.load([begin, start]).T, total)
    column = first + tl.arange(0, BLOCK_N)
    tl.store(to[None, :] + column[:, None], total.to(act.dtype.element_ty), mask=alive[None, :] & (column < D)[:, None])


def tma_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """For experts of many tokens; `refusal` says for which others."""
    if target.has("tma"):
        stages = 4 if target.has("tcgen05") else 3
        for block_t, block_i in ((128, 64), (64, 128)):
            yield config(8, stages, BLOCK_T=block_t, BLOCK_I=block_i, BLOCK_N=128, BLOCK_K=64, TMA=1)


def refusal(sizes: Sizes, target: Target) -> str | None:
    """Why copies by descriptor cannot or should not be used."""
    average = tokens_of_an_expert(sizes)
    if average < LEAST:
        return f"{average:g} tokens an expert, copies by descriptor from {LEAST} on"
    if sizes["weight_bytes"] != 2 or sizes["S"] != sizes["I"]:
        shown = f"{sizes['weight_bytes']} bytes a weight, shared expert {sizes['S']} of {sizes['I']} inner values"
        return f"{shown}; allowed with copies by descriptor: 2 and the same"
    if sizes["D"] % 8 or sizes["I"] % 8 or min(sizes["D"], sizes["I"]) < 64:
        return (
            f"rows of {sizes['D']} and {sizes['I']} values; allowed with copies by descriptor: multiples of 8 from 64"
        )
    return None if target.has("tma") else f"{target.name} has no copies by descriptor"


def prepared(*tensors: Tensor) -> bool:
    """Whether descriptors may describe these: rows and the whole begin at multiples of 16 bytes.

    If so, sets what gives kernels the memory for their descriptors.
    """
    for t in tensors:
        steps = (t.data_ptr(), *(t.element_size() * stride for stride in t.stride()[:-1]))
        if any(step % 16 for step in steps):
            return False
    if tensors[0].is_cuda and not interpreting():
        triton.set_allocator(_scratch)
    return True


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
