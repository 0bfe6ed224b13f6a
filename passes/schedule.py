"""Work moves between the start of an exchange and the wait for it.

Each rank's shared expert, and whatever else does not depend on the exchange, runs while rows travel. The order is one
of the graph: Inductor is told to keep it (see `KEEP_ORDER`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine.fxutil import bound_args
from dscompile.passes.engine.graphs import subgraphs, users_through_views
from dscompile.passes.engine.optable import LAYOUT, SELECT, SLICE
from dscompile.passes.halving import half_of
from dscompile.passes.ordering import PAIRS, STARTS, WAITS, dependencies, has_exchanges, list_schedule, reorder
from dscompile.passes.regions import HOP, is_region_call, region_calls, region_module, region_operands
from dscompile.passes.timeline import Cover, Row, Schedule

#: Settings of Inductor: its own orders would put every start directly in front of its wait.
KEEP_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}

_TRIVIAL = LAYOUT | {SLICE, SELECT, operator.getitem, torch.ops.aten.sym_size.int, torch.ops.aten.as_strided.default}
_TRIVIAL |= {torch.ops.aten.copy_.default}  # ends what is done in place
Place = tuple[Node | None, Node]  # a node, and the region call that runs it


def schedule(gm: GraphModule) -> None:
    """Orders every graph and region of `gm` that has exchanges."""
    for sub in subgraphs(gm):
        if has_exchanges(sub.gm.graph):
            reorder(sub.gm, list_schedule(sub.gm, dependencies(sub.gm)))
            _hold(sub.gm)


def _hold(gm: GraphModule) -> None:
    """Makes every wait take the results of the work in front of it as `after`.

    Inductor would otherwise join the shared expert's last product with the sum behind the wait, and run it there.
    """
    begun: dict[Node, int] = {}
    nodes = list(gm.graph.nodes)
    for position, node in enumerate(nodes):
        if node.target in STARTS:
            begun[node] = position
        elif node.target in WAITS and node.args[0] in begun:
            between = nodes[begun[node.args[0]] + 1 : position]  # type: ignore[index]
            work = {n for n in between if is_work(n)}
            results = [n for n in between if _is_result(n, work) and not work & set(users_through_views(n, _TRIVIAL))]
            if results:
                given = bound_args(node)
                before = given.pop("after") or ()
                node.args, node.kwargs = tuple(given.values()), {"after": [*before, *results]}
    gm.recompile()


def _is_result(node: Node, work: set[Node]) -> bool:
    owner = node.args[0] if node.target is operator.getitem else node
    return owner in work and isinstance(node.meta.get("val"), torch.Tensor)


def timeline(gm: GraphModule, label: Callable[[Node], str]) -> Schedule:
    """The order of `gm` as it stands. label: the layer of a region call or other node of the outermost graph."""
    found = Schedule()
    under_way: dict[Place, int] = {}
    names: dict[Place, str] = {}
    halves = {0}
    for call, node in _flat(gm):
        half = half_of(call or node) or 0
        halves.add(half)
        layer = label(call or node)
        pending = tuple(names[place] for place in under_way)
        if node.target in STARTS:
            what = node.target._schema.name.rpartition("::")[2]  # type: ignore[union-attr]
            under_way[call, node] = len(found.rows)
            names[call, node] = f"{what} {layer}".rstrip()
            found.rows.append(Row(half, "start", layer, what, pending))
        elif node.target in WAITS:
            begun = _begin(gm, (call, node.args[0]))  # type: ignore[arg-type]
            start, end = under_way.pop(begun, None), len(found.rows)
            if start is not None:
                work = tuple(i for i in range(start + 1, end) if found.rows[i].kind == "work")
                found.covers.append(Cover(names[begun], half, start, end, work))
            what = PAIRS[node.target]._schema.name.rpartition("::")[2]
            found.rows.append(Row(half, "wait", layer, what, pending))
        elif is_work(node):
            _add_work(found, Row(half, "work", layer, _name(gm, node), pending))
    found.halves = len(halves)
    return found


def is_work(node: Node) -> bool:
    """Whether a node computes, rather than naming a part of what is there."""
    if node.op != "call_function" or node.target in STARTS or node.target in WAITS or node.target in _TRIVIAL:
        return False
    return isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def _add_work(found: Schedule, row: Row) -> None:
    last = found.rows[-1] if found.rows else None
    if last is None or (last.kind, last.half, last.layer, last.pending) != ("work", row.half, row.layer, row.pending):
        found.rows.append(row)
        return
    names = [*last.what.split(", "), row.what]
    found.rows[-1] = Row(row.half, "work", row.layer, ", ".join(dict.fromkeys(names)), row.pending)


def _name(gm: GraphModule, node: Node) -> str:
    """The operation; of a region what it consists of."""
    target: Any = node.target
    if target is HOP.invoke_subgraph:
        inside = [_name(gm, n) for n in region_module(gm, node).graph.nodes if is_work(n)]
        return ", ".join(dict.fromkeys(inside))
    if isinstance(target, torch._ops.HigherOrderOperator):
        target = node.args[0] if node.args and isinstance(node.args[0], torch._ops.OpOverload) else target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    return name.rpartition("::")[2]


def _flat(gm: GraphModule) -> Iterator[Place]:
    """Every node in the order in which it runs; those of regions with exchanges at the place of their calls."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and is_region_call(node) and has_exchanges(region_module(gm, node).graph):
            yield from ((node, inner) for inner in region_module(gm, node).graph.nodes)
        else:
            yield None, node


def _begin(gm: GraphModule, ticket: Place) -> Place:
    """The start that a ticket comes from, through arguments and results of regions."""
    call, node = ticket
    if node.op == "placeholder" and call is not None:
        position = region_module(gm, call).graph.find_nodes(op="placeholder").index(node)  # type: ignore[union-attr]
        return _begin(gm, (None, region_operands(call)[position]))
    if node.target is operator.getitem and node.args[0] in region_calls(gm):
        call = node.args[0]  # type: ignore[assignment]
        results: Any = region_module(gm, call).graph.output_node().args[0]  # type: ignore[arg-type]
        return _begin(gm, (call, results[node.args[1]]))
    return ticket
