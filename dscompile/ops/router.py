"""Choice of experts for each token, and their weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

SCORE_FUNCTIONS = ("sqrtsoftplus", "sigmoid", "softmax")
_CHECK = Check("router")


def _validate(
    x: Tensor, weight: Tensor, bias: Tensor | None, forced_indices: Tensor | None, top_k: int, score_fn: str,
    norm_eps: float, fp32: bool,
) -> None:  # fmt: skip
    _CHECK.rank("x", x, 2, "[N, D]")
    _CHECK.dtype("x", x, FLOATS)
    _CHECK.rank("weight", weight, 2, "[E, D]")
    _CHECK.shape("weight", weight, (weight.shape[0], x.shape[1]))
    _CHECK.dtype("weight", weight, FLOATS if fp32 else (x.dtype,))
    experts = weight.shape[0]
    _CHECK.that(1 <= top_k, "top_k", top_k, f"1 <= top_k <= {experts} experts")
    _CHECK.that(top_k <= experts, "top_k", top_k, f"1 <= top_k <= {experts} experts")
    _CHECK.choice("score_fn", score_fn, SCORE_FUNCTIONS)
    _CHECK.that(norm_eps >= 0, "norm_eps", norm_eps, ">= 0")
    if bias is not None:
        _CHECK.dtype("bias", bias, FLOATS)
        _CHECK.shape("bias", bias, (experts,))
    if forced_indices is not None:
        _CHECK.dtype("forced_indices", forced_indices, INTEGERS)
        _CHECK.shape("forced_indices", forced_indices, (x.shape[0], top_k))


def expert_scores(logits: Tensor, score_fn: str) -> Tensor:
    """The score of each expert from its logit, in the dtype of the logits."""
    if score_fn == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return torch.sigmoid(logits) if score_fn == "sigmoid" else torch.softmax(logits, -1)


def router(
    x: Tensor, weight: Tensor, bias: Tensor | None, forced_indices: Tensor | None, top_k: int, score_fn: str,
    normalize: bool, norm_eps: float, scale: float, fp32: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [N, D], weight [E, D] -> weights [N, k] (fp32, or x.dtype if not fp32), indices int64 [N, k].

    Scores come from x @ weight^T, in fp32 or in x.dtype. The k experts with the largest score + bias are chosen, in
    that order, the lowest index first among equals; forced_indices [N, k] replaces the choice (hash routing). Weights
    are the scores without the bias; `normalize` divides them by their sum + norm_eps; then they are multiplied by
    `scale`. A forced index outside [0, E) raises IndexError.
    """
    _validate(x, weight, bias, forced_indices, top_k, score_fn, norm_eps, fp32)
    logits = F.linear(x.float(), weight.float()) if fp32 else F.linear(x, weight)
    scores = expert_scores(logits, score_fn)
    if forced_indices is not None:
        _CHECK.index_range("forced_indices", forced_indices, 0, weight.shape[0], "number of experts")
        indices = forced_indices.long()
    else:
        # A stable sort, not topk: topk leaves the choice among equal scores open, and ranks would disagree.
        ranked = scores if bias is None else scores + bias
        indices = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + norm_eps)
    return weights * scale, indices.clone()


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, forced_indices: Tensor | None, top_k: int, score_fn: str,
    normalize: bool, norm_eps: float, scale: float, fp32: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _validate(x, weight, bias, forced_indices, top_k, score_fn, norm_eps, fp32)
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.float32 if fp32 else x.dtype), x.new_empty(shape, dtype=torch.int64)


@costed
def _cost(N: Any, D: Any, E: Any, k: Any, x_bytes: Any = 2, weight_bytes: Any = 2, score_bytes: Any = 4) -> Cost:
    """N tokens against E experts, k chosen."""
    return Cost(N * D * x_bytes + E * D * weight_bytes + E * 4, N * k * (score_bytes + 8), 2 * N * D * E)


def _sizes(x: Tensor, weight: Tensor, bias: Any, forced: Any, top_k: int, score_fn: str, normalize: bool,
           norm_eps: float, scale: float, fp32: bool) -> dict[str, Any]:  # fmt: skip
    return {
        "N": x.shape[0], "D": x.shape[1], "E": weight.shape[0], "k": top_k, "x_bytes": x.element_size(),
        "weight_bytes": weight.element_size(), "score_bytes": 4 if fp32 else x.element_size(),
    }  # fmt: skip


define(
    "router(Tensor x, Tensor weight, Tensor? bias, Tensor? forced_indices, int top_k, str score_fn, bool normalize, "
    "float norm_eps, float scale, bool fp32) -> (Tensor weights, Tensor indices)",
    family="router", reference=router, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
