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
    return [node for node in gm.graph.nodes if node.op == "call_function" and is_region_call(node)]


def region_module(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    """The subgraph that a region call runs."""
    attribute = call.args[0] if call.target is HOP.invoke_subgraph else call.kwargs["subgraph"]
    assert isinstance(attribute, fx.Node)
    return getattr(gm, str(attribute.target))


def region_operands(call: fx.Node) -> list[Any]:
    """What a region call hands to the region's arguments, in order; a written view counts as its base."""
    if call.target is HOP.invoke_subgraph:
        return list(call.args[2:])
    operands: list[Any] = []
    while True:
        position = len(operands)
        if f"arg{position}" in call.kwargs:
            operands.append(call.kwargs[f"arg{position}"])
        elif f"_arg{position}_base_index" in call.kwargs:
            index = call.kwargs[f"_arg{position}_base_index"]
            operands.append(None if index is None else call.kwargs["_all_bases"][index])  # type: ignore[index]
        else:
            return operands


def is_region_call(node: fx.Node) -> bool:
    """Whether a node calls a region, in either form."""
    if node.target is HOP.invoke_subgraph:
        return True
    return node.target is HOP.auto_functionalized_v2 and node.args[:1] == (HOP.invoke_subgraph,)


def region_results(call: fx.Node) -> int:
    """How many values the region itself returns; a functionalised call's further values are the written bases."""
    bases = 0 if call.target is HOP.invoke_subgraph else len(call.kwargs["_all_bases"])  # type: ignore[arg-type]
    return len(call.meta["val"]) - bases


def redirect_call(call: fx.Node, subgraph: fx.Node, name: str, operands: dict[int, Any]) -> None:
    """Makes a region call run another subgraph (`get_attr` node, name that torch has not traced yet).

    operands: by position, those that change; further positions than the call has are added at its end.
    """
    if call.target is HOP.invoke_subgraph:
        args = dict(enumerate(call.args[2:])) | operands
        call.args = (subgraph, name, *(args[position] for position in range(len(args))))
        return
    changed = {f"arg{position}": value for position, value in operands.items()}
    call.kwargs = {**call.kwargs, **changed, "subgraph": subgraph, "identifier": name}


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
    _rename(gm)
    gm.graph.lint()
    gm.recompile()


def _rename(gm: fx.GraphModule) -> None:
    """Gives every region a name that torch has not traced yet.

    torch keeps what it traced of a region under its name for as long as one compilation lasts. Under the old name it
    would take the region as it was before rewriting.
    """
    names: dict[int, str] = {}
    for call in region_calls(gm):
        region = region_module(gm, call)
        name = names.setdefault(id(region), f"dsv4_{call.args[0].target}")
        call.args = (call.args[0], name, *call.args[2:])


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


def functionalise_writes(region: fx.GraphModule) -> None:
    """Turns in-place operators on the region's arguments into their functional form, closed by `copy_`.

    Inductor traces a region that writes through a wrapper which knows ATen's in-place operators but no custom ones;
    in functional form they pass, and Inductor puts them back in place without a copy.
    """
    graph = region.graph
    newest: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    for node in list(graph.nodes):
        if newest:
            node.args = fx.map_arg(node.args, lambda n: newest.get(n, n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: newest.get(n, n))
        written = _written_names(node)
        if written:
            _functional_call(graph, node, written, newest)
    with graph.inserting_before(output):
        for base, value in newest.items():
            copied = graph.call_function(torch.ops.aten.copy_.default, (base, value))
            copied.meta["val"] = base.meta.get("val")
    if newest:
        graph.lint()
        region.recompile()


def _written_names(node: fx.Node) -> list[str]:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace == "aten":
        return []
    arguments = target._schema.arguments
    return [arg.name for arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]


def _functional_call(graph: fx.Graph, node: fx.Node, written: list[str], newest: dict[fx.Node, fx.Node]) -> None:
    names = [arg.name for arg in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    bases = [given.pop(name) for name in written]
    assert all(isinstance(base, fx.Node) for base in bases)
    roots = {value: base for base, value in newest.items()}
    kwargs: dict[str, Any] = {**given, "_all_bases": bases}
    for index, name in enumerate(written):
        kwargs[f"_{name}_base_index"] = index
    returns = len(node.target._schema.returns)  # type: ignore[union-attr]
    with graph.inserting_before(node):
        call = graph.call_function(HOP.auto_functionalized_v2, (node.target,), kwargs)
    call.meta.update({key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")})
    value = node.meta.get("val")
    results = list(value) if isinstance(value, (tuple, list)) else [value]
    call.meta["val"] = (*(results if returns else [None]), *(base.meta.get("val") for base in bases))
    with graph.inserting_after(call):
        for offset, base in reversed(list(enumerate(bases))):
            # an operator without results still returns one None in front of the written bases
            item = graph.call_function(operator.getitem, (call, max(returns, 1) + offset))
            item.meta["val"] = base.meta.get("val")
            newest[roots.get(base, base)] = item
        if returns == 1:
            single = graph.call_function(operator.getitem, (call, 0))
            single.meta.update(node.meta)
            node.replace_all_uses_with(single)
        elif returns > 1:
            for user in list(node.users):
                user.args = (call, *user.args[1:])
    graph.erase_node(node)
