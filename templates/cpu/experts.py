"""Routed experts on the CPU: sort by expert, one pair of products per expert that got a token, one weighted sum.

Few tokens an expert (decoding): each weight is read once, in place, on AMX tiles for bf16 from four tokens on. Many (a
prompt): blocks of tokens of one expert go through both products and the activation on tiles, without leaving the cache.
Where there are no tiles: PyTorch's matrix products on contiguous slices, with the activation and the sum in C++.
Roundings are those of the reference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.memory import settle
from dscompile.templates.cpu.native import ELEMENT, plain
from dscompile.templates.cpu.record import CpuTemplate

# Tokens an expert up to which reading its weights in place beats PyTorch's product.
_FEW = {torch.bfloat16: 24, torch.float16: 4, torch.float32: 4}
_PLAIN_SUM, _WEIGHTED, _WEIGHTED_ROUNDED = 0, 1, 2


def _fits(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, out_dtype: torch.dtype) -> bool:
    if x.dim() != 2 or indices.dim() != 2 or w13.dim() != 3 or w2.dim() != 3:
        return False
    experts, double, dim = w13.shape
    return (
        x.dtype in ELEMENT
        and w13.dtype == w2.dtype == x.dtype
        and out_dtype in (x.dtype, torch.float32)
        and weights.dtype in ELEMENT
        and x.shape[1] == dim > 0
        and double % 2 == 0
        and w2.shape == (experts, dim, double // 2)
        and double > 0
        and indices.shape[0] == x.shape[0]
        and weights.shape == indices.shape
        and indices.dtype in (torch.int64, torch.int32)
    )


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, weight_before_down: bool,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`dsv4::experts`: x [N, D] -> [N, D] in out_dtype."""
    sort = native.function("experts", "experts_sort", "pqqppp", x.dtype) if _fits(
        x, indices, weights, w13, w2, out_dtype
    ) else None  # fmt: skip
    tokens, k = indices.shape if indices.dim() == 2 else (0, 0)
    count = w13.shape[0]
    indices = plain(indices, torch.int64)
    slots = indices.new_empty(2 * tokens * k + count + 1)  # order, place, offsets
    order, place, offsets = slots.split([tokens * k, tokens * k, count + 1])
    if sort is None or sort(
        indices.data_ptr(), tokens * k, count, order.data_ptr(), offsets.data_ptr(), place.data_ptr()
    ):
        reference: Tensor = OPS["experts"].reference(x, indices, weights, w13, w2, limit, weight_before_down, out_dtype)
        return reference
    if weight_before_down:
        mode = _PLAIN_SUM
    else:
        mode = _WEIGHTED_ROUNDED if weights.dtype == x.dtype != torch.float32 else _WEIGHTED
    weights = plain(weights, torch.float32)
    clamp = limit if 0 < limit < math.inf else 0.0
    if x.stride(1) != 1:
        x = x.contiguous()
    if w13.stride(2) != 1:
        w13 = w13.contiguous()
    if w2.stride(2) != 1:
        w2 = w2.contiguous()
    out = x.new_empty(x.shape, dtype=out_dtype)
    wide = int(out_dtype == torch.float32)
    dim, inner = x.shape[1], w2.shape[2]
    # Few tokens an expert: each weight is read once and that is the work. Many: whole blocks of tokens on tiles.
    name = "experts_few" if tokens * k <= _FEW[x.dtype] * min(count, tokens * k) else "experts_many"
    kernel = native.function("experts", name, "pqqqqqqpqqpqqppppfiiipi", x.dtype)
    assert kernel is not None
    settle(w13)
    settle(w2)
    refused = kernel(
        x.data_ptr(), x.stride(0), tokens, k, dim, inner, count, w13.data_ptr(), w13.stride(0), w13.stride(1),
        w2.data_ptr(), w2.stride(0), w2.stride(1), order.data_ptr(), offsets.data_ptr(), place.data_ptr(),
        weights.data_ptr(), clamp, int(weight_before_down), mode, wide, out.data_ptr(), native.threads(),
    )  # fmt: skip
    if not refused:
        return out
    activate = native.function("experts", "experts_activate", "pqqfipppi", x.dtype)
    combine = native.function("experts", "experts_combine", "pppqqqiipi", x.dtype)
    assert activate is not None and combine is not None
    ends = offsets.tolist()
    results = x.new_empty((ends[-1], dim))
    largest = max((b - a for a, b in zip(ends, ends[1:])), default=0)
    both, act = x.new_empty((largest, 2 * inner)), x.new_empty((largest, inner))
    token_of = order[: ends[-1]].div(k, rounding_mode="floor")
    for expert, (start, end) in enumerate(zip(ends, ends[1:])):
        if start == end:
            continue
        rows = end - start
        torch.mm(x.index_select(0, token_of[start:end]), w13[expert].t(), out=both[:rows])
        activate(
            both.data_ptr(), rows, inner, clamp, int(weight_before_down), weights.data_ptr(),
            order[start:].data_ptr(), act.data_ptr(), native.threads(),
        )  # fmt: skip
        torch.mm(act[:rows], w2[expert].t(), out=results[start:end])
    combine(
        results.data_ptr(), place.data_ptr(), weights.data_ptr(), tokens, k, dim, mode, wide, out.data_ptr(),
        native.threads(),
    )  # fmt: skip
    return out


TEMPLATES: tuple[CpuTemplate, ...] = (CpuTemplate("experts", "dsv4::experts", "opaque", experts),)
