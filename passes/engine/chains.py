"""Layout steps on both sides: chains read as one step, steps that do nothing, inputs known in another layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .bindings import Bindings, Goal, Virtual
from .fxutil import same_shape, same_size
from .optable import COPIES, PERMUTE, REDUCTIONS, RESHAPE, SLICE


class Chains(Bindings):
    """Rules for reshape, permute, expand and slice."""

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
            if moved != sorted(moved) or not _unmoved(shape, order):
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


def _unmoved(shape: tuple, order: list[int]) -> bool:
    """Whether permuting a shape whose moved dims are all 1 gives back that shape."""
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return all(same_size(shape[d], shape[i]) for i, d in enumerate(inverse))


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
