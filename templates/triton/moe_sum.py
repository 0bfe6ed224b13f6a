"""The end of a mixture of experts: routed and shared results, and the way back into the streams, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.templates.triton.device.gemm import rounded
from dscompile.templates.triton.device.moe import pair_sum
from dscompile.templates.triton.hc_post import streams_fit
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Meta, config


@triton.jit
def moe_sum_kernel(
    results, shared, indices, weights, streams, token_stride, stream_stride, post, comb, out,
    K: tl.constexpr, D: tl.constexpr, EXPERTS: tl.constexpr, BEFORE: tl.constexpr, ROUND: tl.constexpr,
    NARROW: tl.constexpr, STREAMS: tl.constexpr, FP32: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y[n] = the `pair_sum` of its pairs + shared[n], rounded to their dtype; NARROW: so is the sum of the pairs.

    Without streams (STREAMS 0) out is y. Else out[n, j] = post[n, j] * y[n] + sum over i of comb[n, i, j] *
    streams[n, i]; not FP32: post, comb, both addends and their sum rounded to the type of the streams.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    # All loads before the first store: behind one, the compiler would load again.
    loaded = ()
    for i in tl.static_range(STREAMS):
        at = streams + row * token_stride + i * stream_stride + column
        loaded = loaded + (tl.load(at, mask=inside, other=0.0),)  # type: ignore[assignment]
    own = tl.load(shared + row * D + column, mask=inside, other=0.0).to(tl.float32)
    total = pair_sum(results, indices, weights, row, column, inside, K, D, EXPERTS, BEFORE, ROUND, BLOCK_D)
    if NARROW:
        total = rounded(total, results.dtype.element_ty)
    y = rounded(total + own, results.dtype.element_ty)
    if STREAMS == 0:
        tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=inside)
    else:
        kind = out.dtype.element_ty
        if not FP32:
            y = rounded(y, kind)
        for j in tl.static_range(STREAMS):
            factor = tl.load(post + row * STREAMS + j).to(tl.float32)
            if not FP32:
                factor = rounded(factor, kind)
            spread = factor * y
            mixed = tl.zeros((BLOCK_D,), tl.float32)
            for i in tl.static_range(STREAMS):
                share = tl.load(comb + (row * STREAMS + i) * STREAMS + j).to(tl.float32)
                if not FP32:
                    share = rounded(share, kind)
                mixed += share * loaded[i].to(tl.float32)
            if not FP32:
                spread, mixed = rounded(spread, kind), rounded(mixed, kind)
            tl.store(out + (row * STREAMS + j) * D + column, (spread + mixed).to(kind), mask=inside)


def moe_sum(
    results: Tensor, shared: Tensor, indices: Tensor, weights: Tensor, experts: int, before: bool,
    routed_dtype: torch.dtype, streams: Tensor | None, post: Tensor | None, comb: Tensor | None, fp32: bool,
) -> Tensor:  # fmt: skip
    """results [N k, D], shared [N, D] -> [N, D], or with streams [N, n, D] their shape."""
    tokens, k = indices.shape
    size = shared.shape[1]
    n, strides = 0, (0, 0)
    out = shared.new_empty(shared.shape)
    if streams is not None and post is not None and comb is not None:
        streams = streams if streams.stride(-1) == 1 else streams.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        n, strides = streams.shape[1], (streams.stride(0), streams.stride(1))
        out = streams.new_empty(streams.shape)
    few = tokens <= 64
    block = min(512 if few else 1024, triton.next_power_of_2(size))
    launch(
        moe_sum_kernel, (tokens, triton.cdiv(size, block)),
        results, shared, indices, weights, streams, *strides, post, comb, out,
        # Of its own, like that of the sort.
        config=config(2 if few else 4, 1), K=k, D=size, EXPERTS=experts, BEFORE=before,
        ROUND=not before and weights.dtype == results.dtype, NARROW=routed_dtype == results.dtype, STREAMS=n, FP32=fp32,
        BLOCK_D=block,
    )  # fmt: skip
    return out


def sum_applies(meta: Meta) -> str | None:
    """What the arguments of both operations have in common."""
    routed_dtype, kind = meta["routed_dtype"], meta["x"].dtype
    if routed_dtype not in (torch.float32, kind):
        return f"the routed sum is {routed_dtype}, allowed: torch.float32 or {kind}"
    return None if meta["streams"] is None else streams_fit(meta["streams"])
