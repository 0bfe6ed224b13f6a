"""Writes in a graph: which memory is written where, and what may therefore not move (case R22).

Functional graphs write only in their epilogue (``aten.copy_(placeholder, value)``); after store patterns, ``dsv4``
operators that write to a placeholder stand in the middle. Everything here is by *root*: the node that owns the memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from torch.fx import Graph, Node

from .fxutil import bound_args, root
from .optable import VIEWS, mutated_args


def written_roots(node: Node) -> tuple[Node, ...]:
    """Roots of the memory that this node writes to."""
    if node.op != "call_function":
        return ()
    names = mutated_args(node.target)
    if not names:
        return ()
    args = bound_args(node)
    out: list[Node] = []
    for name in names:
        value = args[name]
        out.extend(root(v) for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Node))
    return tuple(out)


class Writes:
    """The writes of a graph, by root, in graph order."""

    def __init__(self, graph: Graph) -> None:
        self.by_root: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for owner in written_roots(node):
                self.by_root.setdefault(owner, []).append(node)

    def add(self, node: Node) -> None:
        """Take note of a write that has been inserted."""
        for owner in written_roots(node):
            insort(self.by_root.setdefault(owner, []), node)

    def drop(self, node: Node) -> None:
        """Forget a write that is about to be erased."""
        for owner in written_roots(node):
            self.by_root[owner].remove(node)

    def is_written(self, node: Node) -> bool:
        """Whether the memory behind ``node`` is written anywhere in the graph."""
        return bool(self.by_root) and root(node) in self.by_root

    def epoch(self, node: Node) -> tuple[tuple[int, int], ...]:
        """How many writes to each written memory that ``node`` may alias or read come before it."""
        if not self.by_root:
            return ()
        owners = {root(n) for n in node.all_input_nodes} | {root(node)}
        return tuple(sorted((id(o), bisect_left(w, node)) for o in owners if (w := self.by_root.get(o))))

    def inside(self, reader: Node, first: Node, last: Node) -> Node | None:
        """A write between ``first`` and ``last`` to memory that ``reader`` reads or is a view of; None if none is."""
        if not self.by_root:
            return None
        for owner in {root(n) for n in [reader, *reader.all_input_nodes]}:
            for write in self.by_root.get(owner, ()):
                if first < write < last and write is not reader:
                    return write
        return None

    def epilogue(self, placeholder: Node) -> Node | None:
        """The final write-back ``copy_(placeholder, value)`` of a mutated input."""
        for write in reversed(self.by_root.get(placeholder, ())):
            if str(write.target) == "aten.copy_.default" and write.args[0] is placeholder:
                return write
        return None


def readers(node: Node) -> Iterable[Node]:
    """Nodes that read the memory of ``node``, also through views of it."""
    todo, seen = [node], set()
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "call_function" and user.target in VIEWS:
                todo.append(user)
            yield user
