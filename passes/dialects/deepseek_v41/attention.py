"""Sparse attention by index: the window as a band, compressed rows by an index list (model_v41 2.7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dscompile.passes.dialects.common.units import with_unit_sizes
from dscompile.passes.dialects.deepseek_v41.positions import why_not_contiguous
from dscompile.passes.engine import Match, Pattern, Reject

_Index = Callable[[Tensor, int], Tensor]
_INPUTS = {"q": "act[b t h d]", "recent": "act[b window+t d]", "positions": "i64[b t]", "sink": "f32[h]"}
_SCALARS = {"scale": 0.12347, "window": 113}
_aten = torch.ops.aten
#: The list of window rows is the same for many layers: where it stands once for all, every attention may still match.
_INDEX = frozenset({
    _aten.ge.Scalar, _aten.ge.Tensor, _aten.gt.Scalar, _aten.gt.Tensor, _aten.lt.Scalar, _aten.lt.Tensor,
    _aten.le.Scalar, _aten.le.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.bitwise_and.Tensor, _aten.where.self,
    _aten.clamp.default, _aten.cat.default,
})  # fmt: skip


def _window_index(positions: Tensor, window: int) -> Tensor:
    length = positions.shape[1]
    row = torch.arange(length).unsqueeze(1) + 1
    row = row + torch.arange(window)
    key, query = positions[:, :1].unsqueeze(-1) - window + row, positions.unsqueeze(-1)
    visible = (key >= 0) & (key <= query) & (query - key < window)
    return torch.where(visible, row, -1)


def _ring_index(positions: Tensor, window: int) -> Tensor:
    row = torch.arange(window)
    query = positions.unsqueeze(-1)
    key = query - window + (row + 1)
    visible = (key >= 0) & (key <= query) & (query - key < window)
    return torch.where(visible, row, -1)


def _attend(q: Tensor, kv: Tensor, index: Tensor, sink: Tensor, scale: float) -> Tensor:
    batch = torch.arange(kv.shape[0]).view(-1, 1, 1)
    rows = kv[batch, index.clamp(min=0)].float()
    scores = torch.einsum("bthd,btkd->bthk", q.float(), rows) * scale
    scores = scores.masked_fill((index < 0).unsqueeze(2), -math.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - largest)
    out = torch.einsum("bthk,btkd->bthd", weights.to(q.dtype).float(), rows)
    return (out / total).to(q.dtype)


def _sparse_by(index: _Index) -> Callable[..., Tensor]:
    def search(
        q: Tensor, recent: Tensor, distant: Tensor, positions: Tensor, indices: Tensor, sink: Tensor, scale: float,
        window: int,
    ) -> Tensor:  # fmt: skip
        chosen = torch.where(indices >= 0, indices + recent.shape[1], -1)
        rows = torch.cat((index(positions, window), chosen), -1)
        return _attend(q, torch.cat((recent, distant), 1), rows, sink, scale)

    return search


def _local_by(index: _Index) -> Callable[..., Tensor]:
    def search(q: Tensor, recent: Tensor, positions: Tensor, sink: Tensor, scale: float, window: int) -> Tensor:
        return _attend(q, recent, index(positions, window), sink, scale)

    return search


def _sparse_op(
    q: Tensor, recent: Tensor, distant: Tensor, positions: Tensor, indices: Tensor, sink: Tensor, scale: float,
    window: int,
) -> Tensor:  # fmt: skip
    """The last of the rows before the chunk is the position before it."""
    first = positions[:, 0] - (recent.shape[1] - q.shape[1])
    return torch.ops.dsv4.sparse_attention(
        q, recent, positions, first, window, distant, indices, None, sink, scale, None, None, False, "none", "none"
    )


def _local_op(q: Tensor, recent: Tensor, positions: Tensor, sink: Tensor, scale: float, window: int) -> Tensor:
    first = positions[:, 0] - (recent.shape[1] - q.shape[1])
    return torch.ops.dsv4.sparse_attention(
        q, recent, positions, first, window, None, None, None, sink, scale, None, None, False, "none", "none"
    )


def _positions_rise(match: Match) -> Reject | None:
    """The band holds the same rows as the positions only where a row's positions are one more each."""
    why = why_not_contiguous(match.inputs["positions"])
    return Reject(why, match.inputs["positions"]) if why else None


_DISTANT = {"distant": "act[b c d]", "indices": "i64[b t k]"}


def _pattern(name: str, search: Callable[..., Tensor], op: Callable[..., Tensor], inputs: dict[str, str]) -> Pattern:
    return Pattern(
        name, "attention", "deepseek_v41", search, op, inputs=inputs, scalars=_SCALARS, guard=_positions_rise,
        shared=_INDEX,
    )  # fmt: skip


_CHUNK = (
    _pattern("attention.sparse", _sparse_by(_window_index), _sparse_op, {**_INPUTS, **_DISTANT}),
    _pattern("attention.window", _local_by(_window_index), _local_op, _INPUTS),
)
#: A single token whose own row is already in the ring.
_RING_INPUTS = {**_INPUTS, "recent": "act[b window d]"}
_RING = tuple(
    replace(pattern, sizes={"t": 1})
    for pattern in (
        _pattern("attention.sparse.ring", _sparse_by(_ring_index), _sparse_op, {**_RING_INPUTS, **_DISTANT}),
        _pattern("attention.window.ring", _local_by(_ring_index), _local_op, _RING_INPUTS),
    )
)

PATTERNS = (
    *(variant for pattern in _CHUNK for variant in with_unit_sizes(pattern)),
    *(variant for pattern in _RING for variant in with_unit_sizes(pattern, ("b",))),
)
