"""Regions get the symbols that their arguments' sizes are made of."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.regions import HOP, region_calls, region_module


def bind_sizes(gm: GraphModule) -> None:
    """Hands every plain region call the symbols of its arguments' sizes, such as s of a size `s // 2`.

    Inductor reads a symbol off an argument that has it as a size or is it; it cannot invert an expression.
    """
    known = {str(value): node for node in gm.graph.nodes if (value := _symbol(node)) is not None}
    calls: dict[GraphModule, list[Node]] = defaultdict(list)
    for call in region_calls(gm):
        if call.target is HOP.invoke_subgraph:
            calls[region_module(gm, call)].append(call)
    for region, sites in calls.items():
        names = {name for call in sites for name in _symbols(call) if name in known}
        for name in sorted(names):
            if any(_symbol(value) == name for value in sites[0].all_input_nodes):
                continue
            last = region.graph.find_nodes(op="placeholder")[-1]
            with region.graph.inserting_after(last):
                place = region.graph.placeholder(f"size_{name}")
            place.meta["val"] = known[name].meta["val"]
            for call in sites:
                call.args = (*call.args, known[name])
        region.recompile()
    gm.graph.lint()
    gm.recompile()


def _symbol(node: Node) -> str | None:
    """The symbol that an input of a graph is."""
    value = node.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
        return str(value.node.expr)
    return None


def _symbols(call: Node) -> set[str]:
    found: set[str] = set()
    for operand in call.all_input_nodes:
        value: Any = operand.meta.get("val")
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                found |= {str(symbol) for symbol in size.node.expr.free_symbols}
    return found
