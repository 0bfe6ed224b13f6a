"""What a graph shows about windows of tokens: which rows attention reaches, which tokens a ring keeps.

Both are read off the expressions, through the regions' arguments: a ring's slots are `where(pos >= 0 and pos > last -
W, slot, scratch)`, so that of each sequence the last W tokens are stored and all others go to one row that nobody
reads; attention's rows are `cat(history, chunk)`, of which the first is at position `pos[:, 0] - len(history)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from dscompile.passes.engine.fxutil import bound_args, size_value
from dscompile.passes.engine.optable import CAST, COPIES, RESHAPE, SELECT
from dscompile.passes.token_rows import TokenSizes

aten = torch.ops.aten


@dataclass(frozen=True)
class Place:
    """Where an expression stands: the outermost graph, or a region with what one call hands in."""

    positions: Node
    operands: dict[Node, Any] = field(default_factory=dict)

    def inside(self, operands: dict[Node, Any]) -> Place:
        """The same of a region; `operands` belong to its arguments."""
        return Place(self.positions, operands)

    def outside(self, node: Any) -> Any:
        """A region's argument as the outermost graph knows it; any other value as it is."""
        return self.operands.get(node, node) if isinstance(node, Node) else node

    def is_positions(self, node: Any) -> bool:
        return self.outside(node) is self.positions


@dataclass(frozen=True)
class WindowRows:
    """The rows of a window: `history` [B, before, R] from a ring, then the chunk's own, `chunk` [B, T, R].

    reach: how many positions a query sees, its own included.
    """

    history: Node
    chunk: Node
    before: int
    reach: int


def window_rows(attention: Node, sizes: TokenSizes, place: Place) -> WindowRows | str:
    """The window rows of a `sparse_attention`, or what could not be shown of them."""
    given = bound_args(attention)
    rows, start, positions = given["window_kv"], given["window_start"], given["q_pos"]
    if not place.is_positions(positions):
        return "its queries' positions are not those of the graph's tokens"
    parts: list[Node] = bound_args(rows)["tensors"] if _is(rows, aten.cat.default) else []
    if len(parts) != 2 or bound_args(rows)["dim"] != 1 or not sizes.fits(parts[1].meta["val"], 2):
        return "its window rows are not a history followed by the chunk's own"
    before = parts[0].meta["val"].shape[1]
    if not isinstance(before, int) or not _is_first_minus(start, before, place):
        return "its first window row is not known to be as many positions back as the history is long"
    return WindowRows(parts[0], parts[1], before, given["window"])


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _is_difference(node: Node) -> bool:
    return node.target is aten.sub.Tensor and not node.kwargs  # no factor of what is taken off


def _is_first_minus(start: Any, before: int, place: Place) -> bool:
    """`positions[:, 0] - before`."""
    start = _through(place.outside(_through(start)))
    if not isinstance(start, Node) or not _is_difference(start) or start.args[1] != before:
        return False
    first = _through(start.args[0])
    if not isinstance(first, Node):
        return False
    if first.target is SELECT:
        return place.is_positions(first.args[0]) and tuple(first.args[1:]) == (1, 0)
    given = bound_args(first) if first.target is aten.slice.Tensor else {}
    return (
        bool(given) and place.is_positions(given["self"]) and (given["dim"], given["start"], given["end"]) == (1, 0, 1)
    )


def kept_tokens(slots: Node, place: Place) -> int | None:
    """How many tokens at the end of each sequence a store with these slots keeps; None if it may keep any."""
    node = _unwrapped(slots, place)
    if not isinstance(node, Node) or node.target is not aten.where.self:
        return None
    condition, _, other = node.args
    if _constant(other) is None:
        return None
    tests = list(_conjuncts(condition))
    if not any(_is_valid(test, place) for test in tests):
        return None
    found = [width for test in tests if (width := _newest(test, place)) is not None]
    return min(found, default=None)


def _unwrapped(node: Any, place: Place) -> Any:
    """Through views, region arguments and `where(s < 0, s + rows, s)`, which does nothing to slots from 0 on."""
    while isinstance(node, Node):
        inner = place.outside(_through(node))
        if isinstance(inner, Node) and inner.target is aten.where.self:
            condition, moved, same = inner.args
            shifted = isinstance(moved, Node) and moved.target is aten.add.Tensor and moved.args[0] is same
            negative = any(t.target is aten.lt.Scalar and t.args == (same, 0) for t in _conjuncts(condition))
            if shifted and negative:
                inner = same
        if inner is node:
            break
        node = inner
    return node


def _through(node: Any) -> Any:
    while isinstance(node, Node) and (node.target in (RESHAPE, CAST) or node.target in COPIES):
        node = node.args[0]
    return node


def _conjuncts(node: Any) -> Iterator[Node]:
    if not isinstance(node, Node):
        return
    if node.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        for part in node.args:
            yield from _conjuncts(part)
    else:
        yield node


def _is_valid(test: Node, place: Place) -> bool:
    """`positions >= 0`."""
    bound = {aten.ge.Scalar: 0, aten.gt.Scalar: -1}.get(test.target)  # type: ignore[arg-type]
    return bound is not None and place.is_positions(test.args[0]) and test.args[1] == bound


def _newest(test: Node, place: Place) -> int | None:
    """The W of `positions > last - W`."""
    if test.target is not aten.gt.Tensor or not place.is_positions(test.args[0]):
        return None
    bound = _through(test.args[1])
    if not isinstance(bound, Node) or not _is_difference(bound):
        return None
    last, width = bound.args
    if not isinstance(last, Node) or last.target is not aten.amax.default or not place.is_positions(last.args[0]):
        return None
    along = bound_args(last)["dim"] == [1]
    return width if along and isinstance(width, int) and width > 0 else None


def _constant(node: Any) -> int | None:
    if isinstance(node, Node) and node.target is aten.full.default:
        node = node.args[1]
    value = size_value(node)
    return value if isinstance(value, int) else None
