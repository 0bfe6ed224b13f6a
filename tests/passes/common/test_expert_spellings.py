"""Routed experts as people write them without sorting: weights gathered per token, or every expert for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dscompile.ops  # noqa: F401 - registers the vocabulary
from dscompile.passes.dialects.common import router
from dscompile.passes.dialects.transformers_v4 import experts
from dscompile.passes.engine import PassContext, PatternPass, normalise
from dscompile.passes.engine.testing import functional_graph, run_flat

N, E, D, I, K, LIMIT = 6, 8, 16, 12, 3, 1.5  # noqa: E741


def rewrite(fn: Callable[..., Any], *inputs: Tensor) -> tuple[int, list[str], float]:
    """(experts in the graph, reasons of near misses, difference of the outputs)."""
    gm = functional_graph(fn, *inputs)
    before = run_flat(gm)
    normalise(gm)
    PatternPass("router", router.PATTERNS).run(gm, PassContext())
    result = PatternPass("experts", experts.PATTERNS).run(gm, PassContext())
    after = run_flat(gm)
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True))
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.dsv4.experts.default)
    return len(calls), [m.reason for m in result.near_misses], difference


def weights_of(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(t.to(dtype) for t in (torch.randn(N, D), torch.randn(E, 2 * I, D) * 0.4, torch.randn(E, D, I) * 0.4))


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


def x_first(x: Tensor, w13: Tensor, w2: Tensor, i: Tensor, w: Tensor) -> Tensor:
    hidden = gated(torch.einsum("nd,nkod->nko", x, w13[i]))
    return (torch.einsum("nki,nkdi->nkd", hidden, w2[i]) * w[..., None]).sum(1).to(x.dtype)


def weights_first(x: Tensor, w13: Tensor, w2: Tensor, i: Tensor, w: Tensor) -> Tensor:
    """The letters and their order in the result do not matter."""
    hidden = gated(torch.einsum("bkod,bd->bko", w13[i], x))
    return torch.einsum("bkd,bk->bd", torch.einsum("bkdi,bki->bkd", w2[i], hidden), w)


@pytest.mark.parametrize(("form", "dtype", "weights_dtype"), [
    (x_first, torch.float32, torch.float32), (x_first, torch.bfloat16, torch.bfloat16),
    (x_first, torch.bfloat16, torch.float32), (weights_first, torch.float32, torch.float32),
    (weights_first, torch.float16, torch.float16),
])  # fmt: skip
def test_gathered_weights(form: Callable[..., Tensor], dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    """Also of an expert that a token chose twice, and by weights that a float32 router made."""
    indices = torch.randint(0, E, (N, K))
    indices[0] = 2
    found, misses, difference = rewrite(form, *weights_of(dtype), indices, torch.rand(N, K).to(weights_dtype))
    assert found == 1 and not misses
    assert difference < (1e-5 if dtype == torch.float32 else 0.2)


def all_experts(x: Tensor, w13: Tensor, w2: Tensor, dense: Tensor) -> Tensor:
    hidden = gated(torch.einsum("nd,eod->neo", x, w13))
    return torch.einsum("ned,ne->nd", torch.einsum("nei,edi->ned", hidden, w2), dense)


def all_experts_summed(x: Tensor, w13: Tensor, w2: Tensor, dense: Tensor) -> Tensor:
    hidden = gated(torch.einsum("nd,eod->neo", x, w13))
    return (torch.einsum("nei,edi->ned", hidden, w2) * dense.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("form", [all_experts, all_experts_summed])
@pytest.mark.parametrize("score", [torch.sigmoid, torch.tanh])
def test_every_expert_with_the_weights_of_the_chosen(
    form: Callable[..., Tensor], score: Callable[[Tensor], Tensor]
) -> None:
    """Chosen by a router that is recognised, or by another top-k."""

    def block(x: Tensor, w13: Tensor, w2: Tensor, gate: Tensor) -> Tensor:
        scores = score(x @ gate.T)
        weights, indices = scores.topk(K, -1)
        return form(x, w13, w2, torch.zeros_like(scores).scatter(1, indices, weights))

    found, misses, difference = rewrite(block, *weights_of(), torch.randn(E, D))
    assert found == 1 and not misses and difference < 1e-5


def given(x: Tensor, w13: Tensor, w2: Tensor, indices: Tensor, w: Tensor) -> Tensor:
    return all_experts(x, w13, w2, torch.zeros(N, E).scatter(1, indices, w))


def onto_ones(x: Tensor, w13: Tensor, w2: Tensor, indices: Tensor, w: Tensor) -> Tensor:
    return all_experts(x, w13, w2, torch.ones(N, E).scatter(1, w.topk(K).indices, w))


def soft(x: Tensor, w13: Tensor, w2: Tensor, indices: Tensor, w: Tensor) -> Tensor:
    """A mixture in which every expert weighs."""
    return all_experts(x, w13, w2, (x @ w13[:, 0].T).softmax(-1))


@pytest.mark.parametrize(("form", "reason"), [
    (given, "not proven to be distinct"), (onto_ones, "not scattered into zeros"), (soft, "every expert runs"),
])  # fmt: skip
def test_other_mixtures_stay(form: Callable[..., Tensor], reason: str) -> None:
    found, misses, difference = rewrite(form, *weights_of(), torch.randint(0, E, (N, K)), torch.rand(N, K))
    assert not found and difference == 0
    assert len(misses) == 1 and reason in misses[0], misses


def test_an_ordinary_feed_forward_network_resembles_nothing() -> None:
    def mlp(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = (x @ w13.T).chunk(2, -1)
        return (F.silu(gate) * up) @ w2.T

    assert rewrite(mlp, torch.randn(N, D), torch.randn(2 * I, D), torch.randn(D, I)) == (0, [], 0)
