"""Why did it not match: near misses for the report, and a printed comparison for whoever writes a pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from . import fxutil
from .fxutil import describe
from .graphs import Subgraph
from .matcher import Matcher, climb, path_up
from .optable import COMMUTATIVE, COPIES, LAYOUT, PERMUTE, RESHAPE, SKIPPABLE, op_name
from .pattern import Pattern, Variant
from .records import Match, NearMiss, Reject
from .rewrite import Rewriter


@dataclass
class Comparison:
    """A pattern laid on a graph node without giving up at the first difference."""

    lines: list[str] = field(default_factory=list)
    seen: dict[Node, Any] = field(default_factory=dict)
    agreed: set[Node] = field(default_factory=set)
    first: tuple[Node, Any, str] | None = None

    def walk(self, v: Variant, p: Node, t: Any, depth: int = 0) -> None:
        """Follow both downwards; ``lines`` gets one line per pattern node, ``first`` the first disagreement."""
        pad = "  " * depth
        if p in self.seen:
            self.lines.append(f"{pad}= {v.inputs.get(p, p.name)} (above)")
            return
        self.seen[p] = t
        if p in v.inputs:
            self.lines.append(f"{pad}. {v.inputs[p]} <- {describe(t)}")
            return
        while isinstance(t, Node) and t.target in COPIES and t.args and p.target not in COPIES:
            t = t.args[0]
        if isinstance(t, Node) and t.target == p.target:
            self.agreed.add(p)
            self.lines.append(f"{pad}+ {op_name(p.target)} <- {describe(t)}")
            for a, b in self._pairs(v, p, t):
                self.walk(v, a, b, depth + 1)
        elif p.target in SKIPPABLE and isinstance(p.args[0], Node):
            self.lines.append(f"{pad}~ {op_name(p.target)} (absent here)")
            self.walk(v, p.args[0], t, depth + 1)
        else:
            self.first = self.first or (p, t, f"expected {op_name(p.target)}, found {describe(t)}")
            where = f"   {fxutil.source_line(t)}" if isinstance(t, Node) else ""
            self.lines.append(f"{pad}! expected {op_name(p.target)}, found {describe(t)}{where}")
            if isinstance(t, Node) and t.op == "call_function" and len(_flat(t)) == len(_flat(p)):
                for a, b in self._pairs(v, p, t):  # one operator differs: what is below may still agree
                    self.walk(v, a, b, depth + 1)

    def _pairs(self, v: Variant, p: Node, t: Node) -> list[tuple[Node, Any]]:
        if p.target in (RESHAPE, PERMUTE):
            source = t.args[0]
            while p.args[0] not in v.inputs and isinstance(source, Node) and source.target in {p.target, *COPIES}:
                source = source.args[0]
            return [(p.args[0], source)]
        pa, ta = _flat(p), _flat(t)
        if p.target in COMMUTATIVE and len(pa) >= 2 and len(ta) >= 2:
            straight = _likeness(v, pa[0], ta[0]) + _likeness(v, pa[1], ta[1])
            if _likeness(v, pa[0], ta[1]) + _likeness(v, pa[1], ta[0]) > straight:
                ta[0], ta[1] = ta[1], ta[0]
        return [(a, b) for a, b in zip(pa, ta) if isinstance(a, Node)]


def _flat(node: Node) -> list[Any]:
    out: list[Any] = []
    for arg in node.args:
        out += list(arg) if isinstance(arg, (list, tuple)) else [arg]
    return out


def _likeness(v: Variant, p: Any, t: Any, depth: int = 4) -> int:
    """Roughly how many operators agree below a pair."""
    if not isinstance(p, Node) or not isinstance(t, Node) or p in v.inputs or depth == 0:
        return 0
    while t.target in COPIES and t.args and isinstance(t.args[0], Node):
        t = t.args[0]
    if p.target != t.target:
        return _likeness(v, p.args[0], t, depth - 1) if p.target in SKIPPABLE else 0
    return 2 + sum(max((_likeness(v, a, b, depth - 1) for b in _flat(t)), default=0) for a in _flat(p))


@dataclass(frozen=True)
class Attempt:
    """The best alignment of a variant with the graph around one node."""

    variant: Variant
    share: float
    reason: str
    node: Node
    comparison: Comparison


def align(variant: Variant, at: Node, rewriter: Rewriter | None = None) -> Attempt | None:
    """Lay the pattern over the graph so that its key (or any equal operator) falls on ``at``."""
    out = variant.outputs[variant.pattern.required[0]]
    best: Attempt | None = None
    for p in variant.graph.find_nodes(op="call_function", target=at.target):
        path = path_up(p, out)
        if path is None:
            continue
        steps = [n for n in path if n.target not in LAYOUT]
        tops, reached = [at], 0
        for i in range(len(steps)):
            further = climb(p, at, steps[: i + 1])
            if not further:
                break
            tops, reached = further, i + 1
        whole = reached == len(steps)
        if whole and path and path[-1].target in LAYOUT:
            tops = climb(p, at, path) or tops
        top_p = out if whole else (steps[reached - 1] if reached else p)
        for top in tops[:4]:
            attempt = _attempt(variant, top_p, top, steps[reached] if not whole else None, rewriter)
            if best is None or attempt.share > best.share:
                best = attempt
    return best


def _attempt(v: Variant, p: Node, t: Node, missing: Node | None, rewriter: Rewriter | None) -> Attempt:
    c = Comparison()
    c.walk(v, p, t)
    share = len({n for n in c.agreed if n in v.core}) / len(v.core)
    if c.first is not None:
        node = c.first[1] if isinstance(c.first[1], Node) else t
        return Attempt(v, share, c.first[2], node, c)
    if missing is not None:
        users = (
            ", ".join(sorted({op_name(u.target) if u.op == "call_function" else u.op for u in t.users})) or "nothing"
        )
        return Attempt(v, share, f"expected {op_name(missing.target)} after {describe(t)}, found {users}", t, c)
    matcher = Matcher(v)
    found = matcher.match(t, v.pattern.required[0], (lambda s: rewriter.objection(v, s)) if rewriter else None)
    reason = "matches" if found is not None else matcher.failure.reason
    return Attempt(v, share, reason, matcher.failure.node or t, c)


def best_attempt(pattern: Pattern, at: Node, rewriter: Rewriter | None = None, dtypes: frozenset[Any] = frozenset()
                 ) -> Attempt | None:  # fmt: skip
    """The alignment with the largest share over the variants that have a like node; over all others if none has."""
    like: list[Variant] = []
    unlike: list[Variant] = []
    for chosen, rank in pattern.variants():
        if not dtypes or dtypes.issuperset(chosen.values()):
            variant = pattern.variant(chosen, rank)
            (like if _has_like(variant, at) else unlike).append(variant)
    attempts = [a for v in like or unlike if (a := align(v, at, rewriter)) is not None]
    return max(attempts, key=lambda a: (a.reason == "matches", a.share), default=None)


def _has_like(variant: Variant, at: Node) -> bool:
    want = at.meta.get("val")
    for node in variant.graph.find_nodes(op="call_function", target=at.target, sort=False):
        have = node.meta.get("val")
        if isinstance(have, torch.Tensor) and isinstance(want, torch.Tensor):
            if have.dtype == want.dtype and have.dim() == want.dim():
                return True
    return False


def near_misses(
    patterns: Iterable[Pattern], sub: Subgraph, rewriter: Rewriter, refused: Iterable[tuple[NearMiss, Match]]
) -> list[NearMiss]:
    """What is left in a graph that looks like one of the patterns: per family and place the closest attempt.

    ``refused`` are complete matches that a guard or check turned down.
    """
    dtypes = frozenset(rewriter.dtypes)
    places = [(miss, {n.name for n in match.nodes}) for miss, match in refused if not match.anchor._erased]
    for pattern in patterns:
        for node in _key_nodes(pattern, sub, dtypes):
            attempt = best_attempt(pattern, node, rewriter, dtypes)
            if attempt is None or attempt.share < pattern.share or attempt.reason == "matches":
                continue
            miss = _miss(pattern, sub, attempt.node, node, attempt.reason, attempt.share)
            seen = attempt.comparison.seen.items()
            places.append((miss, {node.name, *(t.name for p, t in seen if p in attempt.comparison.agreed)}))
    out: list[NearMiss] = []
    taken: dict[str, set[str]] = {}
    for miss, nodes in sorted(places, key=lambda f: -f[0].share):
        if miss.node not in taken.setdefault(miss.family, set()):
            out.append(miss)
            taken[miss.family] |= nodes
    return out


def _key_nodes(pattern: Pattern, sub: Subgraph, dtypes: frozenset[Any]) -> Iterator[Node]:
    """Nodes where a near miss is possible: enough of the pattern's operators occur in the graph at all."""
    chosen = next((v for v in pattern.variants() if dtypes.issuperset(v[0].values())), None)
    if chosen is None or (
        pattern.key is not None and not sub.gm.graph.find_nodes(op="call_function", target=pattern.key)
    ):
        return
    variant = pattern.variant(*chosen)
    there = [n for n in variant.core if sub.gm.graph.find_nodes(op="call_function", target=n.target, sort=False)]
    if variant.key is not None and len(there) >= pattern.share * len(variant.core):
        yield from sub.gm.graph.find_nodes(op="call_function", target=variant.key)


def refusal(match: Match, why: Reject, sub: Subgraph) -> NearMiss:
    """The near miss of a complete match that a guard or a check refused."""
    node = why.node if why.node is not None and not why.node._erased else match.anchor
    return _miss(match.pattern, sub, node, match.anchor, why.reason, 1.0)


def _miss(pattern: Pattern, sub: Subgraph, node: Node, origin: Node, reason: str, share: float) -> NearMiss:
    return NearMiss(
        pattern.family, pattern.name, fxutil.layer_name(origin) or fxutil.layer_name(node), origin.name,
        fxutil.source_line(node) or fxutil.source_line(origin), reason, sub.path, round(share, 2),
    )  # fmt: skip


def explain_mismatch(pattern: Pattern, node: Node) -> str:
    """The pattern's tree next to the graph around ``node`` (any node that should be inside a match), as text.

    ``+`` agrees, ``.`` an input, ``~`` a layout step that the graph does not need, ``!`` a difference. The last line is
    the verdict of the real matcher. The graph must be in canonical form (``normalise(gm)``).
    """
    attempt = best_attempt(pattern, node, Rewriter(node.graph.owning_module))
    if attempt is None:
        return f"{pattern.name}: no {op_name(node.target)} in the pattern; choose another node than {describe(node)}"
    dtypes = ", ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in attempt.variant.dtypes.items())
    head = f"{pattern.name} ({dtypes or 'fixed dtypes'}, batch dims {attempt.variant.rank}), {attempt.share:.0%} agrees"
    where = fxutil.source_line(attempt.node)
    tail = attempt.reason if attempt.reason == "matches" else f"{attempt.reason}   at {where}"
    return "\n".join([head, *attempt.comparison.lines, f"=> {tail}"])
