"""Nodes that call an op of the vocabulary: which op, with what, at what cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.utils import _pytree as pytree

from dscompile.ops import NAMESPACE, OPS, Cost

_FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)


def op_of(node: fx.Node) -> tuple[str, bool] | None:
    """The name of the vocabulary op that a node calls, and whether it is wrapped by functionalisation."""
    if node.op != "call_function":
        return None
    wrapped = node.target in _FUNCTIONALIZED
    target = node.args[0] if wrapped else node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    return target._schema.name.removeprefix(f"{NAMESPACE}::"), wrapped


def arguments_of(node: fx.Node, name: str, wrapped: bool) -> dict[str, Any]:
    """The arguments of the op by name, nodes replaced by their fake values.

    Of a wrapped op the arguments that it changes are the tensors that they are views of.
    """
    return bound(node, OPS[name].op, wrapped)


def bound(node: fx.Node, op: torch._ops.OpOverload, wrapped: bool) -> dict[str, Any]:
    """`arguments_of` for a node that calls any op with a schema."""
    arguments = op._schema.arguments
    if wrapped:
        given = dict(node.kwargs)
        for argument in arguments:
            base = given.get(f"_{argument.name}_base_index")
            if base is not None:
                given[argument.name] = given["_all_bases"][base]
    else:
        given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
    return {a.name: value_of(given[a.name]) for a in arguments if a.name in given}


def value_of(argument: Any) -> Any:
    """An argument of a node with nodes replaced by their fake values."""
    return pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), argument)


def cost_of(node: fx.Node) -> Cost | None:
    """What a call of an op of the vocabulary moves and computes, a formula in symbolic sizes; None for other nodes."""
    found = op_of(node)
    if found is None:
        return None
    given = arguments_of(node, *found)
    spec = OPS[found[0]]
    return spec.cost_of(*(given.get(a.name, a.default_value) for a in spec.op._schema.arguments))


def graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`gm` and the graphs that it reaches through higher-order ops, each once."""
    seen: set[int] = set()
    stack = [gm]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        names = dict.fromkeys(str(node.target) for node in current.graph.nodes if node.op == "get_attr")
        children = [getattr(current, name, None) for name in names]
        stack += [child for child in reversed(children) if isinstance(child, fx.GraphModule)]
