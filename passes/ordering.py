"""What must stay before what in a graph, and a list scheduling that puts work between exchanges' starts and waits."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch
from torch.fx import Graph, GraphModule, Node

import dscompile.distributed.operators  # noqa: F401 - registers the operators that are named here
from dscompile.passes.engine.fxutil import root
from dscompile.passes.engine.mutation import written_roots
from dscompile.passes.halving import PARTS, ROWS, half_of
from dscompile.passes.regions import HOP, is_region_call, region_module, region_operands
from dscompile.passes.share import written_arguments

ep = torch.ops.dsv4_ep
STARTS = (ep.dispatch.default, ep.combine.default)
WAITS = (ep.dispatch_wait.default, ep.combine_wait.default)
#: What starts and ends each form of sending.
PAIRS = dict(zip(WAITS, STARTS, strict=True))


def starts(gm: GraphModule, node: Node) -> bool:
    """Whether a node starts an exchange that outlives it: itself, or at the end of the region that it calls."""
    if node.target in STARTS:
        return True
    inside = _inside(gm, node)
    return inside is not None and _unbalanced(inside)[0]


def waits(gm: GraphModule, node: Node) -> bool:
    """Whether a node waits for an exchange that was started before it."""
    if node.target in WAITS:
        return True
    inside = _inside(gm, node)
    return inside is not None and _unbalanced(inside)[1]


def has_exchanges(graph: Graph) -> bool:
    return any(node.target in STARTS or node.target in WAITS for node in graph.nodes)


def _inside(gm: GraphModule, node: Node) -> Graph | None:
    if node.op != "call_function" or node.target is not HOP.invoke_subgraph:
        return None
    return region_module(gm, node).graph


def _unbalanced(graph: Graph) -> tuple[bool, bool]:
    """Whether exchanges started here are waited for elsewhere, and the other way round."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    begun = {node for node in nodes if node.target in STARTS}
    ended = [node for node in nodes if node.target in WAITS]
    here = {node.args[0] for node in ended if node.args[0] in begun}
    return len(begun) > len(here), len(ended) > len(here)


def dependencies(gm: GraphModule) -> nx.DiGraph:
    """Edges from what must come first: data, the order of reads and writes of one memory, and of effects.

    Between the halves of a batch the order of reads and writes is free, see `interleave`. Nodes are those of `gm`'s own
    graph but placeholders, attributes and the output.
    """
    order = nx.DiGraph()
    writers: dict[Node, list[Node]] = {}
    readers: dict[Node, list[Node]] = {}
    effect: Node | None = None
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        order.add_node(node)
        order.add_edges_from((source, node) for source in node.all_input_nodes if source in order)
        written = _written(gm, node)
        for owner in {root(source) for source in node.all_input_nodes} | written:
            earlier = list(writers.get(owner, ()))
            if owner in written:
                earlier += readers.get(owner, ())
            order.add_edges_from((other, node) for other in earlier if not _other_half(other, node))
            (writers if owner in written else readers).setdefault(owner, []).append(node)
        if _has_effect(node):
            if effect is not None:
                order.add_edge(effect, node)
            effect = node
    return order


def _other_half(first: Node, second: Node) -> bool:
    """Whether two accesses to one memory are of rows of different halves, done in place."""
    return {half_of(first), half_of(second)} == {0, 1} and all(map(_in_place, (first, second)))


def _in_place(node: Node) -> bool:
    """Whether a node, if it writes, touches only rows of its half: not so an operation that copies all of a memory."""
    copied = (*ROWS, *PARTS, torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
    return is_region_call(node) or (isinstance(node.target, torch._ops.OpOverload) and node.target not in copied)


def _written(gm: GraphModule, node: Node) -> set[Node]:
    """Owners of the memory that a node writes to; a functionalised write counts, as it is done in place later."""
    if node.op != "call_function":
        return set()
    if is_region_call(node):
        operands = region_operands(node)
        found = (operands[position] for position in written_arguments(region_module(gm, node)))
        return {root(operand) for operand in found if isinstance(operand, Node)}
    if node.target in (HOP.auto_functionalized_v2, HOP.auto_functionalized):
        bases: Any = node.kwargs.get("_all_bases", ())
        return {root(base) for base in bases if isinstance(base, Node)}
    return set(written_roots(node))


def _has_effect(node: Node) -> bool:
    """Whether a node does something beyond its result, so that it must not pass another one of that kind."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return not is_region_call(node) and node.target is not HOP.auto_functionalized_v2
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op != "call_function"
    seeded = torch.Tag.nondeterministic_seeded in node.target.tags
    return seeded or node.target._schema.name.startswith(("aten::_assert", "aten::sym_constrain"))


def list_schedule(gm: GraphModule, order: nx.DiGraph) -> list[Node]:
    """The nodes of `order`, starts as early and waits as late as work for the time between them lasts.

    Work is taken for the next layer but not further: what depends on weights alone would otherwise all come first.
    Where several exchanges are under way, the one that started first is waited for first.
    """
    number = {node: position for position, node in enumerate(order)}
    is_wait = {node: waits(gm, node) for node in order}
    is_start = {node: starts(gm, node) and not is_wait[node] for node in order}
    depth = _depths(order, is_wait)
    due = _due(order, depth, {node for node in order if is_wait[node] or is_start[node]})
    missing = {node: order.in_degree(node) for node in order}
    ready: dict[str, list[tuple[Any, ...]]] = {"start": [], "work": [], "wait": []}
    done: dict[Node, int] = {}

    def offer(node: Node) -> None:
        if is_start[node]:
            heapq.heappush(ready["start"], (number[node], node))
        elif is_wait[node]:
            begun = max((done[start] for start in _begun(gm, node)), default=-1)
            heapq.heappush(ready["wait"], (begun, number[node], node))
        else:
            heapq.heappush(ready["work"], (due[node], number[node], node))

    for node in order:
        if not missing[node]:
            offer(node)
    while len(done) < len(order):
        kind = _next(ready, depth)
        node = heapq.heappop(ready[kind])[-1]
        done[node] = len(done)
        for user in order.successors(node):
            missing[user] -= 1
            if not missing[user]:
                offer(user)
    return list(done)


def _begun(gm: GraphModule, wait: Node) -> list[Node]:
    """The starts whose results a wait takes."""
    found = list(wait.all_input_nodes)
    found += [source for item in found if item.target is operator.getitem for source in item.all_input_nodes]
    return [node for node in found if starts(gm, node)]


def _next(ready: dict[str, list[tuple[Any, ...]]], depth: dict[Node, int]) -> str:
    if ready["start"]:
        return "start"
    if not ready["wait"]:
        return "work"
    limit = depth[ready["wait"][0][-1]] + 2
    return "work" if ready["work"] and ready["work"][0][0] <= limit else "wait"


def _depths(order: nx.DiGraph, is_wait: dict[Node, bool]) -> dict[Node, int]:
    """How many waits lie on the longest way to each node."""
    depth: dict[Node, int] = {}
    for node in nx.topological_sort(order):
        depth[node] = max((depth[source] + is_wait[source] for source in order.predecessors(node)), default=0)
    return depth


def _due(order: nx.DiGraph, depth: dict[Node, int], exchanges: set[Node]) -> dict[Node, int]:
    """The depth at which each node's result is first needed: by an exchange, or by something behind a later wait."""
    due: dict[Node, int] = {}
    for node in reversed(list(nx.topological_sort(order))):
        needs = (
            depth[user] if user in exchanges or depth[user] > depth[node] else due[user]
            for user in order.successors(node)
        )  # fmt: skip
        # What is written back stays at the end where it can, where Inductor looks for it.
        last = len(order) if node.target is torch.ops.aten.copy_.default else depth[node]
        due[node] = min(needs, default=last)
    return due


def reorder(gm: GraphModule, nodes: Sequence[Node]) -> None:
    """Put the nodes in this order, behind placeholders and attributes and in front of the output."""
    output = gm.graph.output_node()
    for node in gm.graph.find_nodes(op="get_attr"):
        first = next(n for n in gm.graph.nodes if n.op != "placeholder" and (n is node or n.op != "get_attr"))
        if first is not node:
            first.prepend(node)
    for node in nodes:
        output.prepend(node)
    gm.graph.lint()
    gm.recompile()
