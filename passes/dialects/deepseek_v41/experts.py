"""The routed experts: pairs sorted by expert, the routing weight before the down projection (model_v41 2.9)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.passes.engine import Pattern

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


_FP4 = FORMATS["fp4_g32_ue8m0"]


def _experts(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, limit: float, grouped_mm: GroupedMM,
    entering: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:  # fmt: skip
    top_k = indices.shape[1]
    chosen, order = indices.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(w13.shape[0]), right=True, out_int32=True)
    gate, up = grouped_mm(entering(x)[order // top_k], w13.transpose(1, 2), ends).chunk(2, -1)
    hidden = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    hidden = hidden * weights.flatten()[order].unsqueeze(-1)
    down = grouped_mm(entering(hidden.to(x.dtype)), w2.transpose(1, 2), ends)
    return down[order.argsort()].float().unflatten(0, (-1, top_k)).sum(1)


def _stored(grouped_mm: Callable[[], GroupedMM]) -> Callable[..., Tensor]:
    """FP4 weights as the release stores them, activations rounded to FP8."""

    def search(
        x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
        limit: float,
    ) -> Tensor:  # fmt: skip
        up, down = (_FP4.decode(w, s, 2 * w.shape[-1], x.dtype) for w, s in ((w13, w13_scale), (w2, w2_scale)))
        return _experts(x, weights, indices, up, down, limit, grouped_mm(), _rounded)

    return search


def _rounded(x: Tensor) -> Tensor:
    return torch.ops.dsv4.fake_quant(x, "fp8_g32_ue8m0")  # type: ignore[no-any-return]


def _stored_op(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    limit: float,
) -> Tensor:  # fmt: skip
    return torch.ops.dsv4.experts_packed(
        x, indices, weights, w13, w13_scale, w2, w2_scale, limit, "e2m1_1x32", torch.float32
    )


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
_STORED_INPUTS = {
    "x": "act[N 32*g]", "weights": "f32[N k]", "indices": "i64[N k]", "w13": "u8[E 64*j 16*g]",
    "w13_scale": "u8[E 64*j g]", "w2": "u8[E 32*g 16*j]", "w2_scale": "u8[E 32*g j]",
}  # fmt: skip
_ARANGE = frozenset({torch.ops.aten.arange.start_step})
#: The shared expert takes the rounded rows as well; the operation rounds its own.
_STORED_SHARED = _ARANGE | {torch.ops.dsv4.fake_quant.default}

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
    Pattern(
        "experts.stored.bf16", "experts", "deepseek_v41", _stored(lambda: torch.ops.aten._grouped_mm), _stored_op,
        inputs=_STORED_INPUTS, scalars=_SCALARS, dtypes={"act": (torch.bfloat16,)}, shared=_STORED_SHARED,
        key=torch.ops.aten._grouped_mm.default,
    ),
    Pattern(
        "experts.stored", "experts", "deepseek_v41", _stored(lambda: torch.ops.deepseek_v41.grouped_mm), _stored_op,
        inputs=_STORED_INPUTS, scalars=_SCALARS, dtypes={"act": (torch.float32, torch.float16)}, shared=_STORED_SHARED,
        needs=("deepseek_v41::grouped_mm",), key=torch.ops.aten.searchsorted.Tensor,
    ),
)  # fmt: skip
