"""The grouped low-rank output projection: one product per group of heads, then one over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.gemm import load_tile, product
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

TOGETHER = 8


@triton.jit
def grouped_linear_kernel(
    x, x_token, x_group, w, w_group, w_row, out, out_token, out_group, N,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, LEFT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[n, g, r] = sum over i of x[n, g, i] * w[g, r, i], g of program axis 1; i is dense, of SIZE values.

    LEFT: tokens are the left operand: for 16 of them and few rows of w, which smaller tiles spread over more programs.
    """
    blocks_n: tl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N
    # A few blocks of tokens pass over all of w together: what both need again is still in the cache.
    program, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = program // (TOGETHER * blocks_n) * TOGETHER
    height = tl.minimum(tl.cdiv(N, BLOCK_T) - first, TOGETHER)
    inner = program % (TOGETHER * blocks_n)
    token = ((first + inner % height) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row = inner // height * BLOCK_N + tl.arange(0, BLOCK_N)
    alive, real = token < N, row < ROWS
    x_rows = x + group * x_group + token * x_token
    w_rows = w + group * w_group + row.to(tl.int64) * w_row
    to = out + group * out_group
    if LEFT:
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for start in range(0, SIZE, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            left = load_tile(x_rows, column, alive, SIZE, BLOCK_K)
            right = load_tile(w_rows, column, real, SIZE, BLOCK_K)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        at = to + token[:, None] * out_token + row[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=alive[:, None] & real[None, :])
    else:
        total = product(w_rows, real, x_rows, alive, SIZE, BLOCK_N, BLOCK_T, BLOCK_K)
        at = to + token[None, :] * out_token + row[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=alive[None, :] & real[:, None])


def grouped_linear(x: Tensor, w: Tensor, out: Tensor, config: Config) -> None:
    """x [N, G, I], w [G, R, I], out [N, G, R]; the last axis of each is dense."""
    tokens, groups, size = x.shape
    block_t, block_n = config["BLOCK_T"], config["BLOCK_N"]
    block_k = max(16, min(config["BLOCK_K"], triton.next_power_of_2(size)))
    launch(
        grouped_linear_kernel, (triton.cdiv(tokens, block_t) * triton.cdiv(w.shape[1], block_n), groups),
        x, x.stride(0), x.stride(1), w, w.stride(0), w.stride(1), out, out.stride(0), out.stride(1), tokens,
        config=config, SIZE=size, ROWS=w.shape[1], TOGETHER=TOGETHER, LEFT=config["LEFT"],
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


def grouped_output(o: Tensor, wo_a: Tensor, wo_b: Tensor, *, config: Config, target: Target) -> Tensor:
    """`dsv4::grouped_output`: o [..., G, Din], wo_a [G, R, Din], wo_b [Dout, G R] -> [..., Dout]."""
    lead = math.prod(o.shape[:-2])
    groups, rank, size = wo_a.shape
    x = o.reshape(lead, groups, size)
    x, wo_a, wo_b = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, wo_a, wo_b))
    low = o.new_empty((lead, groups, rank))
    grouped_linear(x, wo_a, low, config)
    out = o.new_empty((*o.shape[:-2], wo_b.shape[0]))
    grouped_linear(low.view(lead, 1, groups * rank), wo_b.unsqueeze(0), out.view(lead, 1, wo_b.shape[0]), config)
    return out


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    tokens = sizes["N"]
    if sizes["x_bytes"] == 4:
        yield config(8, 2, BLOCK_T=16, BLOCK_N=64, BLOCK_K=32, LEFT=0)
        yield config(8, 2, BLOCK_T=64, BLOCK_N=64, BLOCK_K=32, LEFT=0)
        return
    few = [config(4, 4, BLOCK_T=16, BLOCK_N=32, BLOCK_K=256, LEFT=1),
           config(4, 4, BLOCK_T=16, BLOCK_N=64, BLOCK_K=128, LEFT=0),
           config(4, 4, BLOCK_T=32, BLOCK_N=64, BLOCK_K=128, LEFT=0)]  # fmt: skip
    some = [config(4, 4, BLOCK_T=t, BLOCK_N=64, BLOCK_K=64, LEFT=0) for t in (64, 128)]
    many = [config(8, s, BLOCK_T=t, BLOCK_N=128, BLOCK_K=64, LEFT=0) for t, s in ((256, 3), (128, 4))]
    if tokens <= 16:
        yield from (*few, *some)
    elif tokens <= 64:
        yield from (*reversed(few), *some)
    elif tokens <= 512:
        yield from (*(some if tokens <= 64 else reversed(some)), *many)
    else:
        yield from (*many, *some)


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    need = config.num_stages * config["BLOCK_K"] * (config["BLOCK_T"] + config["BLOCK_N"]) * sizes["weight_bytes"]
    return None if need <= target.smem_bytes_per_block else f"{need} bytes of shared memory"


def _applies(meta: Meta) -> str | None:
    shapes = (tuple(meta["wo_a"].shape), tuple(meta["wo_b"].shape))
    return None if all(min(shape) > 0 for shape in shapes) else f"weights {shapes}, allowed: none empty"


TEMPLATES = (TritonTemplate("grouped_output", "dsv4::grouped_output", grouped_output, _configs, _check, _applies),)
