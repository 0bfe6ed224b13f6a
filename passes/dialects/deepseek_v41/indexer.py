"""Index scores, visibility, candidates and selection (model_v41 2.6)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.dialects.common.units import with_unit_sizes
from dscompile.passes.engine import Pattern


def _scores(q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, scale: float) -> Tensor:
    dots = torch.einsum("bthd,bsd->bths", q.float(), keys.float())
    scores = (torch.relu(dots) * (head_weights.float() * scale).unsqueeze(-1)).sum(2)
    ahead = torch.arange(scores.shape[-1]) >= n_visible.unsqueeze(-1)
    return scores.masked_fill(ahead, -math.inf)


def _rank_keys(scores: Tensor) -> Tensor:
    """Among equal scores the newest row wins: the row number is the low half of a 64-bit key."""
    bits = scores.masked_fill(scores == 0, 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) + torch.arange(scores.shape[-1])


def _select(scores: Tensor, top_k: int) -> Tensor:
    rows = scores.shape[-1]
    index = _rank_keys(scores).topk(top_k).indices
    index = torch.where(scores.gather(-1, index) > -math.inf, index, rows).sort(-1).values
    return torch.where(index < rows, index, -1)


def _block_mask(scores: Tensor, n_visible: Tensor, blocks: int, block_size: int) -> Tensor:
    best = scores.unflatten(-1, (-1, block_size)).amax(-1)
    newest = (n_visible - 1) // block_size
    pinned = torch.arange(best.shape[-1]) == newest.unsqueeze(-1)
    best = best.masked_fill(pinned, math.inf)
    block = _rank_keys(best).topk(blocks).indices
    visible = best.gather(-1, block) > -math.inf
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, block, visible)
    return chosen.repeat_interleave(block_size, -1)


def _plain(q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, scale: float, top_k: int) -> Tensor:
    return _select(_scores(q, keys, head_weights, n_visible, scale), top_k)


def _plain_op(q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, scale: float, top_k: int) -> Tensor:
    return torch.ops.dsv4.index_topk(q, keys, head_weights, n_visible, None, top_k, scale, "none", True, True)


def _within(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor, scale: float, top_k: int
) -> Tensor:
    scores = _scores(q, keys, head_weights, n_visible, scale)
    return _select(scores.masked_fill(~candidates, -math.inf), top_k)


def _within_op(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor, scale: float, top_k: int
) -> Tensor:
    return torch.ops.dsv4.index_topk(q, keys, head_weights, n_visible, candidates, top_k, scale, "none", True, True)


def _publishing(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, scale: float, top_k: int, blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = _scores(q, keys, head_weights, n_visible, scale)
    return _select(scores, top_k), _block_mask(scores, n_visible, blocks, block_size)


def _publishing_padded(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, scale: float, top_k: int, blocks: int,
    block_size: int, short: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = _scores(q, keys, head_weights, n_visible, scale)
    padded = F.pad(scores, (0, short), value=-math.inf)
    mask = _block_mask(padded, n_visible, blocks, block_size)
    return _select(scores, top_k), mask[..., : scores.shape[-1]]


def _publishing_op(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, scale: float, top_k: int, blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.ops.dsv4.index_topk_candidates(
        q, keys, head_weights, n_visible, top_k, scale, "none", True, blocks, block_size, True
    )


def _inputs(rows: str) -> dict[str, str]:
    return {"q": "act[b t h d]", "keys": f"act[b {rows} d]", "head_weights": "act[b t h]", "n_visible": "i64[b t]"}


_SCALARS = {"scale": 0.12347, "top_k": 113}
_MASKS = frozenset(
    {torch.ops.aten.ge.Tensor, torch.ops.aten.bitwise_not.default, torch.ops.aten.arange.start_step}
)  # one mask may serve several layers
_BLOCKS = {**_SCALARS, "blocks": 127, "block_size": 131}

_BASE = (
    Pattern(
        "index_topk.candidates", "indexer", "deepseek_v41", _publishing, _publishing_op,
        inputs=_inputs("nb*block_size"), scalars=_BLOCKS, required=(0, 1), shared=_MASKS,
    ),
    Pattern(
        "index_topk.candidates.padded", "indexer", "deepseek_v41", _publishing_padded, _publishing_op,
        inputs=_inputs("nb*block_size-short"), scalars={**_BLOCKS, "short": 109}, required=(0, 1),
    ),
    Pattern(
        "index_topk.within_candidates", "indexer", "deepseek_v41", _within, _within_op,
        inputs={**_inputs("s"), "candidates": "bool[b t s]"}, scalars=_SCALARS, shared=_MASKS,
    ),
    Pattern(
        "index_topk.sorted", "indexer", "deepseek_v41", _plain, _plain_op, inputs=_inputs("s"),
        scalars=_SCALARS, shared=_MASKS,
    ),
)  # fmt: skip

PATTERNS = tuple(variant for pattern in _BASE for variant in with_unit_sizes(pattern))
