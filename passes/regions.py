"""Layer regions in a functional graph: finding them, and giving them back their in-place writes.

A region marked with `torch.compiler.nested_compile_region` is one subgraph with many calls. A region that writes to its
arguments is called as `auto_functionalized_v2(invoke_subgraph, ...)`. Inductor's own tracing does not decompose inside
that form, so `restore_region_mutation` turns it back into a plain `invoke_subgraph` call that writes in place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

HOP = torch.ops.higher_order


def region_calls(gm: fx.GraphModule) -> list[fx.Node]:
    """Every call of a region in `gm`'s own graph, in order, in either form."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and _is_region_call(node)]


def region_module(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    """The subgraph that a region call runs."""
    attribute = call.args[0] if call.target is HOP.invoke_subgraph else call.kwargs["subgraph"]
    assert isinstance(attribute, fx.Node)
    return getattr(gm, str(attribute.target))


def _is_region_call(node: fx.Node) -> bool:
    if node.target is HOP.invoke_subgraph:
        return True
    return node.target is HOP.auto_functionalized_v2 and node.args[:1] == (HOP.invoke_subgraph,)


def restore_region_mutation(gm: fx.GraphModule) -> None:
    """Rewrites every functionalised region call of `gm` into a call that writes to its arguments.

    The subgraph already ends in `copy_` into its own placeholders; results that only named the new value of a written
    base become the base itself, and the `copy_` of a base onto itself disappears.
    """
    for node in region_calls(gm):
        if node.target is HOP.auto_functionalized_v2:
            _restore_call(gm.graph, node)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] is node.args[1] and not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


def _restore_call(graph: fx.Graph, node: fx.Node) -> None:
    kwargs = dict(node.kwargs)
    bases = list(kwargs["_all_bases"])  # type: ignore[arg-type]
    operands: list[Any] = []
    with graph.inserting_before(node):
        while True:
            position = len(operands)
            if f"arg{position}" in kwargs:
                operands.append(kwargs[f"arg{position}"])
            elif f"_arg{position}_base_index" in kwargs:
                operands.append(_written_view(graph, kwargs, f"_arg{position}", bases))
            else:
                break
        call = graph.call_function(HOP.invoke_subgraph, (kwargs["subgraph"], kwargs["identifier"], *operands))
    call.meta.update(node.meta)
    values = node.meta.get("val")
    outputs = (len(values) if values is not None else _highest_item(node) + 1) - len(bases)
    if values is not None:
        call.meta["val"] = tuple(values[:outputs])
    for user in list(node.users):
        index = user.args[1]
        assert user.target is operator.getitem and isinstance(index, int)
        if index < outputs:
            user.args = (call, index)
        else:
            _check_no_stale_read(user, bases[index - outputs], node)
            user.replace_all_uses_with(bases[index - outputs])
            graph.erase_node(user)
    graph.erase_node(node)


def _highest_item(node: fx.Node) -> int:
    return max((int(user.args[1]) for user in node.users), default=-1)  # type: ignore[arg-type]


def _check_no_stale_read(new_value: fx.Node, base: fx.Node, write: fx.Node) -> None:
    """A read of the old value after the write would change meaning once both have one name."""
    order = {node: position for position, node in enumerate(write.graph.nodes)}
    for user in base.users:
        epilogue = user.target is torch.ops.aten.copy_.default and user.args[0] is base
        if order[user] > order[write] and not epilogue:
            raise AssertionError(f"{user.name} reads {base.name} after {write.name} wrote to it")


def _written_view(graph: fx.Graph, kwargs: dict[str, Any], prefix: str, bases: list[Any]) -> Any:
    index = kwargs[f"{prefix}_base_index"]
    if index is None:
        return None
    base = bases[index]
    if f"{prefix}_storage_offset" in kwargs:
        geometry = tuple(kwargs[f"{prefix}_{part}"] for part in ("size", "stride", "storage_offset"))
        return graph.call_function(torch.ops.aten.as_strided.default, (base, *geometry))
    if f"{prefix}_slice_dim" in kwargs:
        bounds = tuple(kwargs[f"{prefix}_slice_{part}"] for part in ("dim", "start", "end"))
        return graph.call_function(torch.ops.aten.slice.Tensor, (base, *bounds))
    return base
