"""Routers: a score of every expert, the best ones by score or by score plus bias, weighed by their scores.

Traced is the middle: product, score function, choice, scores of the chosen ones. How these become weights (divided by
their sum plus a number, or not; multiplied by a number, or not) is read off what uses them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from dscompile.passes.dialects.common.splice import splice
from dscompile.passes.engine import Match, PassContext, PassResult, Pattern, Reject, Structural, Writes
from dscompile.passes.engine.fxutil import fake_mode
from dscompile.passes.engine.graphs import find, subgraphs
from dscompile.passes.engine.normalise import refresh_nodes

aten, dsv4 = torch.ops.aten, torch.ops.dsv4
_Two = tuple[Tensor, Tensor]
_Score = Callable[[Tensor], Tensor]


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return F.softplus(logits).sqrt()


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


#: The operation's name of a score function, and how it is written.
SCORES: dict[str, _Score] = {"sqrtsoftplus": _sqrtsoftplus, "sigmoid": torch.sigmoid, "softmax": _softmax}


@dataclass(frozen=True)
class _Weights:
    """What becomes of the chosen scores: `last` holds the weights, `nodes` are those on the way to it."""

    last: Node
    nodes: tuple[Node, ...]
    normalize: bool
    norm_eps: float
    scale: float


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _normaliser(scores: Node) -> tuple[tuple[Node, ...], float] | None:
    """The division of `scores` by their sum plus a number: its nodes, the division last, and the number."""
    users = list(scores.users)
    sums = [u for u in users if u.target is aten.sum.dim_IntList and not u.kwargs]
    divisions = [u for u in users if u.target is aten.div.Tensor and u.args[0] is scores]
    if len(users) != 2 or len(sums) != 1 or len(divisions) != 1:
        return None
    total, division = sums[0], divisions[0]
    whole = list(total.args[1]) == [scores.meta["val"].dim() - 1] and total.args[2] is True
    if not whole or len(total.users) != 1:
        return None
    by = division.args[1]
    if by is total:
        return (total, division), 0.0
    shifted = isinstance(by, Node) and by.target is aten.add.Tensor and by.args[0] is total and not by.kwargs
    if not shifted or not _number(by.args[1]) or by.args[1] < 0 or len(by.users) != 1:
        return None
    return (total, by, division), float(by.args[1])


def _scaled(weights: Node) -> tuple[tuple[Node, ...], float]:
    """The product with a number that is all that happens to `weights`, if there is one."""
    users = list(weights.users)
    if len(users) == 1 and users[0].target is aten.mul.Tensor and _number(users[0].args[1]):
        return (users[0],), float(users[0].args[1])
    return (), 1.0


def _weights(match: Match) -> _Weights:
    scores = match.outputs[0]
    assert scores is not None
    if "norm_eps" in match.scalars:  # the division was traced
        normal: tuple[Node, ...] = ()
        normalize, eps = True, float(match.scalars["norm_eps"])
    else:
        found = _normaliser(scores)
        normal, eps = found or ((), 0.0)
        normalize = found is not None
    product, scale = _scaled((scores, *normal)[-1])
    nodes = (*normal, *product)
    return _Weights((scores, *nodes)[-1], nodes, normalize, eps, scale)


def _replace(gm: GraphModule, match: Match, score_fn: str, fp32: bool) -> Reject | None:
    scores, old_indices = (*match.outputs, None)[:2]
    assert scores is not None
    k = scores.meta["val"].shape[-1]
    if not isinstance(k, int):
        return Reject(f"the number of chosen experts is {k}, it must not depend on an input", scores)
    forced = "indices" in match.inputs
    end = _weights(match)
    if end.norm_eps < 0:
        return Reject(f"{end.norm_eps} is added to the sum of the weights, it must not be negative", scores)
    # All inputs stand in front of the choice, all that reads a result behind it.
    before = scores if forced else (old_indices or scores).args[0]
    assert isinstance(before, Node)
    if why := _written(gm, match, end.last):
        return why

    def route(x: Tensor, weight: Tensor, bias: Tensor | None = None, indices: Tensor | None = None) -> _Two:
        lead = x.shape[:-1]
        if x.dim() > 2:
            x, indices = x.reshape(-1, x.shape[-1]), None if indices is None else indices.reshape(-1, k)
        weights, chosen = dsv4.router(
            x, weight, bias, indices, k, score_fn, end.normalize, end.norm_eps, end.scale, fp32
        )  # fmt: skip
        return (weights, chosen) if len(lead) == 1 else (weights.reshape(*lead, k), chosen.reshape(*lead, k))

    new = splice(gm, before, route, scores, **match.inputs)
    users: set[Node] = set()
    for old, result in zip((end.last, None if forced else old_indices), new, strict=True):
        if old is not None:
            users |= set(old.users)
            old.replace_all_uses_with(result)
    for node in new[0].graph.find_nodes(op="call_function", target=dsv4.router.default):
        node.meta.setdefault("dsv4_pattern", match.pattern.name)
    for node in reversed(end.nodes):
        gm.graph.erase_node(node)
    refresh_nodes(gm.graph, users, fake_mode(gm))
    return None


def _written(gm: GraphModule, match: Match, last: Node) -> Reject | None:
    """What is matched moves to one place; nothing that it reads may be written on the way."""
    writes = Writes(gm.graph)
    for node in match.nodes:
        if (write := writes.inside(node, node, last)) is not None:
            return Reject(f"%{write.name} writes to what %{node.name} reads", node)
    return None


_IN_FP32: dict[str, tuple[Any, ...]] = {"b": (torch.float32,)}
_NARROW: dict[str, tuple[Any, ...]] = {"act": (torch.bfloat16, torch.float16), "b": (torch.float32, "act")}


@dataclass(frozen=True)
class _Spelling:
    """One score function; in float32, or in the dtype of the activations."""

    score_fn: str
    fp32: bool

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        return SCORES[self.score_fn](F.linear(x.float() if self.fp32 else x, weight))

    def biased(self, x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> _Two:
        scores = self.scores(x, weight)
        indices = torch.topk(scores + bias, top_k, -1).indices
        return scores.gather(-1, indices), indices

    def unbiased(self, x: Tensor, weight: Tensor, top_k: int) -> _Two:
        scores = self.scores(x, weight)
        indices = torch.topk(scores, top_k, -1).indices
        return scores.gather(-1, indices), indices

    def values(self, x: Tensor, weight: Tensor, top_k: int) -> _Two:
        weights, indices = torch.topk(self.scores(x, weight), top_k, -1)
        return weights, indices

    def forced(self, x: Tensor, weight: Tensor, indices: Tensor, norm_eps: float) -> Tensor:
        """Only what is normalised is a router's: scores at given places alone could be anything."""
        weights = self.scores(x, weight).gather(-1, indices)
        return weights / (weights.sum(-1, keepdim=True) + norm_eps)

    def pattern(
        self, name: str, search: Callable[..., Any], inputs: dict[str, str], key: Any = aten.gather.default,
        share: float = 0.75, **scalars: Any,
    ) -> Pattern:  # fmt: skip
        precision = "fp32" if self.fp32 else "narrow"
        dtypes = _IN_FP32 if self.fp32 else _NARROW
        return Pattern(
            name=f"router.{self.score_fn}.{name}.{precision}", family="router", dialect="common", search=search,
            replace=Structural(partial(_replace, score_fn=self.score_fn, fp32=self.fp32)),
            inputs={"x": "act[*N D]", "weight": "f32[E D]" if self.fp32 else "act[E D]", **inputs}, scalars=scalars,
            dtypes=dtypes, ranks=(1, 2), key=aten.softplus.default if self.score_fn == "sqrtsoftplus" else key,
            share=share,
        )  # fmt: skip

    def patterns(self) -> tuple[Pattern, ...]:
        """In float32 both precisions are one: then "fp32" matches."""
        return (
            self.pattern("biased", self.biased, {"bias": "b[E]"}, share=0.6, top_k=113),
            self.pattern("unbiased", self.unbiased, {}, top_k=113),
            self.pattern("values", self.values, {}, aten.topk.default, top_k=113),
            self.pattern("forced", self.forced, {"indices": "i64[*N k]"}, norm_eps=1.357e-7),
        )


PATTERNS = tuple(
    pattern
    for score_fn, fp32 in itertools.product(SCORES, (False, True))
    for pattern in _Spelling(score_fn, fp32).patterns()
)


@dataclass(frozen=True)
class OrderedChoices:
    """`topk(sorted=False)` leaves the order of what it chooses open: the sorted one is one of them."""

    name: str = "choices"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        count = 0
        for sub in subgraphs(gm):
            for node in find(sub.gm.graph, aten.topk.default):
                if len(node.args) == 5 and node.args[4] is False:
                    node.update_arg(4, True)
                    count += 1
        return PassResult(self.name, notes=(f"{count} choices",), seconds=time.perf_counter() - start)


PASSES = (OrderedChoices(),)
