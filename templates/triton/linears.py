"""Products of the same rows with several weights, side by side, in one launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.arrival import is_last
from dscompile.templates.triton.device.gemm import load_tile
from dscompile.templates.triton.launching import counters, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config


@triton.jit
def linears_kernel(
    x, w0, w1, w2, w3, out, part, counter, x_row, row0, row1, row2, row3, M, N0, N1, N2, N3,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[m, first + n] = sum over k of x[m, k] * w[n, k], w by program axis 0; k is dense, of SIZE values.

    Weights are the left operand, see `device.gemm`. Program axis 1 takes a share of k; the last program of a tile adds
    up `part` [tiles, SPLITS, BLOCK_T, BLOCK_N], in the order of the shares, so that the result does not depend on who
    came last.
    """
    blocks_t = tl.cdiv(M, BLOCK_T)
    tile, split = tl.program_id(0), tl.program_id(1)
    block = tile // blocks_t  # tokens first: their programs need the same weights at the same time
    w, w_row, rows, first = w0, row0, N0, 0
    end = tl.cdiv(N0, BLOCK_N)
    if block >= end:
        w, w_row, rows, first = w1, row1, N1, N0
        block -= end
        end = tl.cdiv(N1, BLOCK_N)
        if w2 is not None:
            if block >= end:
                w, w_row, rows, first = w2, row2, N2, N0 + N1
                block -= end
                end = tl.cdiv(N2, BLOCK_N)
                if w3 is not None:
                    if block >= end:
                        w, w_row, rows, first = w3, row3, N3, N0 + N1 + N2
                        block -= end
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tile % blocks_t * BLOCK_T + tl.arange(0, BLOCK_T)
    real, alive = row < rows, token < M
    w_rows = w + row.to(tl.int64) * w_row
    x_rows = x + token.to(tl.int64) * x_row
    blocks_k: tl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K
    share: tl.constexpr = (blocks_k + SPLITS - 1) // SPLITS
    begin = split * share * BLOCK_K
    stop = tl.minimum(begin + share * BLOCK_K, SIZE)
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(begin, stop, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        left = load_tile(w_rows, column, real, SIZE, BLOCK_K)
        right = load_tile(x_rows, column, alive, SIZE, BLOCK_K)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    at = token.to(tl.int64)[None, :] * (N0 + N1 + N2 + N3) + (first + row)[:, None]
    mask = real[:, None] & alive[None, :]
    if SPLITS == 1:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
    else:
        column = tl.arange(0, BLOCK_T)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        mine = part + tile.to(tl.int64) * (SPLITS * BLOCK_T * BLOCK_N) + column
        tl.store(mine + split * (BLOCK_T * BLOCK_N), total, mask=mask)
        if is_last(counter + tile, SPLITS):
            total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(mine + other * (BLOCK_T * BLOCK_N), mask=mask, other=0.0)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def linears(
    x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor | None, *, config: Config, target: Target
) -> Tensor:
    """`dsv4::linears`: x [M, K], w_i [N_i, K] -> [M, N_0 + N_1 + ..]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    weights = [None if w is None else w if w.stride(1) == 1 else w.contiguous() for w in (w0, w1, w2, w3)]
    rows = [0 if w is None else w.shape[0] for w in weights]
    tokens, size = x.shape
    out = x.new_empty((tokens, sum(rows)))
    block_t, block_n, block_k = (config[name] for name in ("BLOCK_T", "BLOCK_N", "BLOCK_K"))
    block_k = max(16, min(block_k, triton.next_power_of_2(size)))
    splits = max(1, min(config["SPLITS"], -(-size // block_k)))
    tiles = -(-tokens // block_t) * sum(-(-n // block_n) for n in rows)
    part = counter = None
    if splits > 1:
        part = x.new_empty((tiles, splits, block_t, block_n), dtype=torch.float32)
        counter = counters(x, tiles)
    launch(
        linears_kernel, (tiles, splits), x, *weights, out, part, counter, x.stride(0),
        *(0 if w is None else w.stride(0) for w in weights), tokens, *rows,
        config=config, SIZE=size, SPLITS=splits, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return out


def _splits(sizes: Sizes, target: Target, block_t: int, block_n: int, block_k: int) -> int:
    """So many shares of K that about all multiprocessors have one, each the same number of blocks."""
    tiles = max(1, -(-sizes["M"] // block_t) * -(-sizes["N"] // block_n))
    blocks = max(1, -(-sizes["K"] // block_k))
    share = -(-blocks // max(1, min(blocks, 16, int(target.sm_count.value or 1) // tiles)))
    return -(-blocks // share)


def _tiles(sizes: Sizes) -> Iterable[tuple[int, int, int, int, int]]:
    """Warps, stages, tokens, rows of weights and K of a tile, in the order of trust."""
    tokens = sizes["M"]
    if sizes["x_bytes"] == 4:
        yield from ((8, 2, 16, 64, 32), (8, 2, 64, 64, 32))
    elif tokens <= 32:
        few = 16 if tokens <= 16 else 32
        yield from ((4, 4, few, 64, 256), (4, 5, few, 64, 128), (4, 4, few, 128, 128), (4, 5, few, 32, 128))
    elif tokens <= 256:
        most = 64 if tokens <= 64 else 128
        yield from ((4, 4, most, 64, 128), (4, 4, 64, 64, 128), (8, 4, most, 128, 64), (8, 3, 256, 64, 64))
    else:
        yield from ((8, 4, 128, 128, 64), (8, 3, 256, 128, 64), (4, 4, 128, 64, 64))


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    seen = set()
    for warps, stages, block_t, block_n, block_k in _tiles(sizes):
        for splits in {_splits(sizes, target, block_t, block_n, block_k): None, 1: None}:
            choice = config(warps, stages, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k, SPLITS=splits)
            if choice not in seen:
                seen.add(choice)
                yield choice


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    need = config.num_stages * config["BLOCK_K"] * (config["BLOCK_T"] + config["BLOCK_N"]) * sizes["x_bytes"]
    return None if need <= target.smem_bytes_per_block else f"{need} bytes of shared memory"


def _applies(meta: Meta) -> str | None:
    shapes = [tuple(meta[name].shape) for name in ("w0", "w1", "w2", "w3") if meta[name] is not None]
    return None if all(min(shape) > 0 for shape in shapes) else f"weights {shapes}, allowed: none empty"


TEMPLATES = (TritonTemplate("linears", "dsv4::linears", linears, _configs, _check, _applies),)
