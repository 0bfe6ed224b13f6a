"""Passes: one step over a graph module, with a uniform result."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.fx import GraphModule, Node

from . import diagnose, fxutil
from .graphs import Subgraph, subgraphs
from .matcher import Matcher, climb, path_up
from .normalise import normalise_all
from .optable import CAST, LAYOUT
from .pattern import Pattern, Variant
from .records import Match, MatchRecord, NearMiss, PassResult
from .rewrite import Rewriter


@dataclass
class PassContext:
    """What passes share during one run of a pipeline; ``data`` is free for passes to hand results on."""

    options: Any = None
    data: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Pass(Protocol):
    """A frozen dataclass with a ``name``, its options as fields, and ``run``."""

    @property
    def name(self) -> str: ...

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult: ...


@dataclass(frozen=True)
class Normalise:
    """Canonical form for the module and all its subgraphs."""

    name: str = "normalise"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        count = normalise_all(gm)
        return PassResult(self.name, seconds=time.perf_counter() - start, notes=(f"{count} rewrites",))


@dataclass(frozen=True)
class PatternPass:
    """Replaces every match of ``patterns``, in their order (larger ones first), until nothing more matches."""

    name: str
    patterns: tuple[Pattern, ...]
    rounds: int = 10
    near_misses: bool = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        matches: list[MatchRecord] = []
        misses: list[NearMiss] = []
        patterns = tuple(p for p in self.patterns if p.available)
        for sub in subgraphs(gm):
            rewriter, first = Rewriter(sub.gm), len(matches)
            refused: dict[tuple[str, Node], tuple[NearMiss, Match]] = {}
            seen: dict[Pattern, int] = {}
            for pattern in patterns * self.rounds:
                if seen.get(pattern) != len(matches):  # something else has changed the graph since its last turn
                    matches += self._all_matches(pattern, sub, rewriter, refused)
                    seen[pattern] = len(matches)
            if len(matches) > first:
                rewriter.finish()
            if self.near_misses:
                misses += diagnose.near_misses(patterns, sub, rewriter, refused.values())
        return PassResult(self.name, tuple(matches), tuple(misses), time.perf_counter() - start)

    def _all_matches(self, pattern: Pattern, sub: Subgraph, rewriter: Rewriter,
                     refused: dict[tuple[str, Node], tuple[NearMiss, Match]]) -> Iterator[MatchRecord]:  # fmt: skip
        for variant in plausible_variants(pattern, sub.gm, rewriter.dtypes):
            matcher = Matcher(variant)
            for output, anchor in candidates(variant, sub.gm):
                if anchor._erased:
                    continue
                found = matcher.match(anchor, output, partial(rewriter.objection, variant))
                if found is None:
                    continue
                match = rewriter.build(variant, matcher, found)
                record = record_of(match, sub)
                why = rewriter.apply(variant, match)
                if why is None:
                    yield record
                else:
                    rewriter.discard(match)
                    refused[pattern.name, anchor] = diagnose.refusal(match, why, sub), match


def record_of(match: Match, sub: Subgraph) -> MatchRecord:
    origin = next((n for n in (match.anchor, *reversed(match.nodes)) if "stack_trace" in n.meta), match.anchor)
    return MatchRecord(
        match.pattern.family, match.pattern.name, fxutil.layer_name(origin), fxutil.source_line(origin), sub.calls,
        sub.path, tuple(n.name for n in match.nodes),
    )  # fmt: skip


def plausible_variants(pattern: Pattern, gm: GraphModule, dtypes: Collection[torch.dtype]) -> Iterator[Variant]:
    """Variants whose dtypes occur in the graph and whose operators all do.

    Tracing is what costs, so little of it is done for a pattern that cannot match: none if its declared key is not in
    the graph, one variant if that has operators which the graph lacks (casts aside, variants have the same ones).
    """
    if pattern.key is not None and not present(gm, pattern.key):
        return
    for chosen, rank in pattern.variants():
        if not all(d in dtypes for d in chosen.values()):
            continue
        variant = pattern.variant(chosen, rank)
        missing = {n.target for n in required_nodes(variant) if not present(gm, n.target)}
        if not missing:
            yield variant
        elif missing != {CAST}:
            return


def present(gm: GraphModule, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target, sort=False))


def required_nodes(variant: Variant) -> set[Node]:
    """Operators (layout aside) that every match must contain: the producers of the required outputs."""
    todo = [variant.outputs[i] for i in variant.pattern.required]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node not in seen and node.op == "call_function":
            seen.add(node)
            todo += node.all_input_nodes
    return {n for n in seen if n.target not in LAYOUT and n.target is not torch.ops.aten.slice.Tensor}


def candidates(variant: Variant, gm: GraphModule) -> Iterator[tuple[int, Node]]:
    """(output number, graph node) pairs worth trying: reached from the rarest operator of the pattern."""
    output = variant.pattern.required[0]
    out = variant.outputs[output]
    inside = [n for n in required_nodes(variant) if path_up(n, out) is not None]
    if not inside:
        for node in gm.graph.find_nodes(op="call_function", target=out.target):
            yield output, node
        return
    seed = min(sorted(inside), key=lambda n: present(gm, n.target))
    path = path_up(seed, out) or []
    tried: set[Node] = set()
    for node in gm.graph.find_nodes(op="call_function", target=seed.target):
        if node._erased:
            continue
        for anchor in climb(seed, node, path):
            if anchor not in tried:
                tried.add(anchor)
                yield output, anchor
