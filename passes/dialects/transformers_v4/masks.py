"""What an additive attention mask means, read off the operations that made it.

A window mask is 0 where a key is neither in the future nor `window` or more tokens back, and very negative elsewhere.
The part over compressed rows is either a selection (0 scattered into -inf by an index list) or a limit (every row below
a number per query).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from dscompile.passes.dialects.transformers_v4.values import Affine, Values
from dscompile.passes.engine import Reject
from dscompile.passes.engine.fxutil import bound_args, describe, same_size
from dscompile.passes.engine.graphs import strip_views
from dscompile.passes.engine.optable import CAST, COPIES, EXPAND, FULL, RESHAPE

aten = torch.ops.aten
_VIEWS = COPIES | {RESHAPE, EXPAND}


@dataclass(frozen=True)
class WindowMask:
    """A [B or 1, 1, T, S] mask. `queries` [.., 1, T, 1] and `keys` [.., 1, 1, S] are the positions that it compares.

    Both are None where one query is proven to see all of its `window` keys.
    """

    window: int
    queries: Node | None
    keys: Node | None
    low: float


@dataclass(frozen=True)
class Selection:
    """Rows `indices` [B, T, K], -1 for none, are visible."""

    indices: Node


@dataclass(frozen=True)
class Limit:
    """Rows below `count` ([B or 1, 1, T, 1], or None: all rows) are visible."""

    count: Node | None


def constant(node: Any) -> Any:
    """The number that a tensor holds everywhere, None if that is not known."""
    while isinstance(node, Node) and node.target in _VIEWS | {CAST}:
        node = node.args[0]
    if isinstance(node, Node) and node.target is FULL and not isinstance(node.args[1], Node):
        return node.args[1]
    return None


def is_low(value: Any, dtype: torch.dtype) -> bool:
    """Whether adding it to a score removes the key: the dtype's lowest number, or -inf."""
    return isinstance(value, float) and value <= torch.finfo(dtype).min


def uncast(node: Node) -> Node:
    """The node in front of casts and copies."""
    while node.target in COPIES | {CAST}:
        node = node.args[0]  # type: ignore[assignment]
    return node


def window_mask(values: Values, mask: Node) -> WindowMask | Reject:
    """The meaning of a window mask, or what about it could not be proven."""
    node = strip_views(mask, _VIEWS | {CAST})
    if node.target is not aten.where.self:
        return Reject(f"the window mask comes from {describe(node)}, not from positions in this graph", node)
    condition, zero, low = node.args
    if constant(zero) != 0.0 or not is_low(constant(low), node.meta["val"].dtype):
        return Reject("the window mask is not 0 where it allows and lowest where it forbids", node)
    differences: list[tuple[Affine, Node]] = []
    for test in _conjuncts(condition):
        if values.of(test) is True:
            continue
        difference = _not_negative(values, test)
        if difference is None:
            return Reject(f"a condition of the window mask is not proven to be about positions: {describe(test)}", test)
        differences.append((difference, test))
    return _window(values, differences, node, float(constant(low)))


def _conjuncts(node: Any) -> list[Node]:
    node = strip_views(node, _VIEWS)
    if node.target is aten.bitwise_and.Tensor:
        return [part for side in node.args for part in _conjuncts(side)]
    return [node]


def _not_negative(values: Values, test: Node) -> Affine | None:
    """d of a test that says d >= 0."""
    name = test.target._schema.name.split("::")[-1] if isinstance(test.target, torch._ops.OpOverload) else ""
    if name not in ("gt", "ge", "lt", "le"):
        return None
    first, second = values.affine(test.args[0]), values.affine(test.args[1])
    if first is None or second is None:
        return None
    difference = first - second if name in ("gt", "ge") else second - first
    return difference - Affine(sympy.Integer(1), ()) if name in ("gt", "lt") else difference


def _window(
    values: Values, differences: list[tuple[Affine, Node]], mask: Node, low: float
) -> WindowMask | Reject:  # fmt: skip
    """Two tests: age = query - key >= 0, and window - 1 - age >= 0."""
    tokens, rows = mask.meta["val"].shape[-2:]
    if not differences and same_size(tokens, 1) and isinstance(rows, int):
        return WindowMask(rows, None, None, low)
    if len(differences) != 2:
        return Reject(f"the window mask has {len(differences)} conditions on positions, expected 2", mask)
    (first, a), (second, b) = differences
    if second.steps[-1:] == (sympy.Integer(-1),) or a.target is not aten.ge.Tensor:
        (first, a), (second, b) = (second, b), (first, a)
    total = first + second
    if not total.uniform or not total.base.is_Integer or total.base < 0:
        return Reject("the two conditions of the window mask do not bound one distance", b)
    queries, keys = a.args[:2]
    at_query, at_key = values.affine(queries), values.affine(keys)
    if a.target is not aten.ge.Tensor or at_query is None or at_key is None:
        return Reject("the window mask does not compare query positions with key positions", a)
    one = sympy.Integer(1)
    rising = at_key.steps[-1:] == (one,) or same_size(keys.meta["val"].shape[-1], 1)
    ordinary = rising and not any(at_key.steps[:-1]) and not any(at_query.steps[-1:])
    counted = at_query.steps[-2:-1] == (one,) or same_size(queries.meta["val"].shape[-2], 1)
    if not ordinary or not counted or any(at_query.steps[:-2]) or len(at_key.steps) != 4 or len(at_query.steps) != 4:
        return Reject("the positions of the window mask do not rise by one along queries and keys", a)
    if not at_key.base.is_nonnegative:
        return Reject(f"the first key's position {at_key.base} is not proven to be 0 or more", keys)
    return WindowMask(int(total.base) + 1, queries, keys, low)


def row_mask(values: Values, mask: Node) -> Selection | Limit | Reject:
    """The meaning of a mask [B or 1, 1, T, C] over compressed rows, or what about it could not be proven."""
    node = uncast(mask)
    if constant(node) == 0.0:
        return Limit(None)
    if node.target is aten.where.self:
        return _limit(values, node)
    if node.target is aten.slice.Tensor and uncast(node.args[0]).target is aten.scatter.value:  # type: ignore[arg-type]
        return _selection(node, uncast(node.args[0]))  # type: ignore[arg-type]
    return Reject(f"the mask of the compressed rows comes from {describe(node)}, neither scatter nor a limit", node)


def _limit(values: Values, node: Node) -> Limit | Reject:
    """`where(arange(C) >= count, -inf, 0)`."""
    hidden, low, zero = node.args
    if constant(zero) != 0.0 or not is_low(constant(low), node.meta["val"].dtype):
        return Reject("the mask of the compressed rows is not -inf where it forbids and 0 elsewhere", node)
    hidden = strip_views(hidden, COPIES | {EXPAND})  # type: ignore[arg-type]
    rows = values.affine(hidden.args[0]) if hidden.target is aten.ge.Tensor else None
    counts_up = rows is not None and rows.steps[-1:] == (sympy.Integer(1),) and not any(rows.steps[:-1])
    one_row = rows is not None and rows.uniform and same_size(node.meta["val"].shape[-1], 1)
    if rows is None or rows.base != 0 or not (counts_up or one_row):
        return Reject("the mask of the compressed rows does not compare row numbers with a limit", hidden)
    count = hidden.args[1]
    shape = list(count.meta["val"].shape) if isinstance(count, Node) else []
    if not isinstance(count, Node) or len(shape) != 4 or not all(same_size(shape[d], 1) for d in (1, 3)):
        return Reject("the limit of the visible rows is not one number per query", hidden)
    return Limit(count)


def _selection(cut: Node, scatter: Node) -> Selection | Reject:
    """`scatter(-inf, where(index >= 0, index, C), 0)[..., :C]`."""
    given = bound_args(scatter)
    target, index = given["self"], strip_views(given["index"], COPIES | {RESHAPE})
    width = scatter.meta["val"].shape[-1]
    rows = cut.meta["val"].shape[-1]
    whole = cut.args[1] == 3 and cut.args[2] == 0 and cut.args[4] == 1 and same_size(rows + 1, width)
    if given["dim"] != 3 or given["value"] != 0 or not is_low(constant(target), target.meta["val"].dtype) or not whole:
        return Reject("the mask of the compressed rows is not 0 scattered into a constant -inf", scatter)
    if index.target is not aten.where.self:
        return Reject("the scattered indices do not send -1 behind the rows", index)
    valid, indices, behind = index.args
    if valid.target is not aten.ge.Scalar or valid.args[0] is not indices or valid.args[1] != 0:
        return Reject("the scattered indices are not kept where they are 0 or more", index)
    behind = behind.args[1] if behind.target is FULL else None
    if not same_size(behind.meta["val"] if isinstance(behind, Node) else behind, rows):
        return Reject(f"absent indices are not sent to column {rows}", index)
    if not _distinct(indices):
        return Reject("the scattered indices are not proven to be distinct (they come from no top-k)", indices)
    return Selection(indices)


def _distinct(indices: Node) -> bool:
    """Whether no index but -1 occurs twice for a query."""
    if indices.target is torch.ops.dsv4.index_topk.default:
        return True
    if indices.target is aten.where.self and constant(indices.args[1]) == -1:
        indices = indices.args[2]  # type: ignore[assignment]
    source = indices.args[0] if indices.args else None
    return isinstance(source, Node) and source.target is aten.topk.default and indices.args[1] == 1
