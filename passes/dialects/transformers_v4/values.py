"""What integer tensors of a graph hold, where that can be said: affine functions of their own indices.

`arange(T) + start`, unsqueezed, expanded, sliced, gathered by another such tensor: every element is
base + sum over d of steps[d] * index[d], with a base made of numbers, symbolic sizes and unknown scalars. That is
enough to prove what a mask built from positions means, and it never guesses: whatever is not understood has no value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from dscompile.passes.engine import Writes
from dscompile.passes.engine.fxutil import bound_args, same_size

aten = torch.ops.aten
_ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Affine:
    """One integer tensor: `base + sum of steps[d] * index[d]`; the step of an axis of size 1 is 0."""

    base: sympy.Expr
    steps: tuple[sympy.Expr, ...]

    @property
    def uniform(self) -> bool:
        """Whether all elements are equal."""
        return not any(self.steps)

    def __sub__(self, other: Affine) -> Affine:
        a, b = _aligned(self, other)
        return Affine(sympy.expand(a.base - b.base), tuple(x - y for x, y in zip(a.steps, b.steps, strict=True)))

    def __add__(self, other: Affine) -> Affine:
        a, b = _aligned(self, other)
        return Affine(sympy.expand(a.base + b.base), tuple(x + y for x, y in zip(a.steps, b.steps, strict=True)))


def _aligned(a: Affine, b: Affine) -> tuple[Affine, Affine]:
    """Both with as many axes, new ones in front."""
    rank = max(len(a.steps), len(b.steps))
    first, second = (replace(x, steps=(_ZERO,) * (rank - len(x.steps)) + x.steps) for x in (a, b))
    return first, second


#: An integer tensor, or a boolean one whose elements are all equal; None: not known.
Value = Affine | bool | None


class Values:
    """Values of one graph's integer and boolean nodes, worked out on demand."""

    def __init__(self, graph: Graph) -> None:
        self._writes = Writes(graph)
        self._known: dict[Node, Value] = {}

    def of(self, node: Any) -> Value:
        """The value of a node, None if it is not known."""
        if not isinstance(node, Node):
            return None
        if node not in self._known:
            self._known[node] = None  # a graph has no cycles; this only bounds the recursion
            self._known[node] = self._work_out(node)
        return self._known[node]

    def affine(self, node: Any) -> Affine | None:
        """The value of an integer node or a number."""
        if isinstance(node, int) and not isinstance(node, bool):
            return Affine(sympy.Integer(node), ())
        value = node.meta.get("val") if isinstance(node, Node) else node
        if isinstance(value, torch.SymInt):
            return Affine(_expression(value), ())
        found = self.of(node)
        return found if isinstance(found, Affine) else None

    def _work_out(self, node: Node) -> Value:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point or value.dtype.is_complex:
            return None
        # After a write, memory that was read before holds something else: what is read then is a value of its own.
        stale = any(count for _, count in self._writes.epoch(node))
        rule = _RULES.get(node.target) if node.op == "call_function" and not stale else None
        found = rule(self, node, bound_args(node)) if rule is not None else None
        if found is None and value.dtype != torch.bool and all(same_size(s, 1) for s in value.shape):
            return Affine(sympy.Symbol(node.name, integer=True), (_ZERO,) * value.dim())
        if isinstance(found, Affine):
            steps = (_ZERO if same_size(s, 1) else step for s, step in zip(value.shape, found.steps, strict=True))
            found = Affine(found.base, tuple(steps))
        return found


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


Rule = Callable[[Values, Node, dict[str, Any]], Value]
_RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, fn))
        return fn

    return register


@_rule(aten.arange.start_step)
def _arange(values: Values, node: Node, a: dict[str, Any]) -> Value:
    start, step = values.affine(a["start"]), values.affine(a["step"])
    if start is None or step is None or start.steps or step.steps:
        return None
    return Affine(start.base, (step.base,))


@_rule(aten.full.default)
def _full(values: Values, node: Node, a: dict[str, Any]) -> Value:
    if isinstance(a["fill_value"], bool):
        return a["fill_value"]
    number = values.affine(a["fill_value"])
    return None if number is None else Affine(number.base, (_ZERO,) * node.meta["val"].dim())


@_rule(aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default)
def _copy(values: Values, node: Node, a: dict[str, Any]) -> Value:
    source = a["self"]
    want, have = node.meta["val"].dtype, source.meta["val"].dtype
    return values.of(source) if want == have or want == torch.int64 and have == torch.int32 else None


@_rule(aten.reshape.default)
def _reshape(values: Values, node: Node, a: dict[str, Any]) -> Value:
    found = values.of(a["self"])
    if not isinstance(found, Affine):
        return found
    have, want = (list(n.meta["val"].shape) for n in (a["self"], node))
    if found.uniform:
        return Affine(found.base, (_ZERO,) * len(want))
    moving = [(s, step) for s, step in zip(have, found.steps, strict=True) if not same_size(s, 1)]
    places = [d for d, s in enumerate(want) if not same_size(s, 1)]
    if len(places) != len(moving) or not all(same_size(want[d], s) for d, (s, _) in zip(places, moving, strict=True)):
        return None
    steps = [_ZERO] * len(want)
    for d, (_, step) in zip(places, moving, strict=True):
        steps[d] = step
    return Affine(found.base, tuple(steps))


@_rule(aten.permute.default)
def _permute(values: Values, node: Node, a: dict[str, Any]) -> Value:
    found = values.of(a["self"])
    return Affine(found.base, tuple(found.steps[d] for d in a["dims"])) if isinstance(found, Affine) else found


@_rule(aten.expand.default)
def _expand(values: Values, node: Node, a: dict[str, Any]) -> Value:
    found = values.of(a["self"])
    if not isinstance(found, Affine):
        return found
    new = node.meta["val"].dim() - len(found.steps)
    return Affine(found.base, (_ZERO,) * new + found.steps)


@_rule(aten.slice.Tensor)
def _slice(values: Values, node: Node, a: dict[str, Any]) -> Value:
    found, start = values.of(a["self"]), values.affine(a["start"] or 0)
    if not isinstance(found, Affine):
        return found
    if start is None or start.steps or not start.base.is_nonnegative or not isinstance(a["step"], int):
        return None
    d = a["dim"]
    steps = (*found.steps[:d], found.steps[d] * a["step"], *found.steps[d + 1 :])
    return Affine(sympy.expand(found.base + found.steps[d] * start.base), steps)


@_rule(aten.select.int)
def _select(values: Values, node: Node, a: dict[str, Any]) -> Value:
    found, index = values.of(a["self"]), values.affine(a["index"])
    if not isinstance(found, Affine):
        return found
    if index is None or index.steps or not index.base.is_nonnegative:
        return None
    d = a["dim"]
    base = sympy.expand(found.base + found.steps[d] * index.base)
    return Affine(base, found.steps[:d] + found.steps[d + 1 :])


@_rule(aten.add.Tensor, aten.sub.Tensor)
def _add(values: Values, node: Node, a: dict[str, Any]) -> Value:
    first, second = values.affine(a["self"]), values.affine(a["other"])
    if first is None or second is None or a["alpha"] != 1:
        return None
    return first + second if node.target is aten.add.Tensor else first - second


@_rule(aten.mul.Tensor)
def _multiply(values: Values, node: Node, a: dict[str, Any]) -> Value:
    first, second = values.affine(a["self"]), values.affine(a["other"])
    if first is None or second is None:
        return None
    first, second = _aligned(first, second)
    if first.uniform:
        first, second = second, first
    if not second.uniform:
        return None
    return Affine(sympy.expand(first.base * second.base), tuple(s * second.base for s in first.steps))


@_rule(aten.clamp.default)
def _clamp(values: Values, node: Node, a: dict[str, Any]) -> Value:
    found = values.of(a["self"])
    if not isinstance(found, Affine) or not found.uniform:
        return None
    base = found.base
    for bound, pick in ((a["min"], sympy.Max), (a["max"], sympy.Min)):
        if bound is not None:
            limit = values.affine(bound)
            if limit is None:
                return None
            base = pick(base, limit.base)
    return Affine(base, found.steps)


@_rule(aten.cat.default)
def _cat(values: Values, node: Node, a: dict[str, Any]) -> Value:
    """Pieces that go on where the one before stopped."""
    d = a["dim"]
    pieces = [values.of(p) for p in a["tensors"]]
    if not pieces or not all(isinstance(p, Affine) for p in pieces):
        return None
    sizes = [p.meta["val"].shape[d] for p in a["tensors"]]
    known: list[Affine] = [p for p in pieces if isinstance(p, Affine)]
    long = [p.steps[d] for p, size in zip(known, sizes, strict=True) if not same_size(size, 1)]
    step = long[0] if long else (known[1].base - known[0].base if len(known) > 1 else _ZERO)
    offset: sympy.Expr = _ZERO
    for piece, size in zip(known, sizes, strict=True):
        begins = sympy.expand(piece.base - known[0].base - step * offset)
        goes_on = same_size(size, 1) or piece.steps[d] == step
        others = all(x == y for i, (x, y) in enumerate(zip(piece.steps, known[0].steps, strict=True)) if i != d)
        if begins != 0 or not goes_on or not others:
            return None
        offset = offset + _expression(size)
    return Affine(known[0].base, (*known[0].steps[:d], step, *known[0].steps[d + 1 :]))


@_rule(aten.index.Tensor)
def _index(values: Values, node: Node, a: dict[str, Any]) -> Value:
    """A gather over all axes by tensors that are affine themselves and not negative."""
    found = values.of(a["self"])
    if not isinstance(found, Affine):
        return found
    indices = [values.affine(i) for i in a["indices"]]
    if len(indices) != len(found.steps):
        return None
    total = Affine(found.base, (_ZERO,) * node.meta["val"].dim())
    for index, step in zip(indices, found.steps, strict=True):
        if step == 0:
            continue
        if index is None or not all(x.is_nonnegative for x in (index.base, *index.steps)):
            return None
        total = total + Affine(sympy.expand(index.base * step), tuple(s * step for s in index.steps))
    return total


@_rule(aten.cumsum.default)
def _cumsum(values: Values, node: Node, a: dict[str, Any]) -> Value:
    found = values.of(a["self"])
    zero = found is False or (isinstance(found, Affine) and found.uniform and found.base == 0)
    return Affine(_ZERO, (_ZERO,) * node.meta["val"].dim()) if zero else None


@_rule(aten.bitwise_and.Tensor)
def _and(values: Values, node: Node, a: dict[str, Any]) -> Value:
    parts = [values.of(a["self"]), values.of(a["other"])]
    if any(p is False for p in parts):
        return False
    return True if all(p is True for p in parts) else None


_TESTS: dict[str, Callable[[sympy.Expr], Any]] = {
    "eq": lambda d: sympy.Eq(d, 0), "ne": lambda d: sympy.Ne(d, 0), "gt": lambda d: d > 0, "ge": lambda d: d >= 0,
    "lt": lambda d: d < 0, "le": lambda d: d <= 0,
}  # fmt: skip


@_rule(*(getattr(getattr(aten, name), kind) for name in _TESTS for kind in ("Tensor", "Scalar")))
def _compare(values: Values, node: Node, a: dict[str, Any]) -> Value:
    first, second = values.affine(a["self"]), values.affine(a["other"])
    if first is None or second is None:
        return None
    difference = first - second
    verdict = _TESTS[node.target._schema.name.split("::")[1]](difference.base)  # type: ignore[union-attr]
    return bool(verdict) if difference.uniform and verdict in (sympy.true, sympy.false) else None
