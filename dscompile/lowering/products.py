"""Products that share their first factor become one call.

A decoding step projects one row many times (queries, keys, gates, compressor inputs, router, experts). Each product is
so short that the call around it matters; together they make the row ready once and wake the threads once.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from dscompile.templates.cpu.linear import mm_many

SCHEMA = "mm_many(Tensor self, Tensor[] mat2) -> Tensor[]"
FN = mm_many
_VIEWS = frozenset(
    (
        torch.ops.aten.t.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    )
)


def fake(self: torch.Tensor, mat2: list[torch.Tensor]) -> list[torch.Tensor]:
    return [self.new_empty((self.shape[0], w.shape[1])) for w in mat2]


def merge_products(graph: fx.Graph, product: object, merged: torch._ops.OpOverload) -> set[str]:
    """Replace calls `product(x, w.t())` with one x by `merged(x, [w.t(), ...])`; returns the names of those replaced.

    A weight has to be an input of the graph (or a view of one) that the graph does not change, so that its views can
    move to the first of the products.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    changed = _changed_inputs(graph)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is product and isinstance(node.args[0], fx.Node):
            groups.setdefault(node.args[0], []).append(node)
    done: set[str] = set()
    for factor, products in groups.items():
        movable = [node for node in products if _views_of_input(node.args[1], changed) is not None]
        if len(movable) < 2:
            continue
        first = movable[0]
        for node in movable[1:]:
            for view in _views_of_input(node.args[1], changed) or ():
                if order[view] > order[first]:
                    first.prepend(view)
                    order[view] = order[first] - 1
        with graph.inserting_before(first):
            call = graph.call_function(merged, (factor, [node.args[1] for node in movable]))
        call.meta = {**first.meta, "val": [node.meta.get("val") for node in movable]}
        for i, node in enumerate(movable):
            done.add(node.name)
            with graph.inserting_before(first):
                item = graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item)
        for node in movable:
            graph.erase_node(node)
    return done


def _views_of_input(node: object, changed: set[fx.Node]) -> list[fx.Node] | None:
    """The view nodes between an input of the graph and `node`, outermost first; None if it is anything else."""
    views: list[fx.Node] = []
    while isinstance(node, fx.Node):
        if node.op in ("placeholder", "get_attr"):
            return None if node in changed else views[::-1]
        if node.op != "call_function" or node.target not in _VIEWS:
            return None
        if any(isinstance(value, fx.Node) for value in node.args[1:]):
            return None
        views.append(node)
        node = node.args[0]
    return None


def _changed_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs of the graph that some op writes to, directly or through views."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not schema.is_mutable:
            continue
        if schema is None and not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        changed.update(_root(source) for source in node.all_input_nodes)
    return changed


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.target in _VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
