"""The routed experts in transformers' two static forms: tokens sorted by expert, or weights gathered per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.engine import Pattern

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


def _gated(both: Tensor, limit: float) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _sorted(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, grouped_mm: GroupedMM
) -> Tensor:
    k, experts = indices.shape[1], w13.shape[0]
    ids, order = torch.sort(indices.reshape(-1))
    counts = torch.histc(ids.float(), bins=experts, min=0, max=experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    both = grouped_mm(x[order // k], w13.transpose(1, 2), ends)
    out = grouped_mm(_gated(both, limit), w2.transpose(1, 2), ends) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return out[back].view(x.shape[0], k, x.shape[1]).sum(1).to(x.dtype)


def _fallback(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return _sorted(x, indices, weights, w13, w2, limit, torch.ops.transformers.grouped_mm_fallback)


def _grouped(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return _sorted(x, indices, weights, w13, w2, limit, torch.ops.aten._grouped_mm)


def _batched(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    k = indices.shape[1]
    ids = indices.reshape(-1)
    both = torch.bmm(w13[ids], x.repeat_interleave(k, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[ids], _gated(both, limit).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
    return out.view(x.shape[0], k, x.shape[1]).sum(1).to(x.dtype)


def _replace(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return torch.ops.dsv4.experts(x, indices, weights, w13, w2, limit, False, x.dtype)


_INPUTS = {
    "x": "act[N D]", "indices": "i64[N k]", "weights": "w[N k]", "w13": "act[E 2*I D]", "w2": "act[E D I]",
}  # fmt: skip
_SCALARS = {"limit": 12.3456}
#: Under autocast the router's weights may be narrower than the tokens.
_WEIGHTS = {"w": ("act", torch.float32, torch.bfloat16, torch.float16)}

FALLBACK = Pattern(
    name="experts.grouped_fallback", family="experts", dialect="transformers_v4", search=_fallback, replace=_replace,
    inputs=_INPUTS, scalars=_SCALARS, dtypes=_WEIGHTS, key=torch.ops.aten.histc.default,
    needs=("transformers::grouped_mm_fallback",),
)  # fmt: skip
GROUPED = Pattern(
    name="experts.grouped", family="experts", dialect="transformers_v4", search=_grouped, replace=_replace,
    inputs=_INPUTS, scalars=_SCALARS, dtypes={"act": (torch.bfloat16,)}, key=torch.ops.aten.histc.default,
    sizes={"D": 8 * 101, "I": 8 * 127},  # the kernel wants rows of a multiple of 16 bytes
)  # fmt: skip
BATCHED = Pattern(
    name="experts.batched", family="experts", dialect="transformers_v4", search=_batched, replace=_replace,
    inputs=_INPUTS, scalars=_SCALARS, dtypes=_WEIGHTS, key=torch.ops.aten.silu.default,
)  # fmt: skip

PATTERNS = (FALLBACK, GROUPED, BATCHED)
