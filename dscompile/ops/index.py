"""The indexer: which compressed rows a query attends to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.layout import check_rows, decode_rows
from dscompile.ops.registry import define

_TOPK, _BLOCKS = Check("index_topk"), Check("index_topk_candidates")
_CHUNK_ELEMENTS = 1 << 22
"""Scores per head held at a time; bounds the memory of long prompts."""


def _validate(
    check: Check, q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, key_format: str
) -> None:
    check.rank("q", q, 4, "[B, T, H, d]")
    check.dtype("q", q, FLOATS)
    batch, tokens, heads, dim = q.shape
    check.rank("keys", keys, 3, "[B, S, d or packed row]")
    check_rows(check, "keys", keys, "key_format", key_format, dim)
    check.that(keys.shape[0] == batch, "shape of keys", list(keys.shape), f"[{batch}, S, row]")
    check.dtype("head_weights", head_weights, FLOATS)
    check.shape("head_weights", head_weights, (batch, tokens, heads))
    check.dtype("n_visible", n_visible, INTEGERS)
    check.shape("n_visible", n_visible, (batch, tokens))
    check.positive("top_k", top_k)


def _check_candidates(q: Tensor, keys: Tensor, candidates: Tensor | None) -> None:
    if candidates is not None:
        _TOPK.dtype("candidates", candidates, (torch.bool,))
        _TOPK.shape("candidates", candidates, (q.shape[0], q.shape[1], keys.shape[1]))


def _score_chunks(
    q: Tensor, keys: Tensor, head_weights: Tensor, scale: float, key_format: str
) -> Iterator[tuple[slice, Tensor]]:
    """Pairs of a range of queries and their scores, fp32 [B, chunk, S]."""
    batch, tokens, heads, dim = q.shape
    transposed = decode_rows(keys, key_format, dim, torch.float32).transpose(1, 2).unsqueeze(1)
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * keys.shape[1]))
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        scores = F.relu(torch.matmul(q[:, part].float(), transposed)) * scale
        yield part, (scores * head_weights[:, part].float().unsqueeze(-1)).sum(2)


def best_first(scores: Tensor, allowed: Tensor, newest: bool = False) -> Tensor:
    """Indices by falling score, the allowed ones first, [..., S] -> int64 [..., S].

    Among equals the lowest index comes first, or with `newest` the highest.

    Two stable sorts rather than a fill with -inf: a score of -inf that is allowed must still come before whatever is
    not, and NaN in an entry that is not allowed must not matter.
    """
    if newest:
        return scores.shape[-1] - 1 - best_first(scores.flip(-1), allowed.flip(-1))
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    allowed_first = torch.sort((~allowed).gather(-1, order).to(torch.uint8), dim=-1, stable=True).indices
    return order.gather(-1, allowed_first)


def select(scores: Tensor, allowed: Tensor, k: int, ascending: bool, newest: bool = False) -> Tensor:
    """The k best allowed indices [..., k], -1 where there are fewer."""
    picked = best_first(scores, allowed, newest)[..., :k]
    valid = allowed.gather(-1, picked)
    if ascending:
        rows = scores.shape[-1]
        picked = torch.where(valid, picked, rows).sort(-1).values
        return torch.where(picked < rows, picked, -1)
    return torch.where(valid, picked, -1)


def candidate_rows(
    scores: Tensor, visible: Tensor, n_visible: Tensor, keep: int, block_size: int, newest_block: bool = False
) -> Tensor:
    """bool [..., S]: rows of the `keep` best blocks of `block_size` rows; n_visible [...].

    A block scores as its best visible row; the block of the newest visible row always stays; a block without visible
    rows never does. The whole block is marked, rows that are not visible yet included.
    """
    rows = scores.shape[-1]
    blocks = -(-rows // block_size)
    padded = F.pad(scores.masked_fill(~visible, -torch.inf), (0, blocks * block_size - rows), value=-torch.inf)
    best = padded.unflatten(-1, (blocks, block_size)).amax(-1)
    newest = torch.div(n_visible.clamp(max=rows).unsqueeze(-1) - 1, block_size, rounding_mode="floor")
    best = torch.where(torch.arange(blocks, device=scores.device) == newest, torch.inf, best)
    kept = select(best, best > -torch.inf, min(keep, blocks), ascending=False, newest=newest_block)
    mask = torch.zeros((*best.shape[:-1], blocks + 1), dtype=torch.bool, device=scores.device)
    mask.scatter_(-1, torch.where(kept < 0, blocks, kept), True)
    return mask[..., :blocks].repeat_interleave(block_size, -1)[..., :rows]


def _visible(n_visible: Tensor, rows: int) -> Tensor:
    return torch.arange(rows, device=n_visible.device) < n_visible.unsqueeze(-1)


def index_topk(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor | None, top_k: int,
    scale: float, key_format: str, ascending: bool, newest: bool = False,
) -> Tensor:  # fmt: skip
    """q [B, T, H, d], keys [B, S, d] or packed [B, S, row], head_weights [B, T, H] -> int64 [B, T, min(top_k, S)].

    Row j scores the sum over heads of relu(q . k_j) * scale * head weight, in fp32. It can be chosen if
    j < n_visible[b, t] and, with candidates bool [B, T, S], if it is marked there. The best rows are returned, the
    lowest index first among equals (with `newest` the highest), -1 where there are fewer; `ascending` sorts them by
    index, -1 last. n_visible <= 0 gives only -1.
    """
    _validate(_TOPK, q, keys, head_weights, n_visible, top_k, key_format)
    _check_candidates(q, keys, candidates)
    rows = keys.shape[1]
    out = torch.full((*q.shape[:2], min(top_k, rows)), -1, dtype=torch.int64, device=q.device)
    for part, scores in _score_chunks(q, keys, head_weights, scale, key_format):
        allowed = _visible(n_visible[:, part], rows)
        if candidates is not None:
            allowed = allowed & candidates[:, part]
        out[:, part] = select(scores, allowed, out.shape[-1], ascending, newest)
    return out


def index_topk_candidates(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, scale: float, key_format: str,
    ascending: bool, candidate_blocks: int, block_size: int, newest: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`index_topk` without candidates, and the candidates bool [B, T, S] for the index layers that follow.

    Candidates are the rows of the best `candidate_blocks` blocks of `block_size` rows, see `candidate_rows`; they do
    not restrict this call's own choice.
    """
    _validate(_BLOCKS, q, keys, head_weights, n_visible, top_k, key_format)
    _BLOCKS.positive("candidate_blocks", candidate_blocks)
    _BLOCKS.positive("block_size", block_size)
    rows = keys.shape[1]
    out = torch.full((*q.shape[:2], min(top_k, rows)), -1, dtype=torch.int64, device=q.device)
    candidates = torch.zeros((*q.shape[:2], rows), dtype=torch.bool, device=q.device)
    if rows == 0:
        return out, candidates
    for part, scores in _score_chunks(q, keys, head_weights, scale, key_format):
        visible = _visible(n_visible[:, part], rows)
        out[:, part] = select(scores, visible, out.shape[-1], ascending, newest)
        candidates[:, part] = candidate_rows(scores, visible, n_visible[:, part], candidate_blocks, block_size, newest)
    return out, candidates


def _topk_fake(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor | None, top_k: int,
    scale: float, key_format: str, ascending: bool, newest: bool = False,
) -> Tensor:  # fmt: skip
    _validate(_TOPK, q, keys, head_weights, n_visible, top_k, key_format)
    _check_candidates(q, keys, candidates)
    return q.new_empty((*q.shape[:2], torch.sym_min(top_k, keys.shape[1])), dtype=torch.int64)


def _blocks_fake(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, scale: float, key_format: str,
    ascending: bool, candidate_blocks: int, block_size: int, newest: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _validate(_BLOCKS, q, keys, head_weights, n_visible, top_k, key_format)
    _BLOCKS.positive("candidate_blocks", candidate_blocks)
    _BLOCKS.positive("block_size", block_size)
    indices = q.new_empty((*q.shape[:2], torch.sym_min(top_k, keys.shape[1])), dtype=torch.int64)
    return indices, q.new_empty((*q.shape[:2], keys.shape[1]), dtype=torch.bool)


def _scoring(B: Any, T: Any, H: Any, d: Any, S: Any, k: Any, scored: Any, key_row_bytes: Any, x_bytes: Any) -> Cost:
    read = B * T * H * (d * x_bytes + 4) + B * T * 8 + B * S * key_row_bytes
    return Cost(read, B * T * k * 8, 2 * B * T * H * d * scored)


@costed
def _topk_cost(
    B: Any, T: Any, H: Any, d: Any, S: Any, k: Any, scored: Any, key_row_bytes: Any, x_bytes: Any = 2,
    candidate_bytes: Any = 0,
) -> Cost:  # fmt: skip
    """B * T queries of H heads against S rows, of which `scored` a query (the visible candidates) count."""
    base = _scoring(B, T, H, d, S, k, scored, key_row_bytes, x_bytes)
    return base + Cost(B * T * S * candidate_bytes, 0, 0)


@costed
def _blocks_cost(
    B: Any, T: Any, H: Any, d: Any, S: Any, k: Any, scored: Any, key_row_bytes: Any, x_bytes: Any = 2
) -> Cost:
    """As index_topk, plus a byte a row for the candidates that are written."""
    return _scoring(B, T, H, d, S, k, scored, key_row_bytes, x_bytes) + Cost(0, B * T * S, 0)


def _scoring_sizes(q: Tensor, keys: Tensor, top_k: int) -> dict[str, Any]:
    batch, tokens, heads, dim = q.shape
    rows = keys.shape[1]
    return {
        "B": batch, "T": tokens, "H": heads, "d": dim, "S": rows, "k": torch.sym_min(top_k, rows), "scored": rows,
        "key_row_bytes": keys.shape[2] * keys.element_size(), "x_bytes": q.element_size(),
    }  # fmt: skip


def _topk_sizes(q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor | None,
                top_k: int, *rest: Any) -> dict[str, Any]:  # fmt: skip
    return {**_scoring_sizes(q, keys, top_k), "candidate_bytes": 0 if candidates is None else 1}


def _blocks_sizes(q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int,
                  *rest: Any) -> dict[str, Any]:  # fmt: skip
    return _scoring_sizes(q, keys, top_k)


define(
    "index_topk(Tensor q, Tensor keys, Tensor head_weights, Tensor n_visible, Tensor? candidates, int top_k, "
    "float scale, str key_format, bool ascending, bool newest=False) -> Tensor",
    family="indexer", reference=index_topk, fake=_topk_fake, cost=_topk_cost, sizes=_topk_sizes,
)  # fmt: skip
define(
    "index_topk_candidates(Tensor q, Tensor keys, Tensor head_weights, Tensor n_visible, int top_k, float scale, "
    "str key_format, bool ascending, int candidate_blocks, int block_size, bool newest=False) "
    "-> (Tensor indices, Tensor candidates)",
    family="indexer", reference=index_topk_candidates, fake=_blocks_fake, cost=_blocks_cost, sizes=_blocks_sizes,
)  # fmt: skip
