"""The indexer: score of every compressed row, rows of the future masked, the best ones, -1 for what is not visible."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._sympy.functions import Min

from dscompile.passes.engine import Pattern

aten = torch.ops.aten


def _search(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, scale: float
) -> Tensor:  # fmt: skip
    scores = torch.matmul(q.float(), keys.transpose(-1, -2).float().unsqueeze(1))
    scores = (F.relu(scores) * scale * head_weights.unsqueeze(-1)).sum(2)
    limit = n_visible.unsqueeze(-1)
    hidden = torch.arange(keys.shape[1]).view(1, 1, -1) >= limit
    best = scores.masked_fill(hidden, -torch.inf).topk(top_k, -1).indices
    return torch.where(best >= limit, torch.full_like(best, -1), best)


def _constant_part(top_k: int | torch.SymInt) -> int:
    """k of ``min(k, rows)``, which is what the operator itself takes the minimum of."""
    if isinstance(top_k, int):
        return top_k
    numbers = [int(a) for a in top_k.node.expr.args if a.is_Integer]
    if not isinstance(top_k.node.expr, Min) or len(numbers) != 1:
        raise TypeError(f"top_k is {top_k}, expected a number or its minimum with the rows")
    return numbers[0]


def _replace(q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, scale: float) -> Tensor:
    visible = n_visible.expand(q.shape[:2])
    k = _constant_part(top_k)
    return torch.ops.dsv4.index_topk(q, keys, head_weights, visible, None, k, scale, "none", False)


_INPUTS = {"q": "act[b t h d]", "keys": "act[b s d]", "head_weights": "f32[b t h]"}
_SCALARS = {"top_k": 113, "scale": 0.12345}

PATTERNS = tuple(
    Pattern(
        name=f"index_topk.{name}", family="indexer", dialect="transformers_v4", search=_search, replace=_replace,
        inputs={**_INPUTS, "n_visible": f"i64[{batch} t]"}, scalars=_SCALARS, key=aten.topk.default,
    )
    for name, batch in (("rows", "b"), ("one_row", "1"))
)  # fmt: skip
