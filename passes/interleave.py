"""Two halves of a batch in one order: while one half's tokens travel, the other half computes.

Exchanges start in the order that every rank has, whatever its shapes: for each layer the first half's dispatch, the
second's, then the same for combine. It is enforced: each start takes the ticket of the one before as `after`.

Rows of a batch are independent of each other, and what they store in shared memory are rows of their own (see
`halving.check_writes`). So a read by one half need not wait for a write by the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import networkx as nx
from torch.fx import GraphModule, Node

from dscompile.passes.engine.graphs import subgraphs
from dscompile.passes.halving import Unsplittable, half_of, spread_halves
from dscompile.passes.ordering import STARTS, dependencies, has_exchanges, list_schedule, reorder, starts
from dscompile.passes.region_sizes import bind_sizes
from dscompile.passes.regions import region_module
from dscompile.passes.stages import AFTER, cut_regions


def interleave(gm: GraphModule, label: Callable[[Node], str]) -> None:
    """Cuts regions at their exchanges and orders the graph of both halves. label: a region call's layer.

    Raises:
        Unsplittable: a half needs what the other one does only later in that order, or as `cut_regions`.
    """
    for sub in subgraphs(gm)[1:]:
        if has_exchanges(sub.gm.graph) and any(site.graph is not gm.graph for site in sub.sites):
            raise Unsplittable(f"region {sub.path}, which exchanges tokens, is part of another one")
    spread_halves(gm)
    cut_regions(gm, label)
    chain = start_order(gm)
    order = dependencies(gm)
    tickets = {start: _ticket(gm, start) for start in chain}
    for first, second in pairwise(chain):
        order.add_edge(first, tickets[first])
        order.add_edge(tickets[first], second)
    order.remove_edges_from(list(nx.selfloop_edges(order)))
    if not nx.is_directed_acyclic_graph(order):
        raise Unsplittable(_who_waits(gm, order))
    reorder(gm, list_schedule(gm, order))
    for first, second in pairwise(chain):
        _start_after(gm, second, tickets[first])
    bind_sizes(gm)


def start_order(gm: GraphModule) -> list[Node]:
    """Starts of exchanges in the order of every rank: the halves take turns.

    Raises:
        Unsplittable: halves with unlike numbers of exchanges.
    """
    halves: tuple[list[Node], list[Node]] = ([], [])
    for node in gm.graph.nodes:
        if starts(gm, node):
            halves[half_of(node) or 0].append(node)
    if len(halves[0]) != len(halves[1]):
        raise Unsplittable(f"halves with {len(halves[0])} and {len(halves[1])} exchanges")
    return [node for pair in zip(*halves, strict=True) for node in pair]


def _inner_start(gm: GraphModule, start: Node) -> Node:
    """The operator that starts: the node itself, or that of the stage which it calls."""
    if start.target in STARTS:
        return start
    return next(node for node in region_module(gm, start).graph.nodes if node.target in STARTS)


def _ticket(gm: GraphModule, start: Node) -> Node:
    if start.target in STARTS:
        return start
    results: Any = region_module(gm, start).graph.output_node().args[0]
    position = results.index(_inner_start(gm, start))
    return next(user for user in start.users if user.target is operator.getitem and user.args[1] == position)


def _start_after(gm: GraphModule, start: Node, ticket: Node) -> None:
    inner = _inner_start(gm, start)
    position = AFTER[inner.target]
    args = list(start.args)
    if inner is start:
        args[position] = ticket
    else:
        places = region_module(gm, start).graph.find_nodes(op="placeholder")
        args[2 + places.index(inner.args[position])] = ticket  # type: ignore[arg-type]
    start.args = tuple(args)


def _who_waits(gm: GraphModule, order: nx.DiGraph) -> str:
    """Why there is no order: memory that the second half writes and the first one still reads, as a rule."""
    cycle = [edge[0] for edge in nx.find_cycle(order)]
    shared = [node.name for node in cycle if not starts(gm, node)]
    return f"one half waits for the other's later layers ({', '.join(shared[:3]) or 'its exchanges'})"
