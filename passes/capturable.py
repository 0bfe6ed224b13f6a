"""What in a finished graph a CUDA graph cannot record: reads by the host, and sizes that depend on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from dscompile.passes.decoding import Obstacle
from dscompile.passes.engine.fxutil import bound_args, source_line, val
from dscompile.passes.engine.graphs import subgraphs

aten = torch.ops.aten
_BY_INDEX = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}  # fmt: skip
_CONTROL = ("cond", "while_loop")


def obstacles(
    gm: GraphModule, label: Callable[[Node], str], labels: dict[str, list[str]], inductor: bool = False
) -> list[Obstacle]:
    """Everything in `gm` and its regions that keeps a step from being captured.

    label: the layer of a node of the outermost graph. labels: the layers of every region, by the region's path; an
    obstacle in a region is listed once, with the first of them. inductor: whether Inductor compiles the graph.
    """
    found = []
    for sub in subgraphs(gm):
        for node in sub.gm.graph.nodes:
            for reason in _reasons(node, inductor):
                layer = label(node) if not sub.path else (labels.get(sub.path) or [""])[0]
                found.append(Obstacle(layer, node.name, source_line(node), reason))
    return found


def _reasons(node: Node, inductor: bool) -> Iterator[str]:
    if node.op != "call_function":
        return
    target = node.target
    tags = getattr(target, "tags", ())
    if target in _BY_INDEX:
        if any(_boolean(index) for index in tree_leaves(node.args[1])) and not _fills(node, inductor):
            yield f"{target} by a mask: as many rows as are true, which the host has to know"
    elif torch.Tag.data_dependent_output in tags:
        yield f"{target}: the host reads a value"
    elif torch.Tag.dynamic_output_shape in tags and not _repeats_known(node):
        yield f"{target}: a size that depends on values, which the host has to know"
    elif _name(target) in _CONTROL:
        yield f"{_name(target)}: the host reads its condition"
    elif str(target) == "dsv4_ep.dispatch.default":
        yield from _exchange(node)
    elif _leaves_device(node):
        yield f"{target}: a copy to the host"
    else:
        yield from _new_sizes(node)


def _exchange(node: Node) -> Iterator[str]:
    given = bound_args(node)
    if given["capacity"] == 0:
        yield "exchange in the exact form: the host waits for counts (allowed: expert_exchange='padded')"
    elif given["overflow"] == "exact":
        yield "exchange with overflow 'exact': the host waits for a flag (allowed: expert_overflow='error')"


def _new_sizes(node: Node) -> Iterator[str]:
    """Sizes that no input has and that do not come from a node before this one."""
    before = set().union(*(_unbacked(source) for source in node.all_input_nodes)) if node.all_input_nodes else set()
    fresh = _unbacked(node) - before
    # The exchange's own start says it already.
    if fresh and str(node.target) != "dsv4_ep.dispatch_wait.default":
        names = ", ".join(sorted(map(str, fresh)))
        yield f"{node.target}: a size that depends on values ({names}), which the host has to know"


def _unbacked(node: Node) -> set[Any]:
    found: set[Any] = set()
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            found |= set(free_unbacked_symbols(value))
    return found


def _repeats_known(node: Node) -> bool:
    return node.target is aten.repeat_interleave.Tensor and node.kwargs.get("output_size") is not None


def _boolean(index: Any) -> bool:
    value = val(index) if isinstance(index, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _fills(node: Node, inductor: bool) -> bool:
    """A write of one number by one mask, which is a choice between two values in every place, and counts nothing.

    Inductor makes that of it; so does torch itself where the number is the host's and what is written is not.
    """
    into, value = val(node.args[0]), val(node.args[2]) if len(node.args) > 2 else None
    if not isinstance(into, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    indices = tree_leaves(node.args[1], is_leaf=lambda index: index is None)
    one = len(indices) == 1 and value.dim() == 0
    return one and (inductor or (value.device.type == "cpu" and into.device.type != "cpu"))


def _leaves_device(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    return any(isinstance(each, torch.Tensor) and each.device.type not in ("cpu", "meta") for each in sources)


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))
