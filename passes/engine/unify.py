"""When a pattern node and a graph node agree, and what follows for the nodes below them.

The two must agree on operator, dtype and shape (named sizes bind, the rest is literal) and on arguments (sentinels and
sizes bind). They may differ in the order of commutative operands, in how a chain of reshapes or permutes is cut, in
copies, and in layout operators that do nothing for the sizes at hand (a pattern traced with many heads meets a graph
with one).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from . import fxutil
from .bindings import Alternative, Goal
from .chains import Chains
from .fxutil import describe
from .optable import COMMUTATIVE, COPIES, EXPAND, FULL, PERMUTE, RESHAPE, SKIPPABLE, SLICE, op_name

_IGNORED_KWARGS = frozenset({"device", "pin_memory", "layout", "memory_format", "non_blocking"})


class Unifier(Chains):
    """The rules for one pair of nodes.

    ``_alternatives`` yields functions; each tries one way to make a pair agree and returns the pairs that must agree
    next, or None after recording why not.
    """

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

    def _bind_input(self, p: Node, t: Any) -> list[Goal] | None:
        if not isinstance(t, Node):
            self._fail(f"{self._what(p)}: expected a tensor, found {describe(t)}", p, t)
            return None
        return [] if self._take(p, t) else None

    def _constant(self, p: Node, t: Any) -> list[Goal] | None:
        if isinstance(t, Node) and t.op == "get_attr":
            a, b = (getattr(n.graph.owning_module, str(n.target), None) for n in (p, t))
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype:
                if torch.equal(a.cpu(), b.cpu()):
                    self._set(self.map, p, t)
                    return []
        self._fail("another constant tensor", p, t)
        return None

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
