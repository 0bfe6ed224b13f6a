"""A linear map with a stored FP8 weight, activations rounded to FP8 with a scale per 32.

Few rows: every program rounds the rows that it multiplies, one launch; where the weight has too few rows to occupy the
GPU, the sum is split and the last program of a tile adds up. Many rows: they are rounded once, by a launch in front.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.arrival import is_last
from dscompile.templates.triton.device.formats import divide_by_scales, e4m3_bytes, scales_of
from dscompile.templates.triton.device.gemm import load_tile
from dscompile.templates.triton.device.packed import load_x, packed_dot
from dscompile.templates.triton.device.packed_expert import store_rounded
from dscompile.templates.triton.grouped_output import grouped_linear
from dscompile.templates.triton.launching import counters, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

GROUP = 32
FEW_ROWS = 64


@triton.jit
def round_rows_kernel(x, x_stride, to, scales, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """A row of x a program: E4M3 codes and their scales, or (`scales` None) the rounded values as bf16."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    for first in range(0, SIZE, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=(column < SIZE)[None, :], other=0.0)
        store_rounded(value.to(tl.float32), to, scales, row, first, row >= 0, SIZE, False, 1, BLOCK_D)


@triton.jit
def rounded_tile(x_rows, column, alive, SIZE: tl.constexpr, SCALED: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Rows of plain values -> what `load_x` gives for rounded ones."""
    value = load_tile(x_rows, column, alive, SIZE, K).to(tl.float32)
    factor, stored = scales_of(value, T, K, 32, 448.0, 1e-4, True)
    codes = e4m3_bytes(divide_by_scales(value, factor, T, K, 32, 448.0)).to(tl.float8e4nv, bitcast=True)
    if SCALED:
        return tl.trans(codes), stored
    else:
        grouped = tl.reshape(codes.to(tl.float32), (T, K // 32, 32)) * tl.expand_dims(factor, 2)
        values = tl.trans(tl.reshape(grouped, (T, K)).to(tl.bfloat16))
        return values, values


@triton.jit
def linear_packed_kernel(
    x, x_stride, x_scale, w, w_scale, other_w, other_scale, out, part, counter, M,
    N: tl.constexpr, OTHER: tl.constexpr, SIZE: tl.constexpr, ROUND: tl.constexpr, SCALED: tl.constexpr,
    WORDS: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [M, N + OTHER] = x w^T beside x other_w^T (OTHER 0: none). ROUND: x is plain, else as `round_rows_kernel`
    leaves it. SPAN columns a split."""
    tile, split = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.program_id(2)
    place, begin, rows = tl.program_id(0), 0, N
    if OTHER > 0:
        if place >= tl.cdiv(N, BLOCK_N):
            place, begin, rows = place - tl.cdiv(N, BLOCK_N), N, OTHER
            w, w_scale = other_w, other_scale
    row = place * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    real, alive = row < rows, token < M
    w_rows = w + row.to(tl.int64) * SIZE
    w_scales = w_scale + (row // 32).to(tl.int64) * (SIZE // 32)
    x_rows = x + token * x_stride
    x_scales = x_scale
    if x_scale is not None:
        x_scales = x_scale + token * (SIZE // 32)
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, SIZE), BLOCK_K):
        if ROUND:
            given, other = rounded_tile(x_rows, start + tl.arange(0, BLOCK_K), alive, SIZE, SCALED, BLOCK_T, BLOCK_K)
        else:
            given, other = load_x(x_rows, x_scales, alive, start, SIZE, False, SCALED, WORDS, BLOCK_T, BLOCK_K)
        total = packed_dot(
            total, w_rows, w_scales, real, given, other, start, SIZE, False, SCALED, WORDS, False, BLOCK_N, BLOCK_K
        )
    inside = alive[None, :] & real[:, None]
    at = token[None, :] * (N + OTHER) + begin + row[:, None]
    if SPLITS == 1:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(part + split.to(tl.int64) * M * (N + OTHER) + at, total, mask=inside)
        if is_last(counter + tile, SPLITS):
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for other_split in range(SPLITS):
                there = part + tl.cast(other_split, tl.int64) * M * (N + OTHER) + at
                total += tl.load(there, mask=inside, other=0.0)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


Stored = tuple[Tensor, Tensor]


def multiply(x: Tensor, stored: Stored, other: Stored | None, out: Tensor, config: Config, target: Target) -> None:
    """x [M, K], a weight E4M3 or its bytes [N, K] with its scales [N / 32, K / 32] -> out [M, N], dense; of two such
    weights the products side by side."""
    rows, size = x.shape
    scaled = target.has("block_scaled_mma")
    if 0 in out.shape:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    (weight, scale), (second, second_scale) = map(_dense, (stored, other or stored))
    widths = weight.shape[0], 0 if other is None else second.shape[0]
    block_t, block_n = config["BLOCK_T"], config["BLOCK_N"]
    block_k = min(config["BLOCK_K"], triton.next_power_of_2(size))
    blocks = triton.cdiv(size, block_k)
    share = triton.cdiv(blocks, min(config["SPLITS"], blocks))
    splits = triton.cdiv(blocks, share)
    x_scale = None
    if not config["ROUND"]:
        to = x.new_empty((rows, size), dtype=torch.float8_e4m3fn if scaled else torch.bfloat16)
        x_scale = x.new_empty((rows, size // GROUP), dtype=torch.uint8) if scaled else None
        launch(
            round_rows_kernel, (rows,), x, x.stride(0), to, x_scale, config=Config(4, 1), SIZE=size,
            BLOCK_D=min(2048, triton.next_power_of_2(size)),
        )  # fmt: skip
        x = to
    grid = (sum(triton.cdiv(width, block_n) for width in widths), triton.cdiv(rows, block_t), splits)
    part = counter = None
    if splits > 1:
        part = x.new_empty((splits, *out.shape), dtype=torch.float32)
        counter = counters(x, grid[0] * grid[1])
    launch(
        linear_packed_kernel, grid, x, x.stride(0), x_scale, weight, scale, second, second_scale, out, part, counter,
        rows, config=config, N=widths[0], OTHER=widths[1], SIZE=size, ROUND=config["ROUND"], SCALED=scaled,
        WORDS=size % (4 * GROUP) == 0 and block_k % (4 * GROUP) == 0, SPLITS=splits, SPAN=share * block_k,
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


def _dense(stored: Stored) -> Stored:
    weight, scale = stored
    return weight.contiguous().view(torch.float8_e4m3fn), scale.contiguous()


def linear_packed(x: Tensor, weight: Tensor, weight_scale: Tensor, *, config: Config, target: Target) -> Tensor:
    """`dsv4::linear_packed`: x [..., K] -> [..., N] in x.dtype."""
    out = x.new_empty((math.prod(x.shape[:-1]), weight.shape[0]))
    multiply(x.reshape(out.shape[0], x.shape[-1]), (weight, weight_scale), None, out, config, target)
    return out.view(*x.shape[:-1], weight.shape[0])


def linears_packed(
    x: Tensor, w0: Tensor, w0_scale: Tensor, w1: Tensor, w1_scale: Tensor, *, config: Config, target: Target
) -> Tensor:
    """`dsv4::linears_packed`: x [M, K] -> [M, N0 + N1] in x.dtype."""
    out = x.new_empty((x.shape[0], w0.shape[0] + w1.shape[0]))
    multiply(x, (w0, w0_scale), (w1, w1_scale), out, config, target)
    return out


def grouped_output_packed(
    o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor, *, config: Config, target: Target
) -> Tensor:
    """`dsv4::grouped_output_packed`: o [..., G, Din] -> [..., Dout] in o.dtype."""
    lead = math.prod(o.shape[:-2])
    groups, rank, size = wo_a.shape
    x = o.reshape(lead, groups, size)
    x, wo_a = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, wo_a))
    low = o.new_empty((lead, groups, rank))
    first = Config(4, 4, (("BLOCK_T", config["BLOCK_T"]), ("BLOCK_N", 64), ("BLOCK_K", 64), ("LEFT", 0)))
    grouped_linear(x, wo_a, low, first)
    return linear_packed(low.view(*o.shape[:-2], groups * rank), wo_b, wo_b_scale, config=config, target=target)


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    rows, columns, size = sizes["M"], sizes["N"], sizes["K"]
    scaled = target.has("block_scaled_mma")  # takes 128 rows of weights, no fewer
    if rows > FEW_ROWS:
        for t in (128, 64) if rows > 256 else (64, 32):
            yield config(8, 3, BLOCK_T=t, BLOCK_N=128, BLOCK_K=128, SPLITS=1, ROUND=0)
        yield config(4, 3, BLOCK_T=64, BLOCK_N=64 if not scaled else 128, BLOCK_K=128, SPLITS=1, ROUND=0)
        return
    processors = int(target.sm_count.value or 1)
    for block_t in (16,) if rows <= 16 else (32, 16):
        for block_n in (128,) if scaled else (64, 128):
            tiles = max(1, -(-rows // block_t) * -(-columns // block_n))
            for splits in dict.fromkeys((max(1, min(8, size // 128, processors // tiles)), 1)):
                warps = 4 if block_t == 16 else 8
                yield config(warps, 4, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=128, SPLITS=splits, ROUND=1)
    yield config(4, 3, BLOCK_T=16, BLOCK_N=128, BLOCK_K=64, SPLITS=1, ROUND=1)


def _output_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    product = {"M": sizes["N"], "N": sizes["Dout"], "K": sizes["G"] * sizes["R"]}
    return (c for c in _configs(product, target) if c["BLOCK_T"] >= 16)


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    each = 1 if target.has("block_scaled_mma") else 2
    need = config.num_stages * config["BLOCK_K"] * (config["BLOCK_N"] + config["BLOCK_T"] * 2 * each)
    return None if need <= target.smem_bytes_per_block else f"{need} bytes of shared memory"


def _applies(meta: Meta) -> str | None:
    weights = [meta[name] for name in ("weight", "wo_b", "w0", "w1") if name in meta]
    empty = [tuple(weight.shape) for weight in weights if weight.numel() == 0]
    return f"a weight {empty[0]}, allowed: not empty" if empty else None


TEMPLATES = (
    TritonTemplate("linear_packed", "dsv4::linear_packed", linear_packed, _configs, _check, _applies),
    TritonTemplate("linears_packed", "dsv4::linears_packed", linears_packed, _configs, _check, _applies),
    TritonTemplate(
        "grouped_output_packed", "dsv4::grouped_output_packed", grouped_output_packed, _output_configs, _check, _applies
    ),
)
