"""Hyper-connections on the way into a sublayer: mix weights and the collapsed, normalised input.

The mix is a product with a small fp32 matrix. bf16 streams need no fp32 product for it: every fp32 number is the sum of
three bf16 numbers, products of bf16 numbers are exact in fp32, so three tensor-core products give what an fp32 product
gives, up to the order of the sum.

Few tokens: programs share the columns of a token ("split"). With ONE, the last of them adds up and finishes, and where
the collapse does not wait for the mix, other programs of the same launch do it, one a token, from streams that are then
in the cache. Without, a second kernel finishes. Many tokens: one kernel, all of a token in one program.

With a y, all of that is done to the streams that `hc_post` makes, which are written too (`hc_post_pre`).
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
from dscompile.templates.triton.device.hc import (
    collapse_rows,
    collapse_token,
    mix_column,
    mix_columns,
    mix_weights,
    normalise_rows,
)
from dscompile.templates.triton.hc_post import streams_fit
from dscompile.templates.triton.launching import counters, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

# As many bf16 numbers as make one of this type; 0: an fp32 product, because the streams are not bf16.
PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@triton.jit
def hc_split_kernel(
    streams, token_stride, stream_stride, y, y_stride, post_in, comb_in, out, fn, fn_stride, pre_in, partial, x, N,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, PIECES: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """partial [splits, N, P]: what SPAN columns of every stream add to the mixes and to the sums of squares."""
    split = tl.program_id(1)
    mix_columns(
        streams, token_stride, stream_stride, y, y_stride, post_in, comb_in, out, fn, fn_stride, pre_in,
        partial + split.to(tl.int64) * N * P, x, N, (tl.program_id(0) * BLOCK_T).to(tl.int64), split * SPAN,
        STREAMS, D, MIXES, P, PIECES, SPAN, BLOCK_T, BLOCK_D, FP32,
    )  # fmt: skip


@triton.jit
def hc_finish_kernel(
    streams, token_stride, stream_stride, partial, scale, base, norm_weight, x, pre, post, comb, N,
    mix_eps, hc_eps, iters, norm_eps,
    COLLAPSED: tl.constexpr, STREAMS: tl.constexpr, D: tl.constexpr, MATRIX: tl.constexpr, P: tl.constexpr,
    MIXES: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """A token a program: adds up `partial`, then weights, collapse and norm. COLLAPSED: x holds the collapsed rows."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    sums = mix_weights(
        partial, scale, base, pre, post, comb, token, N, mix_eps, hc_eps, iters,
        STREAMS, D, MIXES, P, MATRIX, SPLITS, SPLIT_BLOCK, 1,
    )  # fmt: skip
    squares = mix_column(sums, MIXES + 1, P)
    if not COLLAPSED:
        squares = collapse_rows(streams, token_stride, stream_stride, sums, x, token, N, STREAMS, D, P, 1, BLOCK_X)
        tl.debug_barrier()
    if norm_weight is not None:
        normalise_rows(x, squares, norm_weight, norm_eps, token, N, D, 1, BLOCK_X)


@triton.jit
def hc_one_kernel(
    streams, token_stride, stream_stride, y, y_stride, post_in, comb_in, out, fn, fn_stride, pre_in, partial, counter,
    scale, base, norm_weight, x, pre, post, comb, N, mix_eps, hc_eps, iters, norm_eps,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr,
    PIECES: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    FP32: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, T: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """As `hc_split_kernel`; the last program of BLOCK_T tokens, of which at most T exist, finishes. If there is a
    pre_in, another N programs collapse, BLOCK_X >= D columns at once; else that is left to the last one, too."""
    blocks = tl.cdiv(N, BLOCK_T)
    if tl.program_id(0) < blocks * SPLITS:
        # Programs with the same part of fn are neighbours.
        block, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks
        mix_columns(
            streams, token_stride, stream_stride, y, y_stride, post_in, comb_in, out, fn, fn_stride, None,
            partial + split.to(tl.int64) * N * P, x, N, (block * BLOCK_T).to(tl.int64), split * SPAN,
            STREAMS, D, MIXES, P, PIECES, SPAN, BLOCK_T, BLOCK_D, FP32,
        )  # fmt: skip
        if is_last(counter + block, SPLITS):
            token = (block * BLOCK_T + tl.arange(0, T)).to(tl.int64)
            sums = mix_weights(
                partial, scale, base, pre, post, comb, token, N, mix_eps, hc_eps, iters,
                STREAMS, D, MIXES, P, MATRIX, SPLITS, SPLIT_BLOCK, T,
            )  # fmt: skip
            if pre_in is None:
                if y is None:
                    squares = collapse_rows(
                        streams, token_stride, stream_stride, sums, x, token, N, STREAMS, D, P, T, BLOCK_X
                    )
                else:
                    squares = collapse_rows(out, STREAMS * D, D, sums, x, token, N, STREAMS, D, P, T, BLOCK_X)
                if norm_weight is not None:
                    tl.debug_barrier()
                    normalise_rows(x, squares, norm_weight, norm_eps, token, N, D, T, BLOCK_X)
    else:
        if pre_in is not None:
            collapse_token(
                streams, token_stride, stream_stride, y, y_stride, post_in, comb_in, pre_in, norm_weight, x, norm_eps,
                (tl.program_id(0) - blocks * SPLITS).to(tl.int64), STREAMS, D, BLOCK_X, FP32,
            )  # fmt: skip


@triton.jit
def hc_whole_kernel(
    streams, token_stride, stream_stride, fn, fn_stride, pre_in, partial, scale, base, norm_weight, x, pre, post, comb,
    N, mix_eps, hc_eps, iters, norm_eps,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr,
    PIECES: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All of it for BLOCK_T tokens. What a program wrote itself it reads again from the cache."""
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    mix_columns(
        streams, token_stride, stream_stride, None, 0, None, None, None, fn, fn_stride, pre_in, partial, x, N,
        (tl.program_id(0) * BLOCK_T).to(tl.int64), 0, STREAMS, D, MIXES, P, PIECES, SPAN, BLOCK_T, BLOCK_D, True,
    )  # fmt: skip
    tl.debug_barrier()
    sums = mix_weights(
        partial, scale, base, pre, post, comb, token, N, mix_eps, hc_eps, iters,
        STREAMS, D, MIXES, P, MATRIX, 1, 1, BLOCK_T,
    )  # fmt: skip
    squares = mix_column(sums, MIXES + 1, P)
    if pre_in is None:
        squares = collapse_rows(
            streams, token_stride, stream_stride, sums, x, token, N, STREAMS, D, P, BLOCK_T, BLOCK_D
        )
        tl.debug_barrier()
    if norm_weight is not None:
        normalise_rows(x, squares, norm_weight, norm_eps, token, N, D, BLOCK_T, BLOCK_D)


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def run(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor | None, norm_weight: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None, Tensor | None], eps: tuple[float, float, float], iters: int,
    config: Config, incoming: tuple[Tensor, Tensor, Tensor, Tensor, bool] | None = None,
) -> Tensor:  # fmt: skip
    """-> x; gates are filled, and the fourth of `incoming` (y, post, comb, streams to be, fp32), which needs a SPAN."""
    n, size = streams.shape[-2:]
    mixes, lead = fn.shape[0], math.prod(streams.shape[:-2])
    tokens, fn = dense(streams.reshape(lead, n, size)), dense(fn)
    scale, base = scale.contiguous(), base.contiguous()
    pre_in = None if pre_in is None else pre_in.contiguous()
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    x = streams.new_empty((*streams.shape[:-2], size))
    given: tuple[Tensor | int | None, ...] = (tokens, tokens.stride(0), tokens.stride(1), None, 0, None, None, None)
    rows, fp32 = tokens, True
    if incoming is not None:
        y, post, comb, rows, fp32 = incoming
        y = dense(y.reshape(lead, size))
        rows = rows.view(lead, n, size)
        given = (*given[:3], y, y.stride(0), post.contiguous(), comb.contiguous(), rows)
    pieces = PIECES[fn.dtype] if streams.dtype == torch.bfloat16 else 0
    # A product in fp32 keeps its operands in registers.
    block_t, most = (config["BLOCK_T"], config["BLOCK_D"]) if pieces else (16, 16)
    span = config["SPAN"] or size
    splits = triton.cdiv(size, span)
    matrix, padded = triton.next_power_of_2(n), max(16, triton.next_power_of_2(mixes + 2))
    partial = streams.new_empty((splits, lead, padded), dtype=torch.float32)
    mix_eps, hc_eps, norm_eps = eps
    shape = {"STREAMS": n, "D": size, "MIXES": mixes, "P": padded}
    tile = {
        "PIECES": pieces, "SPAN": span, "BLOCK_T": block_t,
        "BLOCK_D": max(16, min(most, triton.next_power_of_2(size))),
    }  # fmt: skip
    finishing = (scale, base, norm_weight, x, *gates, lead, mix_eps, hc_eps, iters, norm_eps)
    if not config["SPAN"]:
        launch(
            hc_whole_kernel, (triton.cdiv(lead, block_t),), *given[:3], fn, fn.stride(0), pre_in, partial,
            *finishing, config=config, **shape, **tile, MATRIX=matrix,
        )  # fmt: skip
        return x
    blocks, row = triton.cdiv(lead, block_t), triton.next_power_of_2(size)
    if config["ONE"]:
        most_tokens = 8 if lead <= 8 else block_t
        each = 32 * config.num_warps * VALUES_PER_THREAD
        launch(
            hc_one_kernel, (blocks * splits + (0 if pre_in is None else lead),),
            *given, fn, fn.stride(0), pre_in, partial, counters(tokens, blocks), *finishing,
            config=config, **shape, **tile, FP32=fp32, MATRIX=matrix, SPLITS=splits, T=most_tokens,
            SPLIT_BLOCK=min(triton.next_power_of_2(splits), max(1, each // (most_tokens * padded))),
            BLOCK_X=row if pre_in is not None else min(row, each // most_tokens),
        )  # fmt: skip
        return x
    launch(
        hc_split_kernel, (blocks, splits), *given, fn, fn.stride(0), pre_in, partial, x, lead,
        config=config, **shape, **tile, FP32=fp32,
    )  # fmt: skip
    launch(
        hc_finish_kernel, (lead,), rows, rows.stride(0), rows.stride(1), partial, *finishing,
        config=_FINISH, **shape, COLLAPSED=pre_in is not None, MATRIX=matrix,
        SPLITS=splits, SPLIT_BLOCK=triton.next_power_of_2(splits), BLOCK_X=min(8192, row),
    )  # fmt: skip
    return x


_FINISH = config(8, 1)
# Of what the last program reads, at once.
VALUES_PER_THREAD = 32
# Of a row that one program holds.
LARGEST_ROW = 8192


def hc_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor | None, norm_weight: Tensor | None,
    mix_eps: float, hc_eps: float, iters: int, norm_eps: float, norm_first: bool, *, config: Config, target: Target,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`dsv4::hc_pre`: streams [..., n, D] -> x [..., D], pre and post fp32 [..., n], comb fp32 [..., n, n].

    The root mean square divides the mixes behind the product also if `norm_first`; that is the same but for roundings
    in fp32.
    """
    shape, n = streams.shape[:-1], streams.shape[-2]
    pre = streams.new_empty(shape, dtype=torch.float32)
    post, comb = torch.empty_like(pre), pre.new_empty((*shape, n))
    eps = (mix_eps, hc_eps, norm_eps)
    x = run(streams, fn, scale, base, pre_in, norm_weight, (pre, post, comb), eps, iters, config)
    return x, pre, post, comb


def hc_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float, *, config: Config,
    target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::hc_head`: streams [..., n, D] -> [..., D]."""
    return run(streams, fn, scale, base, None, None, (None, None, None), (mix_eps, hc_eps, 0.0), 1, config)


def configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    tokens = sizes["N"]
    one = [
        config(w, 2, BLOCK_T=16, BLOCK_D=d, SPAN=n, ONE=1) for w, d, n in ((4, 64, 64), (8, 128, 128), (8, 128, 256))
    ]
    split = [config(4, 2, BLOCK_T=16, BLOCK_D=64, SPAN=span, ONE=0) for span in (64, 256, 512)]
    whole = [config(8, 3, BLOCK_T=t, BLOCK_D=64, SPAN=0, ONE=0) for t in (64, 32)]
    if tokens <= 16:
        yield from (one[1], one[0], *split, *whole)
    elif tokens <= 64:
        yield from (one[2], one[1], split[1], split[0], split[2], *whole)
    elif tokens <= 1024:
        yield from (split[2], split[1], *whole)
    else:
        yield from whole


def _head_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """One program collapses for all tokens of a block if it has to wait for the mix: quick only for a few."""
    space = list(configs(sizes, target))
    yield from (c for c in space if not c["ONE"] or sizes["N"] <= 16)


def check(config: Config, sizes: Sizes, target: Target) -> str | None:
    if config["ONE"] and sizes["D"] > LARGEST_ROW:
        return f"rows of {sizes['D']} values in one program, allowed: {LARGEST_ROW}"
    return None


def _applies(meta: Meta) -> str | None:
    return streams_fit(meta["streams"])


TEMPLATES = (
    TritonTemplate("hc_pre", "dsv4::hc_pre", hc_pre, configs, check, _applies),
    TritonTemplate("hc_head", "dsv4::hc_head", hc_head, _head_configs, check, _applies),
)
