"""The router: sqrt(softplus) scores in the activations' dtype, chosen by score plus bias or by a table of token ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.engine import Pattern

_Two = tuple[Tensor, Tensor]


def _weigh(scores: Tensor, indices: Tensor, norm_eps: float, scale: float) -> Tensor:
    weights = scores.gather(1, indices)
    return weights / (weights.sum(-1, keepdim=True) + norm_eps) * scale


def _topk(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, norm_eps: float, scale: float) -> _Two:
    scores = F.softplus(F.linear(x, weight)).sqrt()
    indices = torch.topk(scores + bias, top_k, -1, sorted=False).indices
    return _weigh(scores, indices, norm_eps, scale), indices


def _topk_op(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, norm_eps: float, scale: float) -> _Two:
    return torch.ops.dsv4.router(x, weight, bias, None, top_k, "sqrtsoftplus", True, norm_eps, scale, False)


def _hash(x: Tensor, weight: Tensor, indices: Tensor, norm_eps: float, scale: float) -> Tensor:
    return _weigh(F.softplus(F.linear(x, weight)).sqrt(), indices, norm_eps, scale)


def _hash_op(x: Tensor, weight: Tensor, indices: Tensor, norm_eps: float, scale: float) -> Tensor:
    return torch.ops.dsv4.router(
        x, weight, None, indices, indices.shape[1], "sqrtsoftplus", True, norm_eps, scale, False
    )[0]  # fmt: skip


_SCALARS = {"norm_eps": 1.357e-7, "scale": 1.2345}

TOPK = Pattern(
    name="router.topk", family="router", dialect="transformers_v4", search=_topk, replace=_topk_op,
    inputs={"x": "act[N D]", "weight": "act[E D]", "bias": "f32[E]"}, scalars={"top_k": 113, **_SCALARS},
    key=torch.ops.aten.softplus.default,
)  # fmt: skip
HASH = Pattern(
    name="router.hash", family="router", dialect="transformers_v4", search=_hash, replace=_hash_op,
    inputs={"x": "act[N D]", "weight": "act[E D]", "indices": "i64[N k]"}, scalars=_SCALARS,
    key=torch.ops.aten.softplus.default,
)  # fmt: skip

#: Top-k contains the hash form (any index tensor), so it comes first.
PATTERNS = (TOPK, HASH)
