"""A batch in two halves: Dynamo's graph becomes one that runs them one after the other, to be interleaved later.

Inputs that the user marked with `mark_batch` are cut in the middle of their first dimension, outputs are joined there;
parameters, page pools and everything else that is not marked is shared by both halves. Rows of a batch are taken to be
independent of each other, as sequences are; what contradicts this on the graph is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dscompile.capture import placeholder_names, placeholder_values
from dscompile.passes.halving import Unsplittable, mark_half

_MARK = "_dsv4_batch"
SMALLEST = 4  # a half of one row would make Dynamo treat the batch as a constant


def mark_batch(*tensors: Tensor) -> None:
    """Say that the first dimension of these inputs of a model is its batch, and may have another size in other calls.

    Mark every input that has one row for each sequence: for the option `micro_batches`, before the first call. It
    includes `torch._dynamo.mark_dynamic(tensor, 0)`, which a batch of one row does not get.

    Raises:
        ValueError: a tensor without dimensions.
    """
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(f"mark_batch: a {tensor.dtype} tensor without dimensions, allowed: one row a sequence")
        setattr(tensor, _MARK, True)
        if tensor.shape[0] > 1:
            torch._dynamo.mark_dynamic(tensor, 0)


def halved(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph, run on each half of the batch; `gm` stays as it is.

    Nodes know their half, see `halving.half_of`.

    Raises:
        Unsplittable: no input is marked, a static batch, an odd or small one, unlike batches, a size that depends on
            the batch where it may not, outputs that cannot be joined.
    """
    places = gm.graph.find_nodes(op="placeholder")
    names = placeholder_names(gm)
    values = [place.meta.get("example_value") for place in places]
    marked = marked_inputs(gm)
    batch = _batch(names, values, marked)
    symbol = batch.node.expr
    for name, value, is_batch in zip(names, values, marked, strict=True):
        _check_input(name, value, is_batch, symbol)
    results = gm.graph.output_node().args[0]
    joined = [_is_joined(position, result, symbol) for position, result in enumerate(_tuple(results))]
    if bool(batch < SMALLEST):  # these two become guards: other batches are compiled anew
        raise Unsplittable(f"a batch of {int_of(batch)}, needed: {SMALLEST} or more")
    if bool(batch % 2 != 0):
        raise Unsplittable(f"an odd batch of {int_of(batch)}")
    return _build(gm, places, marked, [_is_size(value, symbol) for value in values], joined)


def marked_inputs(gm: fx.GraphModule) -> list[bool]:
    """Of every placeholder of Dynamo's graph: whether the user marked it with `mark_batch`."""
    return [getattr(value, _MARK, False) for value in placeholder_values(gm)]


def int_of(size: Any) -> int:
    """The size in this call."""
    return size if isinstance(size, int) else int(size.node.hint)


def _batch(names: Sequence[str], values: Sequence[Any], marked: Sequence[bool]) -> torch.SymInt:
    found = [(name, value) for name, value, is_batch in zip(names, values, marked, strict=True) if is_batch]
    if not found:
        raise Unsplittable("no input of this graph is marked with dscompile.mark_batch")
    for name, value in found:
        size = value.shape[0]
        if isinstance(size, int):
            fixed = f"the model, or a cache of a fixed size, made its batch the constant {size}"
            raise Unsplittable(f"{name}: {'a batch of 1' if size == 1 else fixed}")
        if not isinstance(size.node.expr, sympy.Symbol) or size.node.hint is None:
            raise Unsplittable(f"{name}: its batch is {size}, needed: a size that Dynamo knows")
    sizes = {value.shape[0].node.expr: (name, value.shape[0]) for name, value in found}
    if len(sizes) > 1:
        said = ", ".join(f"{name}: {size}" for name, size in sizes.values())
        raise Unsplittable(f"inputs with unlike batches ({said})")
    batch: torch.SymInt = found[0][1].shape[0]
    return batch


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, torch.SymInt):
        return set(value.node.expr.free_symbols)
    return set()


def _is_size(value: Any, symbol: Any) -> bool:
    return isinstance(value, torch.SymInt) and value.node.expr == symbol


def _check_input(name: str, value: Any, is_batch: bool, symbol: Any) -> None:
    if not isinstance(value, Tensor):
        if symbol in _symbols(value) and not _is_size(value, symbol):
            raise Unsplittable(f"{name}: the size {value}, which depends on the batch")
        return
    others = value.shape[1:] if is_batch else value.shape
    if any(symbol in _symbols(size) for size in others):
        shape = "x".join(map(str, value.shape))
        raise Unsplittable(
            f"{name} [{shape}] depends on the batch {symbol}"
            + ("in more than its first dimension" if is_batch else " or is as large by chance, and is not marked")
        )


def _tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _is_joined(position: int, result: Any, symbol: Any) -> bool:
    """Whether an output has a part in each half; False for an input or a constant that is handed back as it is."""
    if not isinstance(result, fx.Node) or result.op == "placeholder":
        return False
    value = result.meta.get("example_value")
    if isinstance(value, Tensor) and value.dim() and _is_size(value.shape[0], symbol):
        if not any(symbol in _symbols(size) for size in value.shape[1:]):
            return True
    shown = "x".join(map(str, value.shape)) if isinstance(value, Tensor) else value
    raise Unsplittable(f"output {position} [{shown}] cannot be joined: its first dimension is not the batch")


def _build(
    gm: fx.GraphModule, places: list[fx.Node], marked: list[bool], sizes: list[bool], joined: list[bool]
) -> fx.GraphModule:
    graph = fx.Graph()
    shared = {place: graph.node_copy(place) for place in places}
    first = shared[next(place for place, is_batch in zip(places, marked) if is_batch)]
    half = graph.call_function(operator.floordiv, (graph.call_method("size", (first, 0)), 2))
    copies: list[dict[fx.Node, fx.Node]] = []
    for number in (0, 1):
        copy: dict[fx.Node, fx.Node] = dict(shared)
        for place, is_batch, is_size in zip(places, marked, sizes, strict=True):
            if is_batch:
                start = half if number else 0
                copy[place] = graph.call_function(torch.narrow, (shared[place], 0, start, half))
            elif is_size:
                copy[place] = half
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                if node not in shared:
                    shared[node] = graph.node_copy(node)
                copy[node] = shared[node]
            elif node.op not in ("placeholder", "output"):
                copy[node] = _copied(graph, node, copy, number)
        copies.append(copy)
    results = _tuple(gm.graph.output_node().args[0])
    outputs = [_output(graph, each, is_joined, shared, copies) for each, is_joined in zip(results, joined, strict=True)]
    graph.output(tuple(outputs)).meta.update(gm.graph.output_node().meta)
    graph.lint()
    found = fx.GraphModule(gm, graph)
    found.meta = dict(gm.meta)
    return found


def _copied(graph: fx.Graph, node: fx.Node, copy: dict[fx.Node, fx.Node], number: int) -> fx.Node:
    found = graph.node_copy(node, lambda source: copy[source])
    mark_half(found, number)
    if node.target is torch.ops.higher_order.invoke_subgraph:
        # What torch traced of a region is remembered under its name, and has the sizes of a half.
        found.args = (found.args[0], f"{found.args[1]}_half", *found.args[2:])
    return found


def _output(
    graph: fx.Graph, result: Any, is_joined: bool, shared: dict[fx.Node, fx.Node], copies: list[dict[fx.Node, fx.Node]]
) -> Any:
    if is_joined:
        return graph.call_function(torch.cat, ([copy[result] for copy in copies], 0))
    return shared[result] if isinstance(result, fx.Node) else result
