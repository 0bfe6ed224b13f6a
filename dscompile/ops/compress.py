"""Pooling of r tokens into one compressed row, weighted per channel by a softmax over the tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

_CHECK = Check("compress")


def _validate(
    kv: Tensor, gate: Tensor, ape: Tensor | None, prior_kv: Tensor | None, prior_gate: Tensor | None, overlap: bool
) -> Any:
    """Check the arguments and return the number of values of a pooled row."""
    _CHECK.rank("kv", kv, 4, "[B, n, r, C]")
    _CHECK.dtype("kv", kv, FLOATS)
    _CHECK.dtype("gate", gate, FLOATS)
    _CHECK.shape("gate", gate, kv.shape)
    batch, _, ratio, channels = kv.shape
    _CHECK.positive("group length r (axis 2 of kv)", ratio)
    if ape is not None:
        _CHECK.dtype("ape", ape, FLOATS)
        _CHECK.shape("ape", ape, (ratio, channels))
    _CHECK.that((prior_kv is None) == (prior_gate is None), "prior_kv and prior_gate", "only one given", "both or none")
    if not overlap:
        _CHECK.that(prior_kv is None, "prior_kv", "given", "None without overlap")
        return channels
    _CHECK.that(channels % 2 == 0, "channels C (axis 3 of kv)", channels, "an even number with overlap")
    if prior_kv is not None and prior_gate is not None:
        for name, tensor in (("prior_kv", prior_kv), ("prior_gate", prior_gate)):
            _CHECK.dtype(name, tensor, FLOATS)
            _CHECK.shape(name, tensor, (batch, ratio, channels // 2))
    return channels // 2


def _with_previous(groups: Tensor, prior: Tensor | None, empty: float) -> Tensor:
    """[B, n, r, 2D] -> [B, n, 2r, D]: first half of the group before, then second half of the group itself."""
    early, late = groups.chunk(2, -1)
    if prior is None:
        first = torch.full_like(early[:, :1], empty)
    else:
        first = prior.to(groups.dtype).unsqueeze(1)[:, : groups.shape[1]]
    return torch.cat((torch.cat((first, early[:, :-1]), 1), late), 2)


def compress(
    kv: Tensor, gate: Tensor, ape: Tensor | None, prior_kv: Tensor | None, prior_gate: Tensor | None, overlap: bool
) -> Tensor:
    """kv, gate [B, n, r, C] (n groups of r tokens) -> pooled rows [B, n, D] in kv.dtype.

    gate += ape [r, C]; weights = softmax of gate over the tokens in fp32, rounded to kv.dtype; rows = sum of
    weights * kv. Without overlap D = C. With overlap D = C / 2 and a group pools 2r entries: the first halves of the
    group before, then the second halves of its own; before group 0 come prior_kv and prior_gate [B, r, D] (the gate
    with ape already added), or nothing: zeros with gate -inf.
    """
    _validate(kv, gate, ape, prior_kv, prior_gate, overlap)
    if ape is not None:
        gate = gate + ape
    if overlap:
        kv, gate = _with_previous(kv, prior_kv, 0.0), _with_previous(gate, prior_gate, -math.inf)
    weights = torch.softmax(gate, 2, dtype=torch.float32).to(kv.dtype)
    return (kv * weights).sum(2)


def _fake(
    kv: Tensor, gate: Tensor, ape: Tensor | None, prior_kv: Tensor | None, prior_gate: Tensor | None, overlap: bool
) -> Tensor:
    width = _validate(kv, gate, ape, prior_kv, prior_gate, overlap)
    return kv.new_empty((kv.shape[0], kv.shape[1], width))


@costed
def _cost(N: Any, r: Any, C: Any, D: Any, x_bytes: Any = 4, gate_bytes: Any = 4) -> Cost:
    """N groups of r tokens and C channels become rows of D values; a softmax (4) and a weighted sum (2) an entry."""
    return Cost(N * r * C * (x_bytes + gate_bytes), N * D * x_bytes, 6 * N * r * C)


def _sizes(kv: Tensor, gate: Tensor, ape: Any, prior_kv: Any, prior_gate: Any, overlap: bool) -> dict[str, Any]:
    batch, groups, ratio, channels = kv.shape
    return {
        "N": batch * groups, "r": ratio, "C": channels, "D": channels // 2 if overlap else channels,
        "x_bytes": kv.element_size(), "gate_bytes": gate.element_size(),
    }  # fmt: skip


define(
    "compress(Tensor kv, Tensor gate, Tensor? ape, Tensor? prior_kv, Tensor? prior_gate, bool overlap) -> Tensor",
    family="compressor", reference=compress, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
