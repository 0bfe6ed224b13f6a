"""Operations and regions on fewer tokens: the same operations, with sizes and values of the tail."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from dscompile.passes.engine.fxutil import bound_args, emit, evaluate, fake_mode, set_val
from dscompile.passes.engine.optable import EXPAND, RESHAPE, SELECT, is_op, is_pure
from dscompile.passes.liveness import GraphNeeds, Need
from dscompile.passes.token_windows import WindowRows

aten = torch.ops.aten


@dataclass(frozen=True)
class Shortener:
    """Rewrites operations of one graph in place. batch: sequences."""

    graph: Graph
    mode: FakeTensorMode
    batch: int

    def operation(self, node: Node, need: Need | None, tokens: int, values: Mapping[Node, Node]) -> None:
        """Runs an operation on `tokens` tokens of each sequence: `values` stand for the inputs that hold rows."""
        if node.target in (RESHAPE, EXPAND):
            assert need is not None
            sizes = [self.batch, tokens] if need.lead == 2 else [self.batch * tokens]
            source = node.args[0]
            node.args = (values[source], [*sizes, *node.meta["val"].shape[need.lead :]], *node.args[2:])  # type: ignore[index]
        else:
            node.args = fx.map_arg(node.args, lambda value: values.get(value, value))
            node.kwargs = fx.map_arg(node.kwargs, lambda value: values.get(value, value))
        set_val(node, evaluate(node, self.mode))

    def attention(
        self, node: Node, window: WindowRows, values: Mapping[Node, Node], chunk: Node, positions: Node,
        hidden: tuple[Node, Node] | None, sequence: Node | None,
    ) -> None:  # fmt: skip
        """Runs a `sparse_attention` on the queries in `values` and the window rows `history`, then `chunk`.

        positions: int64 [B, r] of the chunk's rows. hidden: the order of window rows and where it starts, if not that.
        sequence: int64 [B, 1], 0 .. B - 1; None makes it.
        """

        def add(target: Any, *args: Any, **kwargs: Any) -> Node:
            return emit(self.graph, target, args, kwargs, like=node, mode=self.mode)

        given = {name: values.get(value, value) for name, value in bound_args(node).items()}
        with self.graph.inserting_before(node):
            given["window_kv"] = add(aten.cat.default, [window.history, chunk], 1)
            if hidden is None:
                first = add(SELECT, positions, 1, 0)
                given["window_start"] = add(aten.sub.Tensor, first, window.before)
            else:
                if sequence is None:
                    device = positions.meta["val"].device
                    steps = add(aten.arange.start_step, 0, self.batch, 1, dtype=torch.int64, device=device)
                    sequence = add(aten.reshape.default, steps, [self.batch, 1])
                order, given["window_start"] = hidden
                given["window_kv"] = add(aten.index.Tensor, given["window_kv"], [sequence, order])
        node.args, node.kwargs = tuple(given.values()), {}
        set_val(node, evaluate(node, self.mode))


def shortened_region(
    region: GraphModule, inside: GraphNeeds, tokens: int, batch: int, operands: Mapping[int, Node],
    hidden: Mapping[int, tuple[Node, Node]], unused: Collection[int] = (),
) -> GraphModule:  # fmt: skip
    """A copy of a region that runs on `tokens` tokens of each sequence.

    operands: by position, what stands for arguments that hold tokens. hidden: by length of the history, the order of
    window rows and where it starts; the copy takes them as further arguments, in this order. unused: results that
    nobody reads; nothing is known of what they take, so that they are not computed, and a number stands for each.
    """
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(region.graph, copies))
    short = GraphModule(region, graph)
    short.meta.update(region.meta)
    shorten = Shortener(graph, mode := fake_mode(region), batch)
    arguments = graph.find_nodes(op="placeholder")
    for position, operand in operands.items():
        set_val(arguments[position], operand.meta["val"])
    hiding = _more_arguments(graph, hidden)
    _drop_results(graph, unused, mode)
    for node, copy in copies.items():
        if node in inside.windows:
            window, given = inside.windows[node], bound_args(copy)
            here = WindowRows(copies[window.history], copies[window.chunk], window.before, window.reach)
            shorten.attention(copy, here, {}, here.chunk, given["q_pos"], hiding.get(window.before), None)
        elif node in inside.rows:
            shorten.operation(
                copy, inside.needs.get(node), tokens, {copies[each]: copies[each] for each in inside.rows[node]}
            )
        elif node.target is operator.getitem and node.args[0] in inside.rows:
            set_val(copy, evaluate(copy, mode))
    erase_unused(short)
    graph.lint()
    short.recompile()
    return short


def rewritten(inside: GraphNeeds) -> Hashable:
    """What of a region's needs decides how its copy looks: equal for calls that may share one."""
    rows = {
        (node, *inputs.items(), need.lead if (need := inside.needs.get(node)) is not None else None)
        for node, inputs in inside.rows.items()
    }
    return frozenset(rows), frozenset(inside.windows.items())


def _drop_results(graph: Graph, unused: Collection[int], mode: FakeTensorMode) -> None:
    if not unused:
        return
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        for index in unused:
            if isinstance(results[index], Node) and isinstance(like := results[index].meta.get("val"), torch.Tensor):
                options = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
                results[index] = emit(graph, aten.full.default, ([1], 0), options, like=results[index], mode=mode)
    output.args = (tuple(results),)


def _more_arguments(graph: Graph, hidden: Mapping[int, tuple[Node, Node]]) -> dict[int, tuple[Node, Node]]:
    last = list(graph.find_nodes(op="placeholder"))[-1]
    added: dict[int, tuple[Node, Node]] = {}
    for before, pair in hidden.items():
        nodes = []
        for name, value in zip(("order", "start"), pair, strict=True):
            with graph.inserting_after(last):
                last = graph.placeholder(f"tail_{name}_{before}")
            set_val(last, value.meta["val"])
            nodes.append(last)
        added[before] = (nodes[0], nodes[1])
    return added


def erase_unused(gm: GraphModule) -> None:
    """Removes operations, sizes and attributes that nothing uses any more."""
    for node in reversed(list(gm.graph.nodes)):
        if node.users:
            continue
        size = node.op == "call_function" and not is_op(node.target) and node.target is not operator.getitem
        size = size and isinstance(node.meta.get("val"), (int, torch.SymInt))
        if size or node.op == "get_attr" or (node.op == "call_function" and is_pure(node.target)):
            gm.graph.erase_node(node)
