"""What a match has agreed on so far: node pairs, sizes, scalars; all of it can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .fxutil import describe, same_size
from .optable import COPIES, op_name
from .pattern import Variant

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


class Bindings:
    """Assignments made so far, undone through ``trail``, and the agreement on dtype and shape of one pair of nodes."""

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

    def _step_over(self, p: Node, nodes: list[Node]) -> list[Goal]:
        """Graph nodes that change nothing belong to the match and are passed over."""
        for node in nodes:
            self.through.append(node)
            self.trail.append((self.through, None))
        return [(p, nodes[-1].args[0])]


def _uncopied(node: Node) -> Node:
    while node.target in COPIES and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _dt(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
