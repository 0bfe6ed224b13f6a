"""Engram: rows of a packed table and the gate that adds them to the streams (model_v41 2.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.formats.numeric import e4m3_to_float, ue8m0_to_float
from dscompile.passes.dialects.deepseek_v41.formats import OUT_DTYPES
from dscompile.passes.engine import Match, Pattern, Reject

_GROUP = 32


def _gather(dtype: torch.dtype, short: str) -> Pattern:
    def search(table: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
        values = e4m3_to_float(table[rows]).unflatten(-1, (-1, _GROUP))
        return (values * ue8m0_to_float(scales[rows]).unsqueeze(-1)).flatten(-2).flatten(-2).to(dtype)

    def replace(table: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
        return torch.ops.dsv4.engram_gather(table, scales, rows, dtype)

    return Pattern(
        f"engram_gather.packed.{short}",
        "engram",
        "deepseek_v41",
        search,
        replace,
        inputs={"table": f"u8[s {_GROUP}*g]", "scales": "u8[s g]", "rows": "i64[b t n]"},
        share=0.9,
    )


def _gate(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor, eps: float,
    scale: float,
) -> Tensor:  # fmt: skip
    x, k = streams.float(), key.float()
    norm = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    dot = (x * q_weight * k_weight * k).sum(-1) * norm * scale
    gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp(min=1e-6).sqrt())
    gate = torch.where(mask.unsqueeze(-1), gate, 0.0)
    return (x + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).to(streams.dtype)


def _gate_op(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor, eps: float
) -> Tensor:
    return torch.ops.dsv4.engram_gate(streams, key, value, q_weight, k_weight, mask, eps)


def _scale_is_usual(match: Match) -> Reject | None:
    """The operation scales the product by D ** -0.5 itself."""
    size, scale = match.dims["D"], match.scalars["scale"]
    if isinstance(size, int) and abs(scale - size**-0.5) <= 1e-6 * scale:
        return None
    return Reject(f"the product is scaled by {scale}, not by {size} ** -0.5", match.anchor)


PATTERNS = (
    *(_gather(getattr(torch, name), short) for short, name in OUT_DTYPES.items()),
    Pattern(
        "engram_gate", "engram", "deepseek_v41", _gate, _gate_op,
        inputs={
            "streams": "act[b t n D]", "key": "act[b t n D]", "value": "act[b t D]", "q_weight": "f32[n D]",
            "k_weight": "f32[n D]", "mask": "bool[b t]",
        },
        scalars={"eps": 1.3579e-7, "scale": 0.12347}, guard=_scale_is_usual,
    ),
)  # fmt: skip
