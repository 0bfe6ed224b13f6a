"""Hyper-connections on the way into a sublayer: mix weights and the collapsed, normalised input.

The mix is a product with a small fp32 matrix. bf16 streams need no fp32 product for it: every fp32 number is the sum of
three bf16 numbers, products of bf16 numbers are exact in fp32, so three tensor-core products give what an fp32 product
gives, up to the order of the sum.

Few tokens: programs share the columns of a token ("split"), a second kernel adds up and finishes. Many: one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.hc import collapse_rows, mix_columns, mix_weights, normalise_rows
from dscompile.templates.triton.hc_post import streams_fit
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

# As many bf16 numbers as make one of this type; 0: an fp32 product, because the streams are not bf16.
PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@triton.jit
def hc_split_kernel(
    streams, token_stride, stream_stride, fn, fn_stride, pre_in, partial, x, N,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partial [splits, N, WIDTH]: what SPAN columns of every stream add to the mixes and to the sums of squares."""
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    split = tl.program_id(1)
    mix_columns(
        streams, token_stride, stream_stride, fn, fn_stride, pre_in, partial + split.to(tl.int64) * N * WIDTH, x, N,
        token, split * SPAN, STREAMS, D, MIXES, P, WIDTH, PIECES, SPAN, BLOCK_T, BLOCK_D,
    )  # fmt: skip


@triton.jit
def hc_finish_kernel(
    streams, token_stride, stream_stride, partial, scale, base, norm_weight, x, pre, post, comb, N,
    mix_eps, hc_eps, iters, norm_eps,
    COLLAPSED: tl.constexpr, STREAMS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    MIXES: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A token a program: adds up `partial`, then weights, collapse and norm. COLLAPSED: x holds the collapsed rows."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    gates, squares = mix_weights(
        partial, scale, base, pre, post, comb, token, N, mix_eps, hc_eps, iters,
        STREAMS, D, P, WIDTH, MIXES, SPLITS, SPLIT_BLOCK, 1,
    )  # fmt: skip
    if not COLLAPSED:
        squares = collapse_rows(streams, token_stride, stream_stride, gates, x, token, N, STREAMS, D, P, 1, BLOCK_D)
        tl.debug_barrier()
    if norm_weight is not None:
        normalise_rows(x, squares, norm_weight, norm_eps, token, N, D, 1, BLOCK_D)


@triton.jit
def hc_whole_kernel(
    streams, token_stride, stream_stride, fn, fn_stride, pre_in, partial, scale, base, norm_weight, x, pre, post, comb,
    N, mix_eps, hc_eps, iters, norm_eps,
    STREAMS: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, MATRIX: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All of it for BLOCK_T tokens. What a program wrote itself it reads again from the cache."""
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    mix_columns(
        streams, token_stride, stream_stride, fn, fn_stride, pre_in, partial, x, N,
        token, 0, STREAMS, D, MIXES, P, WIDTH, PIECES, SPAN, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    tl.debug_barrier()
    gates, squares = mix_weights(
        partial, scale, base, pre, post, comb, token, N, mix_eps, hc_eps, iters,
        STREAMS, D, MATRIX, WIDTH, MIXES, 1, 1, BLOCK_T,
    )  # fmt: skip
    if pre_in is None:
        squares = collapse_rows(
            streams, token_stride, stream_stride, gates, x, token, N, STREAMS, D, MATRIX, BLOCK_T, BLOCK_D
        )
        tl.debug_barrier()
    if norm_weight is not None:
        normalise_rows(x, squares, norm_weight, norm_eps, token, N, D, BLOCK_T, BLOCK_D)


def _run(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, pre_in: Tensor | None, norm_weight: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None, Tensor | None], eps: tuple[float, float, float], iters: int,
    config: Config,
) -> Tensor:  # fmt: skip
    n, size = streams.shape[-2:]
    mixes, lead = fn.shape[0], math.prod(streams.shape[:-2])
    tokens = streams.reshape(lead, n, size)
    tokens, fn = (t if t.stride(-1) == 1 else t.contiguous() for t in (tokens, fn))
    scale, base = scale.contiguous(), base.contiguous()
    pre_in = None if pre_in is None else pre_in.contiguous()
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    x = streams.new_empty((*streams.shape[:-2], size))
    width = 4 * triton.cdiv(mixes + 2, 4)
    span = config["SPAN"] or size
    splits = triton.cdiv(size, span)
    partial = streams.new_empty((splits, lead, width), dtype=torch.float32)
    given = (tokens, tokens.stride(0), tokens.stride(1))
    mix_eps, hc_eps, norm_eps = eps
    sizes = {"STREAMS": n, "D": size, "MIXES": mixes, "WIDTH": width}
    pieces = PIECES[fn.dtype] if streams.dtype == torch.bfloat16 else 0
    # A product in fp32 keeps its operands in registers.
    block_t, most = (config["BLOCK_T"], config["BLOCK_D"]) if pieces else (16, 16)
    tile = {
        "PIECES": pieces,
        "SPAN": span, "BLOCK_T": block_t, "BLOCK_D": max(16, min(most, triton.next_power_of_2(size))),
    }  # fmt: skip
    padded, matrix = max(16, triton.next_power_of_2(mixes)), triton.next_power_of_2(n)
    if not config["SPAN"]:
        launch(
            hc_whole_kernel, (triton.cdiv(lead, block_t),),
            *given, fn, fn.stride(0), pre_in, partial, scale, base, norm_weight, x, *gates, lead,
            mix_eps, hc_eps, iters, norm_eps, config=config, **sizes, **tile, P=padded, MATRIX=matrix,
        )  # fmt: skip
        return x
    launch(
        hc_split_kernel, (triton.cdiv(lead, block_t), splits),
        *given, fn, fn.stride(0), pre_in, partial, x, lead, config=config, **sizes, **tile, P=padded,
    )  # fmt: skip
    launch(
        hc_finish_kernel, (lead,), *given, partial, scale, base, norm_weight, x, *gates, lead,
        mix_eps, hc_eps, iters, norm_eps, config=_FINISH, **sizes, COLLAPSED=pre_in is not None, P=matrix,
        SPLITS=splits, SPLIT_BLOCK=triton.next_power_of_2(splits), BLOCK_D=min(8192, triton.next_power_of_2(size)),
    )  # fmt: skip
    return x


_FINISH = config(8, 1)


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
    x = _run(streams, fn, scale, base, pre_in, norm_weight, (pre, post, comb), eps, iters, config)
    return x, pre, post, comb


def hc_head(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mix_eps: float, hc_eps: float, *, config: Config,
    target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::hc_head`: streams [..., n, D] -> [..., D]."""
    return _run(streams, fn, scale, base, None, None, (None, None, None), (mix_eps, hc_eps, 0.0), 1, config)


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    tokens = sizes["N"]
    split = [config(4, 2, BLOCK_T=16, BLOCK_D=64, SPAN=span) for span in (64, 256, 512)]
    whole = [config(8, 3, BLOCK_T=t, BLOCK_D=64, SPAN=0) for t in (64, 32)]
    if tokens <= 16:
        yield from (*split, *whole)
    elif tokens <= 64:
        yield from (split[1], split[0], split[2], *whole)
    elif tokens <= 1024:
        yield from (split[2], split[1], *whole)
    else:
        yield from whole


def _applies(meta: Meta) -> str | None:
    return streams_fit(meta["streams"])


TEMPLATES = (
    TritonTemplate("hc_pre", "dsv4::hc_pre", hc_pre, _configs, applies=_applies),
    TritonTemplate("hc_head", "dsv4::hc_head", hc_head, _configs, applies=_applies),
)
