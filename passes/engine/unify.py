"""When a pattern node and a graph node agree, and what follows for the nodes below them.

The two must agree on operator, dtype and shape (named sizes bind, the rest is literal) and on arguments (sentinels and
sizes bind). They may differ in the order of commutative operands, in how a chain of reshapes or permutes is cut, in
copies, and in layout operators that do nothing for the sizes at hand (a pattern traced with many heads meets a graph
with one).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from . import fxutil
from .fxutil import describe, same_shape, same_size
from .optable import COMMUTATIVE, COPIES, EXPAND, FULL, PERMUTE, REDUCTIONS, RESHAPE, SKIPPABLE, SLICE, op_name
from .pattern import Variant

_IGNORED_KWARGS = frozenset({"device", "pin_memory", "layout", "memory_format", "non_blocking"})
Goal = tuple[Any, Any]
Alternative = Callable[[], "list[Goal] | None"]


@dataclass(frozen=True)
class Virtual:
    """A pattern input that is not in the graph as such: ``op(base)`` undoes the layout step the pattern begins with."""

    op: Any
    base: Node
    arg: Any  # the permutation, or the pattern's input shape (sizes of the pattern)


@dataclass
class Failure:
    """The constraint that stopped the attempt which got furthest."""

    reason: str = "no candidate"
    pattern_node: Node | None = None
    node: Node | None = None
    depth: int = -1


@dataclass
class Solution:
    """Raw result of a match: pattern node -> graph node, bound sizes and scalars."""

    map: dict[Node, Any]
    dims: dict[int, Any]
    scalars: dict[str, Any]
    through: list[Node]
    outputs: list[Node | None] = field(default_factory=list)


class Unifier:
    """Assignments made so far (undone through ``trail``) and the rules for one pair of nodes.

    ``_alternatives`` yields functions; each tries one way to make a pair agree and returns the pairs that must agree
    next, or None after recording why not.
    """

    def __init__(self, variant: Variant) -> None:
        self.v = variant
        self.sentinels = {float(v): k for k, v in variant.pattern.scalars.items() if not isinstance(v, int)}
        self.reset()

    def reset(self) -> None:
        self.map: dict[Node, Any] = {}
        self.dims: dict[int, Any] = {}
        self.scalars: dict[str, Any] = {}
        self.through: list[Node] = []
        self.trail: list[tuple[Any, Any]] = []
        self.failure = Failure()

    def _set(self, table: dict, key: Any, value: Any) -> None:
        table[key] = value
        self.trail.append((table, key))

    def _undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            table, key = self.trail.pop()
            if isinstance(table, list):
                table.pop()
            else:
                del table[key]

    def _fail(self, reason: str, p: Node | None, t: Any) -> None:
        if len(self.map) > self.failure.depth:
            node = t if isinstance(t, Node) else None
            self.failure = Failure(reason, p, node, len(self.map))

    def _alternatives(self, p: Node, t: Any) -> Iterator[Alternative]:
        if p in self.map:
            if not self._same_node(self.map[p], t):
                what = f"input {self.v.inputs[p]}" if p in self.v.inputs else op_name(p.target)
                self._fail(f"{what} is %{getattr(self.map[p], 'name', '?')} elsewhere, here {describe(t)}", p, t)
            else:
                yield list
            return
        if p in self.v.inputs:
            yield lambda: self._bind_input(p, t)
            if isinstance(t, Node) and t.target in COPIES:
                yield lambda: self._step_over(p, [t])
            return
        if p.op == "get_attr" and getattr(t, "target", None) in COPIES:
            yield lambda: self._step_over(p, [t])
            return
        if p.op == "get_attr":
            yield lambda: self._constant(p, t)
            return
        if not isinstance(t, Node):
            self._fail(f"expected {op_name(p.target)}, found {describe(t)}", p, t)
            return
        tried = False
        if t.target == p.target and t.op == p.op:
            tried = True
            if p.target is RESHAPE or p.target is PERMUTE:
                for chain in self._chain(t, p.target):
                    yield lambda c=chain: self._rearranged(p, t, c)  # type: ignore[misc]
            elif p.target in COMMUTATIVE:
                yield lambda: self._same_op(p, t, False)
                yield lambda: self._same_op(p, t, True)
            else:
                yield lambda: self._same_op(p, t, False)
        elif t.target in COPIES and t.args:
            yield lambda: self._step_over(p, [t])
            return
        elif t.target is RESHAPE or t.target is PERMUTE:
            for chain in self._chain(t, t.target):
                yield lambda c=chain: self._unsaid(p, t, c)  # type: ignore[misc]
        if p.target in SKIPPABLE:
            yield lambda: self._nothing_here(p, t)
            source = p.args[0]
            if p.target in (RESHAPE, PERMUTE) and source in self.v.inputs and source not in self.map:
                yield lambda: self._absorb(p, t)
        if not tried:
            self._fail(f"expected {op_name(p.target)}, found {describe(t)}", p, t)

    def _same_node(self, a: Any, b: Any) -> bool:
        return a is b or (isinstance(a, Node) and isinstance(b, Node) and _uncopied(a) is _uncopied(b))

    def _take(self, p: Node, t: Node) -> bool:
        """Agree on dtype and shape of a pair and record it."""
        if not self._same_type(p, t.meta.get("val"), t):
            return False
        self._set(self.map, p, t)
        return True

    def _same_type(self, p: Node, have: Any, t: Any) -> bool:
        want = p.meta.get("val")
        if isinstance(want, (tuple, list)):
            return isinstance(have, (tuple, list)) and len(want) == len(have)
        if not isinstance(want, torch.Tensor):
            return True
        if not isinstance(have, torch.Tensor):
            self._fail(f"{self._what(p)}: expected a tensor, found {describe(t)}", p, t)
            return False
        if want.dtype != have.dtype:
            self._fail(f"{self._what(p)}: dtype {_dt(want)} expected, here {_dt(have)}", p, t)
            return False
        return self._bind_shape(want.shape, have.shape, p, t)

    def _bind_shape(self, want: Any, have: Any, p: Node, t: Any) -> bool:
        if len(want) != len(have):
            self._fail(f"{self._what(p)}: {len(want)} dims expected, here {len(have)}", p, t)
            return False
        return all(self._bind(int(w), h, p, t) for w, h in zip(want, have))

    def _bind(self, want: int, have: Any, p: Node, t: Any) -> bool:
        """A size of the pattern against a size of the graph."""
        if not self.v.is_size(want):
            if same_size(want, have):
                return True
            self._fail(f"{self._what(p)}: {want} expected, here {have}", p, t)
            return False
        if want in self.dims:
            if same_size(self.dims[want], have):
                return True
            self._fail(f"dim {self._size_name(want)} bound to {self.dims[want]}, here {have}", p, t)
            return False
        self._set(self.dims, want, have)
        return True

    def _size_name(self, value: int) -> str:
        return self.v.names.get(value, str(value))

    def _what(self, p: Node) -> str:
        return f"input {self.v.inputs[p]}" if p in self.v.inputs else op_name(p.target)

    def _bind_input(self, p: Node, t: Any) -> list[Goal] | None:
        if not isinstance(t, Node):
            self._fail(f"{self._what(p)}: expected a tensor, found {describe(t)}", p, t)
            return None
        return [] if self._take(p, t) else None

    def _step_over(self, p: Node, nodes: list[Node]) -> list[Goal]:
        """Graph nodes that change nothing belong to the match and are passed over."""
        for node in nodes:
            self.through.append(node)
            self.trail.append((self.through, None))
        return [(p, nodes[-1].args[0])]

    def _constant(self, p: Node, t: Any) -> list[Goal] | None:
        if isinstance(t, Node) and t.op == "get_attr":
            a, b = (getattr(n.graph.owning_module, str(n.target), None) for n in (p, t))
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype:
                if torch.equal(a.cpu(), b.cpu()):
                    self._set(self.map, p, t)
                    return []
        self._fail("another constant tensor", p, t)
        return None

    # -- layout -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _chain(t: Node, kind: Any) -> list[list[Node]]:
        """Ways to read a chain of equal layout operators as one: the nodes it consists of, short chains first.

        Permutes that undo each other do not interrupt a chain of reshapes.
        """
        out, nodes = [], [t]
        while True:
            out.append(list(nodes))
            source = nodes[-1].args[0]
            while isinstance(source, Node) and source.target in COPIES and source.args:
                nodes.append(source)
                source = source.args[0]
            if kind is RESHAPE and isinstance(source, Node) and (undone := _undone_permutes(source)):
                nodes += undone
                source = undone[-1].args[0]
            if not isinstance(source, Node) or source.target != kind:
                return out
            nodes.append(source)

    def _rearranged(self, p: Node, t: Node, chain: list[Node]) -> list[Goal] | None:
        """A reshape or permute of the pattern against a chain of them in the graph."""
        if p.target is PERMUTE and (order := _permutation(chain)) != list(p.args[1]):
            self._fail(f"permutation {list(p.args[1])} expected, here {order}", p, t)
            return None
        if not self._take(p, t):
            return None
        return self._step_over(p.args[0], chain)

    def _unsaid(self, p: Node, t: Node, chain: list[Node]) -> list[Goal] | None:
        """Layout steps of the graph that the pattern does not have: they undo each other, or bring back summed dims."""
        source = chain[-1].args[0]
        if t.target is PERMUTE:
            order = _permutation(chain)
            return self._step_over(p, chain) if order == sorted(order) else None
        if same_shape(t.meta["val"].shape, source.meta["val"].shape):
            return self._step_over(p, chain)
        if p.target in REDUCTIONS and source.target == p.target and p.args[1:] == (source.args[1], True):
            x = source.args[0].meta["val"].shape
            kept = [1 if d in source.args[1] else s for d, s in enumerate(x)]
            if not source.args[2] and p.kwargs == source.kwargs and same_shape(kept, t.meta["val"].shape):
                if self._take(p, t):
                    self._step_over(p, chain)
                    return self._step_over(p.args[0], [source])
        return None

    def _nothing_here(self, p: Node, t: Node) -> list[Goal] | None:
        """A layout operator of the pattern that is the identity for the sizes of the graph, so it is absent there."""
        have, source = t.meta.get("val"), p.args[0]
        if not isinstance(have, torch.Tensor) or not isinstance(source, Node):
            return None
        shape = tuple(have.shape)
        if p.target is PERMUTE:
            order = list(p.args[1])
            if len(order) != len(shape):
                return None
            moved = [order[i] for i, s in enumerate(shape) if not same_size(s, 1)]
            if moved != sorted(moved) or not same_shape_permuted(shape, order):
                return None
        if p.target is SLICE and (p.args[4] != 1 or not self._bind(p.args[2], 0, p, t)):
            return None
        quiet = self.failure
        ok = self._take(p, t) and self._bind_shape(source.meta["val"].shape, shape, p, t)
        if not ok:
            self.failure = quiet
            return None
        return [(source, t)]

    def _absorb(self, p: Node, t: Node) -> list[Goal] | None:
        """The pattern begins with a reshape or permute of an input that the graph has in the other layout only."""
        source = p.args[0]
        if not isinstance(t.meta.get("val"), torch.Tensor) or not self._same_type(p, t.meta["val"], t):
            return None
        shape = tuple(source.meta["val"].shape)
        if p.target is PERMUTE:
            inverse = sorted(range(len(p.args[1])), key=lambda d: p.args[1][d])
            if not self._bind_shape(shape, [t.meta["val"].shape[d] for d in inverse], p, t):
                return None
            self._set(self.map, source, Virtual(PERMUTE, t, inverse))
        else:
            self._set(self.map, source, Virtual(RESHAPE, t, shape))
        self._set(self.map, p, t)
        return []

    # -- arguments --------------------------------------------------------------------------------------------------

    def _same_op(self, p: Node, t: Node, swap: bool) -> list[Goal] | None:
        goals: list[Goal] = []
        pa, ta = _arguments(p), _arguments(t)
        if swap:
            ta[0], ta[1] = ta[1], ta[0]
        if not self._take(p, t):
            return None
        if len(pa) != len(ta):
            self._fail(f"{op_name(p.target)}: {len(pa)} arguments expected, here {len(ta)}", p, t)
            return None
        for a, b in zip(pa, ta):
            if not self._value(a, b, p, t, goals):
                return None
        for key in (p.kwargs.keys() | t.kwargs.keys()) - _IGNORED_KWARGS:
            if not self._value(p.kwargs.get(key), t.kwargs.get(key), p, t, goals):
                return None
        if any(isinstance(g[0], Node) and not self._plausible(*g) for g in goals):
            return None
        return goals

    def _plausible(self, p: Node, t: Any) -> bool:
        """A cheap look ahead, so that wrong orders of operands are dropped at once."""
        if p in self.v.inputs or p.op != "call_function" or p.target in SKIPPABLE:
            return True
        if isinstance(t, Node) and (t.target == p.target or t.target in COPIES or t.target in (RESHAPE, PERMUTE)):
            return True
        self._fail(f"expected {op_name(p.target)}, found {describe(t)}", p, t)
        return False

    def _value(self, a: Any, b: Any, p: Node, t: Node, goals: list[Goal]) -> bool:
        if isinstance(a, Node):
            goals.append((a, b))
            return True
        if isinstance(a, (list, tuple)):
            if not isinstance(b, (list, tuple)) or len(a) != len(b):
                self._fail(f"{op_name(p.target)}: {a} expected, here {b}", p, t)
                return False
            return all(self._value(x, y, p, t, goals) for x, y in zip(a, b))
        if type(a) is float and (name := self._sentinel(a)) is not None:
            return self._scalar(name, a, b, p, t)
        if type(a) is int:
            size = fxutil.size_value(b)
            if type(size) is not bool and isinstance(size, (int, torch.SymInt)):
                return self._bind(a, size, p, t)
        if isinstance(b, Node):
            self._fail(f"{op_name(p.target)}: constant {a} expected, here {describe(b)}", p, t)
            return False
        if a == b and isinstance(a, bool) == isinstance(b, bool) or _same_float(a, b):
            return True
        self._fail(f"{op_name(p.target)}: {a} expected, here {b}", p, t)
        return False

    def _sentinel(self, value: float) -> str | None:
        return self.sentinels.get(value) or self.sentinels.get(-value)

    def _scalar(self, name: str, a: float, b: Any, p: Node, t: Node) -> bool:
        if isinstance(b, bool) or not isinstance(b, (int, float)):
            self._fail(f"scalar {name}: number expected, here {describe(b)}", p, t)
            return False
        b = b if self.sentinels.get(a) == name else -b
        if name in self.scalars:
            if self.scalars[name] == b or _same_float(self.scalars[name], b):
                return True
            self._fail(f"scalar {name} bound to {self.scalars[name]}, here {b}", p, t)
            return False
        self._set(self.scalars, name, b)
        return True


def same_shape_permuted(shape: tuple, order: list[int]) -> bool:
    """Whether permuting a shape whose moved dims are all 1 gives back that shape."""
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return all(same_size(shape[d], shape[i]) for i, d in enumerate(inverse))


def _arguments(node: Node) -> list[Any]:
    """Arguments to compare; sizes that the shape of the result already says are left out."""
    args = list(node.args)
    if node.target is EXPAND:
        return args[:1]
    if node.target is FULL:
        return args[1:]
    if node.target is SLICE:
        x, dim, start, _, step = args
        start = fxutil.size_value(start) or 0
        return [x, dim, start + x.meta["val"].shape[dim] if isinstance(start, int) and start < 0 else start, step]
    return args


def _permutation(chain: list[Node]) -> list[int]:
    """The order that a chain of permutes amounts to; the node nearest to the result comes first."""
    steps = [n.args[1] for n in chain if n.target is PERMUTE]
    order = list(range(len(steps[0])))
    for step in reversed(steps):
        order = [order[d] for d in step]
    return order


def _undone_permutes(node: Node) -> list[Node]:
    """The permutes from ``node`` upwards that together change nothing; empty if they do not come to that."""
    run: list[Node] = []
    while node.target is PERMUTE or (run and node.target in COPIES and node.args):
        run.append(node)
        if node.target is PERMUTE and (order := _permutation(run)) == sorted(order):
            return run
        if not isinstance(node.args[0], Node):
            break
        node = node.args[0]
    return []


def _uncopied(node: Node) -> Node:
    while node.target in COPIES and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _same_float(a: Any, b: Any) -> bool:
    """Equal as single-precision numbers (a constant may have passed through an f32 tensor); NaN equals NaN."""
    if type(a) is not float or type(b) not in (int, float):
        return False
    if a != a or b != b:
        return a != a and b != b
    try:
        return struct.pack("f", a) == struct.pack("f", float(b))
    except OverflowError:
        return a == b


def _dt(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
