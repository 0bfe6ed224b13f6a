"""A graph that runs both halves of a batch: whether that is the same as running the whole, and which node is whose."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine.graphs import subgraphs
from dscompile.passes.engine.optable import VIEWS, op_name
from dscompile.passes.regions import HOP, region_module, region_operands, region_results
from dscompile.passes.share import written_arguments

aten = torch.ops.aten
_HALF = "dsv4_half"
#: Operations that write rows, and the position of the argument that says which.
ROWS = {
    aten.index_put.default: 1, aten.index_copy.default: 2, aten.index_add.default: 2, aten.scatter.src: 2,
    aten.scatter.value: 2, aten.scatter_add.default: 2, aten._unsafe_index_put.default: 1,
}  # fmt: skip
PARTS = {aten.slice_scatter.default, aten.select_scatter.default, aten.as_strided_scatter.default}


class Unsplittable(Exception):
    """The batch of a graph cannot be cut into halves, or the halves not be interleaved; the message says why."""


def mark_half(node: Node, half: int) -> None:
    """Say which half of the batch, 0 or 1, a node of Dynamo's graph belongs to; tracing keeps it."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _HALF: half}


def half_of(node: Node) -> int | None:
    """The half of the batch that a node belongs to; None where the batch is not split, and for what both share."""
    found: int | None = node.meta.get("custom", {}).get(_HALF)
    return found


def spread_halves(gm: GraphModule) -> None:
    """Marks operations that passes have put in place of others: they belong where their inputs do, or their users."""
    made = [node for node in gm.graph.nodes if node.op == "call_function" and half_of(node) is None]
    for node in made:
        halves = {half for source in node.all_input_nodes if (half := half_of(source)) is not None}
        if halves:
            mark_half(node, max(halves))
    for node in reversed(made):
        users = {half_of(user) for user in node.users if user.op != "output"}
        if half_of(node) is None and len(users) == 1 and (half := users.pop()) is not None:
            mark_half(node, half)


def check_writes(gm: GraphModule, names: Sequence[str], marked: Sequence[bool]) -> None:
    """Whether memory that both halves share is only written by rows that the batch chooses, as page pools are.

    Regions serve both halves, so what is in them loses its mark. A counter that every call raises would be raised
    twice, and the second half would see the first one's writes.

    Args:
        gm: the functional graph of both halves. names, marked: of its placeholders, whether they are cut.

    Raises:
        Unsplittable: another kind of write to an input that is not cut.
    """
    for sub in subgraphs(gm)[1:]:
        for node in sub.gm.graph.nodes:
            node.meta["custom"] = {k: v for k, v in node.meta.get("custom", {}).items() if k != _HALF}
    places = gm.graph.find_nodes(op="placeholder")
    batch = {place for place, is_batch in zip(places, marked) if is_batch}
    known = dict(zip(places, names))
    for write in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        if write.args[0] not in batch:
            reason = _other_write(gm, write.args[1], _reached(gm, batch), dict.fromkeys(places))
            if reason:
                raise Unsplittable(f"{known.get(write.args[0], write.args[0])} is shared and written by {reason}")


def _reached(gm: GraphModule, sources: set[Node]) -> set[Node]:
    found = set(sources)
    for node in gm.graph.nodes:
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def _other_write(gm: GraphModule, value: Any, batch: set[Node], ends: dict[Node, None]) -> str:
    """Follows a written value back to the memory: "" if all on the way are rows that `batch` chooses."""
    seen: set[Node] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if node in ends or node in seen:
            continue
        seen.add(node)
        if node.target in ROWS:
            where = torch.utils._pytree.tree_leaves(node.args[ROWS[node.target]])
            if not batch.intersection(each for each in where if isinstance(each, Node)):
                return f"{op_name(node.target)} to rows that do not depend on the batch"
            todo.append(node.args[0])
        elif node.target in PARTS:
            todo += [node.args[0], node.args[1]]
        elif node.target is operator.getitem and node.args[0].target is HOP.auto_functionalized_v2:
            reason, base = _written_in_call(gm, node.args[0], node.args[1], batch)
            if reason:
                return reason
            todo.append(base)
        elif node.op == "call_function" and (node.target in VIEWS or node.target is aten.clone.default):
            todo.append(node.args[0])
        else:
            return op_name(node.target)
    return ""


def _written_in_call(gm: GraphModule, call: Node, item: int, batch: set[Node]) -> tuple[str, Any]:
    """What a functionalised call does to the base that is its result number `item`; and the base."""
    bases: Any = call.kwargs["_all_bases"]
    if call.args[0] is not HOP.invoke_subgraph:
        return f"the custom operation {call.args[0]}", None
    base = bases[item - region_results(call)]
    region = region_module(gm, call)
    inside = region.graph.find_nodes(op="placeholder")
    operands = region_operands(call)
    chosen = _reached(
        region, {place for place, value in zip(inside, operands) if value in batch and value not in bases}
    )
    for position, value in written_arguments(region).items():
        if operands[position] is base:
            reason = _other_write(region, value, chosen, dict.fromkeys(inside))
            if reason:
                return reason, base
    return "", base
