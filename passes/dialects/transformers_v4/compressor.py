"""Pooling of token groups: plain (ratio 128), and overlapping (ratio 4) by writing halves into a buffer of 2r slots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern

aten = torch.ops.aten


def _pool(kv: Tensor, gate: Tensor) -> Tensor:
    return (kv * gate.softmax(2, dtype=torch.float32).to(kv.dtype)).sum(2)


def _plain(kv: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
    return _pool(kv, gate + ape)


def _plain_op(kv: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
    return torch.ops.dsv4.compress(kv, gate, ape, None, None, False)


def _halves(groups: Tensor, prior: Tensor | None, empty: float) -> Tensor:
    """[B, n, r, 2D] -> [B, n, 2r, D]: the previous group's first half, then the own second half."""
    batch, n, ratio, width = groups.shape
    half = width // 2
    out = groups.new_full((batch, n, 2 * ratio, half), empty)
    out[:, :, ratio:] = groups[..., half:]
    if n > 1:
        out[:, 1:, :ratio] = groups[:, :-1, :, :half]
    if prior is not None:
        out[:, 0, :ratio] = prior
    return out


def _first(kv: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
    return _pool(_halves(kv, None, 0.0), _halves(gate + ape, None, -torch.inf))


def _first_op(kv: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
    return torch.ops.dsv4.compress(kv, gate, ape, None, None, True)


def _later(kv: Tensor, gate: Tensor, prior_kv: Tensor, prior_gate: Tensor) -> Tensor:
    """The gate has its position bias already: it is kept for the next call, too."""
    return _pool(_halves(kv, prior_kv, 0.0), _halves(gate, prior_gate, -torch.inf))


def _later_op(kv: Tensor, gate: Tensor, prior_kv: Tensor, prior_gate: Tensor) -> Tensor:
    return torch.ops.dsv4.compress(kv, gate, None, prior_kv, prior_gate, True)


def _pattern(name: str, search: Callable[..., Tensor], replace: Callable[..., Tensor], **inputs: str) -> Pattern:
    return Pattern(
        name=f"compress.{name}", family="compressor", dialect="transformers_v4", search=search, replace=replace,
        inputs=inputs, key=aten._softmax.default,
    )  # fmt: skip


PATTERNS = (
    _pattern("overlap.later", _later, _later_op, kv="act[b n r 2*D]", gate="w[b n r 2*D]",
             prior_kv="act[b r D]", prior_gate="w[b r D]"),
    _pattern("overlap.later.one_group", _later, _later_op, kv="act[b 1 r 2*D]", gate="w[b 1 r 2*D]",
             prior_kv="act[b r D]", prior_gate="w[b r D]"),
    _pattern("overlap.first", _first, _first_op, kv="act[b n r 2*D]", gate="act[b n r 2*D]", ape="w[r 2*D]"),
    _pattern("overlap.first.one_group", _first, _first_op, kv="act[b 1 r 2*D]", gate="act[b 1 r 2*D]",
             ape="w[r 2*D]"),
    _pattern("plain", _plain, _plain_op, kv="act[b n r D]", gate="act[b n r D]", ape="w[r D]"),
)  # fmt: skip
