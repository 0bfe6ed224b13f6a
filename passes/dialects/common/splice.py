"""Inserting into a graph what a plain PyTorch function computes: for replacements that edit the graph themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from dscompile.passes.engine import fxutil, normalise
from dscompile.passes.engine.pattern import trace


def splice(gm: GraphModule, before: Node, fn: Callable[..., Any], like: Node, **inputs: Node) -> tuple[Node, ...]:
    """Puts `fn(**inputs)` in front of `before` and returns the nodes of its results, in canonical form.

    `fn` is traced on the fake values of the inputs; what it closes over are constants. `like` lends its source line.
    """
    mode = fxutil.fake_mode(gm)
    with fxutil.evaluating(mode):
        body = trace(fn, {name: node.meta["val"] for name, node in inputs.items()}, {})
    normalise(body, is_pattern=True)
    results = body.graph.output_node().args[0]
    new: dict[Node, Node] = {}
    given = iter(inputs.values())
    with gm.graph.inserting_before(before):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                new[node] = next(given)
            elif node.op == "call_function":
                copy = gm.graph.node_copy(node, lambda n: new[n])
                copy.meta = {"original_aten": node.target}
                fxutil.copy_origin(copy, like)
                fxutil.set_val(copy, fxutil.evaluate(copy, mode))
                new[node] = copy
            elif node.op == "get_attr":
                raise ValueError(f"splice: {fn} makes a tensor constant; use factory functions")
    return tuple(new[n] for n in (results if isinstance(results, (tuple, list)) else (results,)))
