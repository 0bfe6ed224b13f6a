"""RMS normalisation and the product that follows it, in one launch for few rows."""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.gemm import load_tile
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config
from dscompile.templates.triton.rms_norm import MODES

LARGEST_ROW = 8192
MOST_ROWS = 256


@triton.jit
def normalised(given, scale, factor, HAS_FACTOR: tl.constexpr, MODE: tl.constexpr):
    """given [T, K] times scale fp32 [T] and, if there is one, factor [K]: rounded as by `rms_norm`, in its dtype."""
    if MODE == 1:
        result = given * scale.to(given.dtype)[:, None]
    elif MODE == 2:
        result = (given.to(tl.float32) * scale[:, None]).to(given.dtype)
    else:
        result = given.to(tl.float32) * scale[:, None]
    if HAS_FACTOR:
        if MODE == 0:
            result = result * factor.to(tl.float32)[None, :]
        else:
            result = result * factor.to(given.dtype)[None, :]
    return result.to(given.dtype)


@triton.jit
def norm_linear_kernel(
    x, norm_weight, w, out, normed, x_row, w_row, M, N, eps,
    SIZE: tl.constexpr, MODE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """normed = norm of x, out[m, n] = sum over k of normed[m, k] * w[n, k]; k is dense, of SIZE values.

    x is small: every program reads its rows twice, once for their squares and once, from the cache, for the product.
    The weight is the left operand, see `device.gemm`. The programs of the first rows of w store what they normalise.
    """
    blocks_t = tl.cdiv(M, BLOCK_T)
    tile = tl.program_id(0)
    block = tile // blocks_t  # tokens first: their programs need the same weights at the same time
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tile % blocks_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    real, alive = row < N, token < M
    w_rows = w + row.to(tl.int64) * w_row
    x_rows = x + token * x_row
    # Element by element, so that nothing but the loads themselves is waited for.
    squares = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    for start in tl.range(0, SIZE, BLOCK_S, loop_unroll_factor=4):
        wide = load_tile(x_rows, start + tl.arange(0, BLOCK_S), alive, SIZE, BLOCK_S).to(tl.float32)
        squares += wide * wide
    scale = tl.rsqrt(tl.sum(squares, 1) / SIZE + eps)
    keeps = token < tl.where(block == 0, M, 0)
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        left = load_tile(w_rows, column, real, SIZE, BLOCK_K)
        given = load_tile(x_rows, column, alive, SIZE, BLOCK_K)
        if norm_weight is None:
            right = normalised(given, scale, scale, False, MODE)
        else:
            factor = tl.load(norm_weight + column, mask=column < SIZE, other=0.0)
            right = normalised(given, scale, factor, True, MODE)
        # Where there is no column, 0 times an infinite scale must not reach the sum.
        right = right if SIZE % BLOCK_K == 0 else tl.where((column < SIZE)[None, :], right, 0.0)
        tl.store(normed + token[:, None] * SIZE + column[None, :], right,
                 mask=keeps[:, None] & (column < SIZE)[None, :])  # fmt: skip
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    tl.store(out + token[None, :] * N + row[:, None], total.to(out.dtype.element_ty),
             mask=real[:, None] & alive[None, :])  # fmt: skip


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, rounding: str, weight: Tensor, *, config: Config, target: Target
) -> tuple[Tensor, Tensor]:
    """`dsv4::norm_linear`: x [M, K], weight [N, K] -> [M, N] and the normalised rows [M, K]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    (tokens, size), rows = x.shape, weight.shape[0]
    out, normed = x.new_empty((tokens, rows)), x.new_empty((tokens, size))
    block_t, block_n = config["BLOCK_T"], config["BLOCK_N"]
    block_k = max(16, min(config["BLOCK_K"], triton.next_power_of_2(size)))
    block_s = max(16, min(1024 * config.num_warps // block_t, triton.next_power_of_2(size)))  # 32 values a thread
    launch(
        norm_linear_kernel, (-(-tokens // block_t) * -(-rows // block_n),),
        x, norm_weight, weight, out, normed, x.stride(0), weight.stride(0), tokens, rows, eps,
        config=config, SIZE=size, MODE=MODES[rounding], BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
        BLOCK_S=block_s,
    )  # fmt: skip
    return out, normed


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """What a program normalises serves BLOCK_N rows of the weight: with many tokens these should be many."""
    tokens = sizes["M"]
    if sizes["x_bytes"] == 4:
        tiles = [(8, 2, 16, 64, 32), (8, 2, 32, 64, 32)]
    elif tokens <= 16:
        tiles = [(4, 4, 16, 64, 128), (4, 3, 16, 64, 256), (4, 4, 16, 128, 128), (8, 3, 16, 128, 128)]
    elif tokens <= 64:
        few = 32 if tokens <= 32 else 64
        tiles = [(4, 4, few, 128, 64), (4, 3, few, 64, 128), (8, 3, few, 128, 128), (4, 4, 16, 128, 128)]
    else:
        tiles = [(8, 3, 128, 256, 64), (8, 4, 128, 128, 64), (8, 4, 64, 256, 64), (4, 4, 64, 128, 64)]
    for warps, stages, block_t, block_n, block_k in tiles:
        yield config(warps, stages, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k)


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    need = config.num_stages * config["BLOCK_K"] * (config["BLOCK_T"] + config["BLOCK_N"]) * sizes["x_bytes"]
    if need > target.smem_bytes_per_block:
        return f"{need} bytes of shared memory"
    # Sums in registers, unless there is tensor memory
    values = config["BLOCK_T"] * config["BLOCK_N"] // (32 * config.num_warps)
    most = 128 if target.has("tcgen05") else 64
    return f"tiles of {values} sums a thread, allowed: {most}" if values > most else None


def _applies(meta: Meta) -> str | None:
    (tokens, size), rows = meta["x"].shape, meta["weight"].shape[0]
    if tokens > MOST_ROWS:
        return f"{tokens} rows, allowed: up to {MOST_ROWS}; more take the norm and the library's product"
    if not 0 < size <= LARGEST_ROW:
        return f"rows of {size} values, allowed: 1 to {LARGEST_ROW}"
    return None if rows > 0 else "a weight without rows, allowed: 1 or more"


TEMPLATES = (TritonTemplate("norm_linear", "dsv4::norm_linear", norm_linear, _configs, _check, _applies),)
