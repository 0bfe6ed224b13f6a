"""The routed experts: pairs sorted by expert, the routing weight before the down projection (model_v41 2.9)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.engine import Pattern

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


def _experts(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, limit: float, grouped_mm: GroupedMM
) -> Tensor:
    top_k = indices.shape[1]
    chosen, order = indices.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(w13.shape[0]), right=True, out_int32=True)
    gate, up = grouped_mm(x[order // top_k], w13.transpose(1, 2), ends).chunk(2, -1)
    hidden = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    hidden = hidden * weights.flatten()[order].unsqueeze(-1)
    down = grouped_mm(hidden.to(x.dtype), w2.transpose(1, 2), ends)
    return down[order.argsort()].float().unflatten(0, (-1, top_k)).sum(1)


def _bf16(x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return _experts(x, weights, indices, w13, w2, limit, torch.ops.aten._grouped_mm)


def _other(x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return _experts(x, weights, indices, w13, w2, limit, torch.ops.deepseek_v41.grouped_mm)


def _replace(x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return torch.ops.dsv4.experts(x, indices, weights, w13, w2, limit, True, torch.float32)


_INPUTS = {
    "x": "act[N D]", "weights": "f32[N k]", "indices": "i64[N k]", "w13": "act[E 2*I D]", "w2": "act[E D I]",
}  # fmt: skip
_SCALARS = {"limit": 12.3456}
_ARANGE = frozenset({torch.ops.aten.arange.start_step})

PATTERNS = (
    Pattern(
        "experts.sorted.bf16", "experts", "deepseek_v41", _bf16, _replace, inputs=_INPUTS, scalars=_SCALARS,
        dtypes={"act": (torch.bfloat16,)}, sizes={"D": 8 * 101, "I": 8 * 127}, shared=_ARANGE,
        key=torch.ops.aten._grouped_mm.default,
    ),  # the kernel wants rows of a multiple of 16 bytes
    Pattern(
        "experts.sorted", "experts", "deepseek_v41", _other, _replace, inputs=_INPUTS, scalars=_SCALARS,
        dtypes={"act": (torch.float32, torch.float16)}, shared=_ARANGE, needs=("deepseek_v41::grouped_mm",),
        key=torch.ops.aten.searchsorted.Tensor,
    ),
)  # fmt: skip
