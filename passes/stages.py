"""Regions with an exchange become three: up to the dispatch, up to the combine, and the rest.

Between two stages of one half of the batch, a stage of the other half can run. All layers of a kind share their stages,
so each is compiled once. Runs on plain `invoke_subgraph` calls (see `regions.restore_region_mutation`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dscompile.passes.engine.fxutil import emit, fake_mode
from dscompile.passes.engine.optable import VIEWS
from dscompile.passes.halving import Unsplittable
from dscompile.passes.ordering import STARTS, WAITS, has_exchanges
from dscompile.passes.regions import HOP, region_calls, region_module
from dscompile.passes.share import written_arguments

_VIEWS = VIEWS - {operator.getitem}
_LAYER = "dsv4_layer"
NAMES = ("send", "experts", "receive")
#: Position of `after` among the arguments of a start.
AFTER = {torch.ops.dsv4_ep.dispatch.default: 5, torch.ops.dsv4_ep.combine.default: 2}


@dataclass
class _Stage:
    """One stage being built: its graph, and where in it the region's values are.

    inputs: values of the region (arguments, or results of an earlier stage) that are its arguments, in order, the
    ticket to start after (None) included. outputs: values that it returns.
    """

    graph: Graph = field(default_factory=Graph)
    here: dict[Node, Node] = field(default_factory=dict)
    inputs: dict[Node | None, Node] = field(default_factory=dict)
    outputs: list[Node] = field(default_factory=list)
    module: GraphModule | None = None


def layer_of_stage(call: Node) -> str:
    """The layer that a stage's call is part of; "" for any other node."""
    found: str = call.meta.get(_LAYER, "")
    return found


def cut_regions(gm: GraphModule, label: Callable[[Node], str]) -> None:
    """Cuts every region of `gm` that has an exchange; stages know the layer that `label` says of its call.

    Raises:
        Unsplittable: a region with several exchanges, or that reads what an earlier stage overwrites.
    """
    stages: dict[GraphModule, list[_Stage]] = {}
    calls = [call for call in region_calls(gm) if has_exchanges(region_module(gm, call).graph)]
    if not calls:
        return
    no_ticket = _no_ticket(gm, calls)
    for call in calls:
        region = region_module(gm, call)
        if region not in stages:
            stages[region] = _cut(gm, region, str(call.args[1]))
        call.meta[_LAYER] = label(call)
        _replace(gm, call, region, stages[region], no_ticket)
    for node in list(gm.graph.find_nodes(op="get_attr")):
        if not node.users:
            gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    gm.recompile()


def _cut(gm: GraphModule, region: GraphModule, name: str) -> list[_Stage]:
    kinds = [node.target for node in region.graph.nodes if node.target in STARTS or node.target in WAITS]
    if len(kinds) != 4:
        raise Unsplittable(f"region {name} has {kinds.count(STARTS[0])} exchanges of tokens, needed: one")
    stage_of = _stages_of(region)
    written = _written(region, stage_of, name)
    stages = [_Stage() for _ in NAMES]
    builder = _Builder(region, stages, stage_of, written, name)
    output = region.graph.output_node()
    for node in region.graph.nodes:
        if node.op == "call_function" and not builder.is_cheap(node):
            builder.copy(node)
    for result in output.args[0]:  # type: ignore[union-attr]
        if isinstance(result, Node):
            builder.hand_out(result)
    for stage, what in zip(stages, NAMES, strict=True):
        stage.graph.output(tuple(stage.here[value] for value in stage.outputs))
        stage.graph.lint()
        stage.module = GraphModule(region, stage.graph)
        gm.add_submodule(f"{name}_{what}", stage.module)
    return stages


def _stages_of(region: GraphModule) -> dict[Node, int]:
    """How many waits each node needs, itself included."""
    found: dict[Node, int] = {}
    for node in region.graph.nodes:
        before = max((found[source] for source in node.all_input_nodes), default=0)
        found[node] = before + (node.target in WAITS)
    return found


def _written(region: GraphModule, stage_of: dict[Node, int], name: str) -> dict[Node, tuple[Node, int]]:
    """Value that is written back -> its argument and the stage after which it stands there."""
    found: dict[Node, tuple[Node, int]] = {}
    places = region.graph.find_nodes(op="placeholder")
    for position, value in written_arguments(region).items():
        if value.op == "placeholder":
            raise Unsplittable(f"region {name} writes one argument to another")
        found[value] = (places[position], stage_of[value])
    return found


@dataclass
class _Builder:
    region: GraphModule
    stages: list[_Stage]
    stage_of: dict[Node, int]
    written: dict[Node, tuple[Node, int]]
    name: str

    def is_cheap(self, node: Node) -> bool:
        """A view, a size or an attribute: computed in every stage that needs it and never handed over."""
        return node.op == "get_attr" or node.target in _VIEWS or not _is_tensorlike(node)

    def copy(self, node: Node) -> None:
        number = self.stage_of[node]
        stage = self.stages[number]
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: self.value(source, number))
        if node.target in STARTS:
            ticket = self._argument(stage, None, node)
            position = AFTER[node.target]
            args = (*args[:position], ticket, *args[position + 1 :])
        stage.here[node] = self._emit(stage, node, args, kwargs)
        if node.target in STARTS:
            self.hand_out(node)

    def value(self, node: Node, number: int) -> Node:
        """A value of the region in a stage."""
        stage = self.stages[number]
        if node in self.written and self.written[node][1] < number:
            node = self.written[node][0]  # an earlier stage has put it there
        elif node.op == "placeholder":
            for place, when in self.written.values():
                if place is node and when < number:
                    raise Unsplittable(f"region {self.name} reads {node.name} behind the stage that writes to it")
        if node in stage.here:
            return stage.here[node]
        if node.op == "placeholder":
            return self._argument(stage, node)
        if self.is_cheap(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda source: self.value(source, number))
            stage.here[node] = self._emit(stage, node, args, kwargs)
            return stage.here[node]
        if self.stage_of[node] >= number:
            raise Unsplittable(f"region {self.name} needs {node.name} in stage {number} before it is there")
        self.hand_out(node)
        return self._argument(stage, node)

    def hand_out(self, node: Node) -> None:
        """Make a value a result of its stage."""
        stage = self.stages[self.stage_of[node]]
        self.value(node, self.stage_of[node])
        if node not in stage.outputs:
            stage.outputs.append(node)

    def _argument(self, stage: _Stage, value: Node | None, like: Node | None = None) -> Node:
        if value not in stage.inputs:
            name = value.name if value is not None else "after"
            last = [*stage.inputs.values()]
            with stage.graph.inserting_after(last[-1]) if last else stage.graph.inserting_before(_first(stage.graph)):
                stage.inputs[value] = stage.graph.placeholder(name)
            stage.inputs[value].meta.update((value if value is not None else like).meta)  # type: ignore[union-attr]
            if value is not None:
                stage.here[value] = stage.inputs[value]
        return stage.inputs[value]

    def _emit(self, stage: _Stage, node: Node, args: Any, kwargs: Any) -> Node:
        made = stage.graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta.update(node.meta)
        return made


def _first(graph: Graph) -> Node:
    return next(iter(graph.nodes), graph._root)


def _is_tensorlike(node: Node) -> bool:
    """Whether a node gives tensors (or, as what is written in place does, nothing)."""
    value = node.meta.get("val")
    return value is None or isinstance(value, (torch.Tensor, tuple, list))


def _replace(gm: GraphModule, call: Node, region: GraphModule, stages: list[_Stage], no_ticket: Node) -> None:
    """The stages' calls in place of the region's."""
    outside: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for stage, what in zip(stages, NAMES, strict=True):
            name = f"{call.args[1]}_{what}"
            attribute = gm.graph.get_attr(name)
            operands = [no_ticket if value is None else outside[value] for value in stage.inputs]
            made = gm.graph.call_function(HOP.invoke_subgraph, (attribute, name, *operands))
            made.meta.update({key: value for key, value in call.meta.items() if key != "tensor_meta"})
            made.meta["val"] = tuple(value.meta["val"] for value in stage.outputs)
            for position, value in enumerate(stage.outputs):
                outside[value] = gm.graph.call_function(operator.getitem, (made, position))
                outside[value].meta.update(value.meta)
    results: Any = region.graph.output_node().args[0]
    for user in list(call.users):
        user.replace_all_uses_with(outside[results[user.args[1]]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def _no_ticket(gm: GraphModule, calls: list[Node]) -> Node:
    """What starts that may come at once wait for: a tensor like a ticket."""
    values = (node.meta.get("val") for call in calls for node in call.all_input_nodes)
    device = next(value.device for value in values if isinstance(value, torch.Tensor))
    options = {"dtype": torch.uint8, "device": device, "pin_memory": False}
    with gm.graph.inserting_before(calls[0]):
        return emit(gm.graph, torch.ops.aten.full.default, ([1], 0), options, mode=fake_mode(gm))
