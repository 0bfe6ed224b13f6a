"""Routers in a user's own block: every score function, with and without bias, normalisation and factor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dscompile.ops  # noqa: F401 - registers the vocabulary
from dscompile.passes.dialects.common import router
from dscompile.passes.engine import PassContext, PatternPass, normalise
from dscompile.passes.engine.testing import functional_graph, run_flat

N, T, E, D, K = 2, 3, 8, 16, 3
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "sigmoid": lambda x: x.sigmoid(),
    "softmax": lambda x: F.softmax(x, dim=-1),
}


def rewrite(fn: Callable[..., Any], *inputs: Tensor) -> tuple[list[Any], list[str], float]:
    """(arguments of the routers in the graph, reasons of near misses, difference of the outputs)."""
    gm = functional_graph(fn, *inputs)
    before = run_flat(gm)
    normalise(gm)
    for step in router.PASSES:
        step.run(gm, PassContext())
    result = PatternPass("router", router.PATTERNS).run(gm, PassContext())
    after = run_flat(gm)
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True))
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.dsv4.router.default)
    return [call.args for call in calls], [m.reason for m in result.near_misses], difference


def dense(weights: Tensor, indices: Tensor) -> Tensor:
    """[.., E]: what does not depend on the order of the chosen experts."""
    return torch.zeros(*weights.shape[:-1], E, dtype=weights.dtype).scatter(-1, indices, weights)


def tensors(batched: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(N, T, D) if batched else torch.randn(N * T, D)
    return x.to(dtype), torch.randn(E, D) * 0.3, torch.randn(E) * 0.2


Weigh = Callable[[Tensor], Tensor]
WEIGHS: dict[str, tuple[Weigh, tuple[bool, float, float]]] = {
    "all": (lambda w: w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, (True, 1e-20, 2.5)),
    "another eps": (lambda w: w / (w.sum(-1, keepdim=True) + 1e-6) * 2.5, (True, 1e-6, 2.5)),
    "no eps": (lambda w: w / w.sum(-1, keepdim=True), (True, 0.0, 1.0)),
    "factor": (lambda w: w * 2.5, (False, 0.0, 2.5)),
    "nothing": (lambda w: w, (False, 0.0, 1.0)),
    # What the operation has no word for stays behind it.
    "bounded sum": (lambda w: w / w.sum(-1, keepdim=True).clamp(min=1e-9), (False, 0.0, 1.0)),
    "of all": (lambda w: w / (w.sum() + 1e-9), (False, 0.0, 1.0)),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("weigh", WEIGHS)
def test_weights(score: str, weigh: str) -> None:
    """In float32 and with a bias that only chooses."""

    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        scores = SCORES[score](F.linear(x.float(), weight))
        indices = torch.topk(scores + bias, K, dim=-1).indices
        return dense(WEIGHS[weigh][0](scores.gather(1, indices)), indices)

    [args], misses, difference = rewrite(block, *tensors())
    assert args[3:] == (None, K, score, *WEIGHS[weigh][1], True) and not misses
    assert difference < 1e-6


@pytest.mark.parametrize(("score", "ordered", "batched"), [*itertools.product(SCORES, (False, True), (False, True))])
def test_without_a_bias(score: str, ordered: bool, batched: bool) -> None:
    """The best scores themselves, or gathered by their places: the same numbers."""

    def taken(x: Tensor, weight: Tensor) -> Tensor:
        weights, indices = SCORES[score](x @ weight.T).topk(K, -1, sorted=ordered)
        return dense(weights / weights.sum(-1, keepdim=True), indices)

    def gathered(x: Tensor, weight: Tensor) -> Tensor:
        scores = SCORES[score](x @ weight.T)
        indices = scores.topk(K, -1, sorted=ordered).indices
        return dense(scores.gather(-1, indices) * 1.5, indices)

    for block, how in ((taken, (True, 0.0, 1.0)), (gathered, (False, 0.0, 1.5))):
        [args], misses, difference = rewrite(block, *tensors(batched)[:2])
        assert args[2:8] == (None, None, K, score, *how[:2]) and args[8] == how[2] and not misses
        assert difference < 1e-6


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("batched", [False, True])
def test_given_experts(score: str, batched: bool) -> None:
    def block(x: Tensor, weight: Tensor, indices: Tensor) -> Tensor:
        weights = SCORES[score](F.linear(x, weight)).gather(-1, indices)
        return dense(weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5, indices)

    x, weight, _ = tensors(batched)
    [args], misses, difference = rewrite(block, x, weight, torch.rand(*x.shape[:-1], E).topk(K).indices)
    assert args[3] is not None and args[4:9] == (K, score, True, 1e-20, 1.5) and not misses
    assert difference < 1e-6


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, None])
def test_narrow_scores(score: str, dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    """The sum with the bias has the wider of their dtypes, which is what the operation ranks by."""

    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        scores = SCORES[score](F.linear(x, weight))
        indices = torch.topk(scores + bias, K, dim=-1, sorted=False).indices
        weights = scores.gather(1, indices)
        return dense(weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5, indices)

    x, weight, bias = tensors(dtype=dtype)
    [args], misses, difference = rewrite(block, x, weight.to(dtype), bias.to(bias_dtype or dtype))
    assert args[2].meta["val"].dtype == (bias_dtype or dtype) and args[9] is False and not misses
    assert difference == 0


def test_a_narrow_bias_on_float32_scores_is_cast() -> None:
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        scores = torch.sigmoid(F.linear(x.float(), weight.float()))
        indices = torch.topk(scores + bias, K).indices
        return dense(scores.gather(1, indices), indices)

    x, weight, bias = (t.to(torch.bfloat16) for t in tensors())
    [args], misses, difference = rewrite(block, x, weight, bias)
    assert args[9] is True and args[2].meta["val"].dtype == torch.float32 and not misses and difference == 0


def biased_weights(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The bias weighs, too."""
    ranked = torch.sigmoid(F.linear(x, weight)) + bias
    indices = ranked.topk(K).indices
    return dense(ranked.gather(1, indices), indices)


def other_score(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    scores = torch.tanh(F.linear(x, weight))
    indices = (scores + bias).topk(K).indices
    return dense(scores.gather(1, indices), indices)


def smallest(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    scores = torch.sigmoid(F.linear(x, weight))
    indices = (scores + bias).topk(K, largest=False).indices
    return dense(scores.gather(1, indices), indices)


def scores_kept(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """All scores are returned: to compute them in the operation would compute them twice."""
    scores = torch.sigmoid(F.linear(x, weight))
    indices = (scores + bias).topk(K).indices
    return dense(scores.gather(1, indices), indices) + scores


def late_float(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A narrow product with scores in float32: the operation has one dtype for both."""
    scores = torch.sigmoid(F.linear(x.bfloat16(), weight.bfloat16()).float())
    indices = (scores + bias).topk(K).indices
    return dense(scores.gather(1, indices), indices)


@pytest.mark.parametrize(("block", "reason"), [
    (biased_weights, "expected aten.sigmoid, found aten.add"), (other_score, "found aten.tanh"),
    (smallest, "True expected, here False"), (scores_kept, "is also used by"), (late_float, "found aten._to_copy"),
])  # fmt: skip
def test_other_routers_stay(block: Callable[..., Tensor], reason: str) -> None:
    found, misses, difference = rewrite(block, *tensors())
    assert not found and difference == 0
    assert misses and any(reason in m for m in misses), misses


def test_a_choice_from_all_scores_is_no_router() -> None:
    """Probabilities of given labels, and a plain gate: nothing resembles a router."""

    def label(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (F.linear(x, weight) + bias).softmax(-1).gather(1, torch.ones(N * T, 1, dtype=torch.int64))

    def gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, weight)) * bias

    for fn in (label, gate):
        assert rewrite(fn, *tensors())[:2] == ([], [])
