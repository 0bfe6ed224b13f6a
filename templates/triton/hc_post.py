"""The way back into the residual streams: every stream once in, once out."""

from __future__ import annotations

import math
from collections.abc import Iterable

import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.hc import post_factors, streams_at
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

MOST_STREAMS = 8
MANY = config(4, 1, BLOCK_D=1024)


@triton.jit
def hc_post_kernel(
    y, y_stride, streams, token_stride, stream_stride, post, comb, out,
    STREAMS: tl.constexpr, D: tl.constexpr, FP32: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[n, j] = post[n, j] * y[n] + sum over i of comb[n, i, j] * streams[n, i]; post, comb and out are dense.

    Not FP32: post and comb, both addends and their sum are rounded to the type of the streams.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    factors = post_factors(y, post, comb, row, None, streams.dtype.element_ty, STREAMS, FP32)
    made = streams_at(
        streams, token_stride, stream_stride, y, y_stride, factors, row, column, inside, STREAMS, FP32
    )  # fmt: skip
    for j in tl.static_range(STREAMS):
        tl.store(out + (row * STREAMS + j) * D + column, made[j], mask=inside)


def hc_post(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool, *, config: Config, target: Target
) -> Tensor:
    """`dsv4::hc_post`: y [..., D], streams [..., n, D] -> [..., n, D]."""
    n, size = streams.shape[-2:]
    lead = math.prod(streams.shape[:-2])
    tokens = streams.reshape(lead, n, size)
    rows = y.reshape(lead, size)
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = streams.new_empty(streams.shape)
    block = min(config["BLOCK_D"], triton.next_power_of_2(size))
    launch(
        hc_post_kernel, (lead, triton.cdiv(size, block)),
        rows, rows.stride(0), tokens, tokens.stride(0), tokens.stride(1), post.contiguous(), comb.contiguous(), out,
        config=config, STREAMS=n, D=size, FP32=fp32, BLOCK_D=block,
    )  # fmt: skip
    return out


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    few = config(2, 1, BLOCK_D=512)
    yield from (few, MANY) if sizes["N"] <= 64 else (MANY, few)
    yield config(4, 1, BLOCK_D=2048)


def streams_fit(streams: Tensor) -> str | None:
    n, size = streams.shape[-2:]
    return None if 1 <= n <= MOST_STREAMS and size > 0 else f"{n} streams of {size}, allowed: 1 to {MOST_STREAMS}"


def _applies(meta: Meta) -> str | None:
    return streams_fit(meta["streams"])


TEMPLATES = (TritonTemplate("hc_post", "dsv4::hc_post", hc_post, _configs, applies=_applies),)
