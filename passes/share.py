"""Work that several layers have in common is done once, outside them.

A region (one subgraph for all layers of a kind) may compute something from its arguments alone: unpacked rows, gathered
rows, an index list, a mask. Where two calls hand in the same values, that computation moves in front of the first of
them and its result becomes an argument. Whether two calls hand in the same values is read off the graph: the same node,
and for memory that regions write to, no write in between. No configuration is consulted.

Where the layer that wrote the rows computes the same thing from what it wrote, its result is returned from the region
and used instead, so that the work is done once per source.

Runs on plain `invoke_subgraph` calls (see `regions.restore_region_mutation`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dscompile.passes.engine.fxutil import copy_origin, layer_name, same_size
from dscompile.passes.engine.optable import LAYOUT, SELECT, SLICE, is_pure, op_name
from dscompile.passes.regions import HOP, region_calls, region_module

_TRIVIAL = LAYOUT | {SLICE, SELECT, operator.getitem, torch.ops.aten.sym_size.int}


@dataclass(frozen=True)
class Shared:
    """One computation that moved out of a region: its last operation, how many calls used it, how often it runs now."""

    operation: str
    calls: int
    runs: int
    layer: str = ""

    def __str__(self) -> str:
        where = f" of {self.layer}" if self.layer else ""
        return f"{self.operation}{where}: {self.runs} times instead of {self.calls}"


def hoist_shared(gm: fx.GraphModule) -> list[Shared]:
    """Moves shared work out of every region of `gm`; returns what moved."""
    by_region: dict[fx.GraphModule, list[fx.Node]] = defaultdict(list)
    for call in region_calls(gm):
        if call.target is HOP.invoke_subgraph:
            by_region[region_module(gm, call)].append(call)
    versions = Versions(gm)
    emitted = _Emitted()
    shared: list[Shared] = []
    for region, calls in by_region.items():
        if len(calls) > 1:
            shared += _hoist_region(gm, region, calls, versions, emitted)
    shared += _reuse_source_values(gm, emitted, versions)
    gm.graph.lint()
    gm.recompile()
    return shared


class Versions:
    """Which state of written memory a parent value has at a call: the number of writes to it before that call."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._writes: dict[fx.Node, list[int]] = defaultdict(list)
        self._order: dict[fx.Node, int] = {}
        for position, node in enumerate(gm.graph.nodes):
            self._order[node] = position
            if node.op == "call_function" and node.target is HOP.invoke_subgraph:
                for index in written_arguments(region_module(gm, node)):
                    self._writes[node.args[index + 2]].append(position)
            elif node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
                self._writes[node.args[0]].append(position)

    def before(self, value: Any, call: fx.Node) -> int:
        """Writes to `value` that precede `call`."""
        return sum(position < self._order[call] for position in self._writes.get(value, ()))

    def last_writer_position(self, value: Any, call: fx.Node) -> int | None:
        earlier = [position for position in self._writes.get(value, ()) if position < self._order[call]]
        return max(earlier, default=None)

    def position(self, node: fx.Node) -> int:
        return self._order[node]


def written_arguments(region: fx.GraphModule) -> dict[int, fx.Node]:
    """Placeholder index -> the node whose value the region leaves in that argument."""
    placeholders = {node: index for index, node in enumerate(region.graph.find_nodes(op="placeholder"))}
    copies = region.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return {placeholders[node.args[0]]: node.args[1] for node in copies if node.args[0] in placeholders}


@dataclass
class _Value:
    """A hoisted value in the parent graph: what computes it, from what, and in which state of memory."""

    node: fx.Node
    key: tuple[Any, ...]
    first_call: fx.Node
    users: list[fx.Node] = field(default_factory=list)


@dataclass
class _Emitted:
    values: dict[tuple[Any, ...], _Value] = field(default_factory=dict)


def _hoist_region(
    gm: fx.GraphModule, region: fx.GraphModule, calls: list[fx.Node], versions: Versions, emitted: _Emitted
) -> list[Shared]:
    placeholders = region.graph.find_nodes(op="placeholder")
    position = {node: index for index, node in enumerate(placeholders)}
    movable = _movable(region, position, calls, versions)
    shared = []
    for node in _frontier(movable):
        keys = [_key(node, position, call, versions) for call in calls]
        _move_out(gm, region, node, position, calls, keys, emitted)
        shared.append(Shared(op_name(node.target), len(calls), len(set(keys)), layer_name(node)))
    if shared:
        for node in reversed(list(region.graph.nodes)):
            if node.op == "call_function" and not node.users and is_pure(node.target):
                region.graph.erase_node(node)
        region.graph.lint()
        region.recompile()
    return shared


def _movable(
    region: fx.GraphModule, position: dict[fx.Node, int], calls: list[fx.Node], versions: Versions
) -> set[fx.Node]:
    """Pure nodes that depend on arguments alone, and on arguments of which at least two calls hand in the same."""
    support: dict[fx.Node, frozenset[int]] = {node: frozenset({index}) for node, index in position.items()}
    groups: dict[frozenset[int], int] = {}
    for node in region.graph.nodes:
        if node.op != "call_function" or not is_pure(node.target):
            continue
        if all(source in support for source in node.all_input_nodes):
            needs: frozenset[int] = frozenset().union(*(support[source] for source in node.all_input_nodes))
            if needs not in groups:
                groups[needs] = len({_operand_state(call, needs, versions) for call in calls})
            if groups[needs] < len(calls):
                support[node] = needs
    return {node for node, needs in support.items() if node.op == "call_function" and needs}


def _operand_state(call: fx.Node, needs: frozenset[int], versions: Versions) -> tuple[Any, ...]:
    operands = (call.args[index + 2] for index in sorted(needs))
    return tuple((operand, versions.before(operand, call)) for operand in operands)


def _frontier(movable: set[fx.Node]) -> list[fx.Node]:
    """Movable values that something immovable uses and that cost more than a view, in graph order."""
    graph = next(iter(movable)).graph if movable else fx.Graph()
    return [
        node
        for node in graph.nodes
        if node in movable
        and any(user not in movable for user in node.users)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and _work(node, movable)
    ]


def _work(node: fx.Node, movable: set[fx.Node]) -> bool:
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen or current not in movable:
            continue
        seen.add(current)
        if current.target not in _TRIVIAL:
            return True
        pending.extend(current.all_input_nodes)
    return False


def _key(value: Any, position: dict[fx.Node, int], call: fx.Node, versions: Versions) -> Any:
    """Equal keys mean equal values: the expression over the call's operands and the state of their memory."""
    if isinstance(value, fx.Node):
        if value in position:
            operand = call.args[position[value] + 2]
            return ("operand", operand, versions.before(operand, call))
        args = tuple(_key(arg, position, call, versions) for arg in value.args)
        kwargs = tuple((name, _key(arg, position, call, versions)) for name, arg in sorted(value.kwargs.items()))
        return (value.target, args, kwargs)
    if isinstance(value, (list, tuple)):
        return ("list", *(_key(item, position, call, versions) for item in value))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return (type(value), value)


def _move_out(
    gm: fx.GraphModule,
    region: fx.GraphModule,
    node: fx.Node,
    position: dict[fx.Node, int],
    calls: list[fx.Node],
    keys: list[Any],
    emitted: _Emitted,
) -> None:
    last = region.graph.find_nodes(op="placeholder")[-1]
    with region.graph.inserting_after(last):
        argument = region.graph.placeholder(f"shared_{node.name}")
    argument.meta.update(node.meta)
    for call, key in zip(calls, keys, strict=True):
        if key not in emitted.values:
            with gm.graph.inserting_before(call):
                copied = _copy_expression(gm.graph, node, position, call, {})
            emitted.values[key] = _Value(copied, key, call)
        emitted.values[key].users.append(call)
        call.args = (*call.args, emitted.values[key].node)
    node.replace_all_uses_with(argument)


def _copy_expression(
    graph: fx.Graph, node: fx.Node, position: dict[fx.Node, int], call: fx.Node, done: dict[fx.Node, Any]
) -> Any:
    if node in position:
        return call.args[position[node] + 2]
    if node not in done:
        for source in node.all_input_nodes:
            _copy_expression(graph, source, position, call, done)
        copied = graph.node_copy(
            node, lambda source: call.args[position[source] + 2] if source in position else done[source]
        )
        copy_origin(copied, call)
        done[node] = copied
    return done[node]


def _reuse_source_values(gm: fx.GraphModule, emitted: _Emitted, versions: Versions) -> list[Shared]:
    """Hoisted values that the region which wrote their memory computes as well come from that region."""
    by_position = {versions.position(call): call for call in region_calls(gm)}
    shared = []
    for value in emitted.values.values():
        writer = _writer(value, versions, by_position)
        inside = _find_inside(gm, writer, value.key) if writer is not None else None
        if writer is None or inside is None:
            continue
        result = _return_from(gm, writer, inside)
        value.node.replace_all_uses_with(result)
        shared.append(Shared(op_name(inside.target), 2, 1, layer_name(inside)))
    for value in emitted.values.values():
        _erase_unused(gm.graph, value.node)
    return shared


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    if node.users or node.op != "call_function" or not is_pure(node.target):
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        _erase_unused(graph, source)


def _operands(key: Any) -> list[tuple[Any, int]]:
    if isinstance(key, tuple) and key and key[0] == "operand":
        return [(key[1], key[2])]
    return [found for item in key for found in _operands(item)] if isinstance(key, tuple) else []


def _writer(value: _Value, versions: Versions, by_position: dict[int, fx.Node]) -> fx.Node | None:
    """The one region call that left the memory behind this value in its state, if there is one."""
    positions = {
        position
        for operand, count in _operands(value.key)
        if count and (position := versions.last_writer_position(operand, value.first_call)) is not None
    }
    if len(positions) != 1:
        return None
    return by_position.get(positions.pop())


def _find_inside(gm: fx.GraphModule, writer: fx.Node, key: Any) -> fx.Node | None:
    """A node of the writer's region whose value is the one that `key` describes, seen after the write."""
    region = region_module(gm, writer)
    placeholders = region.graph.find_nodes(op="placeholder")
    names: dict[Any, fx.Node] = {}
    for index, node in enumerate(placeholders):
        operand = writer.args[index + 2]
        if isinstance(operand, fx.Node):
            names.setdefault(operand, node)
    for index, node in written_arguments(region).items():
        names[writer.args[index + 2]] = node
    outputs = region.graph.output_node().args[0]
    for user in writer.users:
        if user.target is operator.getitem and isinstance(outputs, (list, tuple)):
            names[user] = outputs[user.args[1]]  # type: ignore[index]
    return _search(key, names)


def _search(key: Any, names: dict[Any, fx.Node]) -> fx.Node | None:
    found = _inside_value(key, names)
    return found if isinstance(found, fx.Node) and found.op == "call_function" else None


_MISSING = object()


def _inside_value(key: Any, names: dict[Any, fx.Node]) -> Any:
    tag = key[0]
    if tag == "operand":
        return names.get(key[1], _MISSING)
    if tag == "list":
        items = [_inside_value(item, names) for item in key[1:]]
        return _MISSING if any(item is _MISSING for item in items) else items
    if isinstance(tag, type):
        return key[1]
    target, args, kwargs = key[0], key[1], key[2]
    want_args = [_inside_value(arg, names) for arg in args]
    want_kwargs = {name: _inside_value(arg, names) for name, arg in kwargs}
    if any(item is _MISSING for item in (*want_args, *want_kwargs.values())):
        return _MISSING
    anchors = [arg for arg in want_args if isinstance(arg, fx.Node)]
    for user in anchors[0].users if anchors else ():
        if user.target is target and len(user.args) == len(want_args) and set(user.kwargs) == set(want_kwargs):
            if all(_same(a, b) for a, b in zip(user.args, want_args, strict=True)):
                if all(_same(user.kwargs[name], want_kwargs[name]) for name in want_kwargs):
                    return user
    return _MISSING


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    if isinstance(a, (int, torch.SymInt)) and isinstance(b, (int, torch.SymInt)) and type(a) is not bool:
        return same_size(a, b)
    return type(a) is type(b) and a == b


def _return_from(gm: fx.GraphModule, call: fx.Node, inside: fx.Node) -> fx.Node:
    region = region_module(gm, call)
    output = region.graph.output_node()
    results = tuple(output.args[0])  # type: ignore[arg-type]
    if inside in results:
        index = results.index(inside)
    else:
        index = len(results)
        output.args = ((*results, inside),)
        region.recompile()
        for other in region_calls(gm):
            if region_module(gm, other) is region and "val" in other.meta:
                other.meta["val"] = (*other.meta["val"], inside.meta["val"])
    for user in call.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with gm.graph.inserting_after(call):
        result = gm.graph.call_function(operator.getitem, (call, index))
    result.meta.update(inside.meta)
    return result
