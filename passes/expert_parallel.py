"""Experts spread over ranks: router -> experts becomes dispatch -> this rank's experts -> combine.

Everything else stays as it is: each rank runs its own tokens, the shared expert included, which does not depend on the
exchange and so can run while rows travel.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

import dscompile.distributed.operators
import dscompile.ops  # noqa: F401 - both register what this pass finds in graphs and puts there
from dscompile import compat
from dscompile.distributed import agreement
from dscompile.distributed.layers import ExpertLayer, layer_of
from dscompile.distributed.mesh import Ranks
from dscompile.distributed.placement import Placement
from dscompile.passes.engine import PassContext, PassResult
from dscompile.passes.engine.fxutil import bound_args, emit, fake_mode, layer_name, set_val
from dscompile.passes.engine.graphs import Subgraph, find, subgraphs
from dscompile.passes.regions import HOP, region_operands

aten = torch.ops.aten
_OPS = {
    torch.ops.dsv4.experts.default: ("w13", "w2"),
    torch.ops.dsv4.experts_packed.default: ("w13", "w13_scale", "w2", "w2_scale"),
}


class ExpertParallelError(ValueError):
    """Experts that are spread over ranks, or are to be, in a graph that cannot run so."""


@dataclass(frozen=True)
class StateInput:
    """One more input of a rewritten graph: `what` ("table" or "load") of the layer that input `position` belongs to."""

    position: int
    what: str
    kind: tuple[Any, ...]

    def of(self, inputs: Sequence[Any]) -> Any:
        """The tensor, for the inputs of a call.

        Raises:
            ExpertParallelError: weights that are not spread like those it was compiled for.
        """
        layer = layer_of(inputs[self.position])
        if layer is None or layer.kind != self.kind:
            found = "a plain tensor" if layer is None else f"{layer.name}, {layer.kind}"
            raise ExpertParallelError(
                f"experts' weights of a call are {found}, allowed: weights spread like those it was compiled for, "
                f"{self.kind} (experts, ranks, slots, rank, whole, replicas)"
            )
        return getattr(layer, self.what)


@dataclass(frozen=True)
class Form:
    """How exchanges of a graph travel; see `dscompile.distributed.routing.Spec` and the options `expert_*`.

    facts: what ranks must agree on besides the layers. empty_half: other ranks may run the batch in two halves and
    exchange twice: so does this one, without tokens.
    """

    capacity: int = 0
    overflow: str = "error"
    payload: str = "auto"
    transport: str = "collectives"
    load: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    empty_half: bool = False


@dataclass(frozen=True)
class ExpertParallel:
    """Puts the exchange around every `experts` and `experts_packed`.

    ranks: the group. weights, names: of each placeholder of the graph, the user's tensor (None where unknown) and its
    name. state: filled with what the rewritten graph takes behind its inputs.
    """

    ranks: Ranks
    weights: Sequence[Any]
    names: Sequence[str]
    state: list[StateInput] = field(default_factory=list)
    form: Form = field(default_factory=Form)
    name: str = "expert_parallel"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        """Raises ExpertParallelError, PlacementError."""
        start = time.perf_counter()
        placeholders = gm.graph.find_nodes(op="placeholder")
        known = {node: (value, name) for node, value, name in zip(placeholders, self.weights, self.names)}
        used: set[ExpertLayer] = set()
        notes: list[str] = []
        found = [
            (sub, node, self._layers(gm, sub, node, known))
            for sub in subgraphs(gm) for target in _OPS for node in find(sub.gm.graph, target)
        ]  # fmt: skip
        agreed = agreement.announce({**self.form.facts, "layers with experts": _described(found)})
        for sub, node, layers in found:
            self._exchange(gm, sub, node, layers, agreed)
            used |= set(layers)
            notes += [self._note(layer, node) for layer in layers]
            sub.gm.graph.lint()
            sub.gm.recompile()
        for value, name in known.values():
            layer = layer_of(value)
            if layer is not None and not layer.whole and layer not in used:
                raise ExpertParallelError(
                    f"{name}: its experts are spread over {layer.placement.ranks} ranks but were not recognised in "
                    "the graph, so this rank's share would be taken for all; print(dscompile.last_report()) says why"
                )
        return PassResult(self.name, notes=tuple(sorted(set(notes))), seconds=time.perf_counter() - start)

    def _layers(
        self, gm: GraphModule, sub: Subgraph, node: Node, known: Mapping[Node, tuple[Any, str]]
    ) -> list[ExpertLayer]:
        """The layer of every call of the subgraph, in order of calls."""
        given = bound_args(node)
        stacks = [_source(given[name]) for name in _OPS[node.target]]  # type: ignore[index]
        if sub.gm is gm:
            return [self._layer(gm, [known.get(source, (None, "")) for source in stacks], node)]
        inside = sub.gm.graph.find_nodes(op="placeholder")
        layers = []
        for call in sub.sites:
            operands = dict(zip(inside, region_operands(call), strict=True))
            outside = [_source(operands.get(source)) for source in stacks]
            layers.append(self._layer(gm, [known.get(source, (None, "")) for source in outside], node))
        return layers

    def _layer(self, gm: GraphModule, sources: Sequence[tuple[Any, str]], node: Node) -> ExpertLayer:
        tensors = [value for value, _ in sources]
        found = [layer for layer in map(layer_of, tensors) if layer is not None]
        if found:
            return self._checked(found[0], tensors)
        if any(value is None for value in tensors):
            where = layer_name(node) or "a layer"
            raise ExpertParallelError(
                f"{where}: its experts' weights are computed or handed in, allowed: parameters or buffers of the model"
            )
        _check_router(node)
        experts = tensors[0].shape[0]
        placement = Placement.contiguous(experts, self.ranks.size)
        name = sources[0][1].rsplit(".", 1)[0]
        with unset_fake_temporarily():  # its state is real, also while a graph is traced
            return ExpertLayer(name, placement, self.ranks.rank, tensors, True, members=self.ranks.members)

    def _checked(self, layer: ExpertLayer, tensors: Sequence[Any]) -> ExpertLayer:
        if not all(any(tensor is own for own in layer.weights) for tensor in tensors):
            raise ExpertParallelError(
                f"{layer.name}: some of its weights were replaced after they were spread, allowed: changes in place"
            )
        members = layer.members or tuple(range(layer.placement.ranks))
        if (layer.rank, members) != (self.ranks.rank, self.ranks.members):
            raise ExpertParallelError(
                f"{layer.name}: experts spread over ranks {list(members)} (this is number {layer.rank}) in a group of "
                f"ranks {list(self.ranks.members)} (this is number {self.ranks.rank}), allowed: the mesh given to "
                "shard_experts"
            )
        return layer

    def _exchange(self, gm: GraphModule, sub: Subgraph, node: Node, layers: list[ExpertLayer], agreed: str) -> None:
        first = layers[0]
        kinds = {layer.kind for layer in layers}
        if len(kinds) > 1:
            raise ExpertParallelError(
                f"{', '.join(layer.name for layer in layers)}: layers of one kind with unlike experts, slots or "
                f"replicas ({sorted(kinds)}), allowed: the same numbers"
            )
        given = bound_args(node)
        mode = fake_mode(gm)
        if mode.shape_env is not None:
            compat.allow_data_dependent_shapes(mode.shape_env)
        tables = [self._state(gm, layer, "table", mode) for layer in layers]
        loads = [self._state(gm, layer, "load", mode) for layer in layers] if self.form.load else None
        table = tables[0] if sub.gm is gm else _operand(sub, tables, "expert_table")
        load = None if loads is None else loads[0] if sub.gm is gm else _operand(sub, loads, "expert_load")
        self._check_tokens(first, given["x"])
        _rewrite(sub.gm.graph, node, given, table, load, first, self.ranks, self.form, agreed, mode)

    def _state(self, gm: GraphModule, layer: ExpertLayer, what: str, mode: Any) -> Node:
        """A tensor of the layer's state as one more input of the graph. It goes with the weights of each call: Dynamo
        runs one graph for every module that has the same code."""
        position = next(i for i, value in enumerate(self.weights) if any(value is own for own in layer.weights))
        wanted = StateInput(position, what, layer.kind)
        inputs = gm.graph.find_nodes(op="placeholder")
        if wanted in self.state:
            return inputs[len(inputs) - len(self.state) + self.state.index(wanted)]
        with gm.graph.inserting_after(inputs[-1]):
            node = gm.graph.placeholder(f"expert_{what}_{len(inputs)}")
        set_val(node, mode.from_tensor(getattr(layer, what), static_shapes=True))
        self.state.append(wanted)
        return node

    def _check_tokens(self, layer: ExpertLayer, x: Node) -> None:
        tokens = x.meta["val"].shape[0]
        if isinstance(tokens, int) and 0 < self.form.capacity < tokens and self.form.overflow == "error":
            raise ExpertParallelError(
                f"{layer.name}: {tokens} tokens on this rank may have as many rows for another, option "
                f"'expert_capacity' is {self.form.capacity}; allowed: at least {tokens}, or expert_overflow='exact'"
            )

    def _note(self, layer: ExpertLayer, node: Node) -> str:
        form = f"padded to {self.form.capacity} rows a rank" if self.form.capacity else "exact"
        placement = layer.placement
        return (
            f"{layer.name}: {placement.experts} experts in {placement.slots_per_rank} slots on each of "
            f"{placement.ranks} ranks, {form}, payload {payload_of(self.form, node)}, {self.form.transport}"
        )


def _described(found: Sequence[tuple[Subgraph, Node, list[ExpertLayer]]]) -> str:
    """What exchanges a graph has, in words that are the same for every shape of its inputs."""
    lines = set()
    for _, node, layers in found:
        given = bound_args(node)
        width, top_k = given["x"].meta["val"].shape[1], given["indices"].meta["val"].shape[1]
        for layer in layers:
            slots = layer.placement.slots_per_rank
            lines.add(f"{layer.name}: {layer.placement.experts} in {slots} slots, top-{top_k}, width {width}")
    return ", ".join(sorted(lines))


def payload_of(form: Form, node: Node) -> str:
    """Of an exchange: "auto" is fp8 where the experts round their rows to it anyway, which then loses nothing."""
    if form.payload != "auto":
        return form.payload
    return "fp8" if node.target is torch.ops.dsv4.experts_packed.default else "plain"


def _rewrite(
    graph: Graph, node: Node, given: dict[str, Any], table: Node, load: Node | None, layer: ExpertLayer, ranks: Ranks,
    form: Form, agreed: str, mode: Any,
) -> None:  # fmt: skip
    x, indices, weights = given["x"], given["indices"], given["weights"]
    slots = layer.placement.slots_per_rank
    ep = torch.ops.dsv4_ep

    def add(target: Any, *args: Any) -> Node:
        return emit(graph, target, args, like=node, mode=mode)

    def send(tokens: tuple[Node, Node, Node], counted: Node | None, after: Node | None) -> Node:
        return add(
            ep.dispatch.default, *tokens, table, counted, after, ranks.group, ranks.size, slots, form.capacity,
            form.overflow, payload_of(form, node), form.transport, agreed,
        )  # fmt: skip

    def run(ticket: Node, tokens: tuple[Node, Node, Node], after: Node | None) -> Node:
        arrived = add(ep.dispatch_wait.default, ticket, *tokens, ranks.size, form.capacity, form.overflow)
        rows, wanted, shares = (add(operator.getitem, arrived, i) for i in range(3))
        local = dict(given, x=rows, indices=wanted, weights=shares, out_dtype=x.meta["val"].dtype)
        if layer.whole:
            for name in _OPS[node.target]:  # type: ignore[index]
                first = layer.rank * slots
                local[name] = add(aten.slice.Tensor, given[name], 0, first, first + slots)
        return add(ep.combine.default, ticket, add(node.target, *local.values()), after)

    with graph.inserting_before(node):
        tokens, none = (x, indices, weights), None
        ticket = send(tokens, load, None)
        if form.empty_half:
            none = tuple(add(aten.slice.Tensor, value, 0, 0, 0) for value in tokens)
            second = send(none, None, ticket)  # type: ignore[arg-type]
        back = run(ticket, tokens, second if none else None)
        rest = [add(ep.combine_wait.default, run(second, none, back), none[0], given["out_dtype"])] if none else None
        out = add(ep.combine_wait.default, back, x, given["out_dtype"], rest)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _source(value: Any) -> Any:
    """The placeholder that a weight comes from, through whatever decodes or views it."""
    while isinstance(value, Node) and value.op == "call_function":
        shapes = ((n, getattr(n.meta.get("val"), "shape", ())) for n in value.all_input_nodes)
        stacked = [n for n, shape in shapes if len(shape) > 1]
        if not stacked:
            return value
        value = stacked[0]
    return value


def refuse_copies(gm: GraphModule) -> None:
    """For graphs whose experts are on every rank.

    Raises:
        ExpertParallelError: see `_check_router`.
    """
    for sub in subgraphs(gm):
        for node in [n for target in _OPS for n in find(sub.gm.graph, target)]:
            _check_router(node)


def _check_router(node: Node) -> None:
    """Raises ExpertParallelError where a router chooses among other experts than there are weights of: as in a copy of
    a model that holds one rank's experts, which does not know of the others."""
    given = bound_args(node)
    held = given["w13"].meta["val"].shape[0]
    for router in given["indices"].all_input_nodes:
        if router.target is torch.ops.dsv4.router.default:
            chosen = bound_args(router)["weight"].meta["val"].shape[0]
            if chosen != held:
                raise ExpertParallelError(
                    f"{layer_name(node) or 'a layer'}: weights of {held} experts and a router that chooses among "
                    f"{chosen}, allowed: a model that shard_experts was called on (a copy of one is none)"
                )


def _operand(sub: Subgraph, values: Sequence[Node], name: str) -> Node:
    """One more argument of a region: its placeholder."""
    graph = sub.gm.graph
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        placeholder = graph.placeholder(f"{name}_{len(graph.find_nodes(op='placeholder'))}")
    set_val(placeholder, values[0].meta["val"])
    for call, value in zip(sub.sites, values, strict=True):
        if call.target is HOP.invoke_subgraph:
            call.args = (*call.args, value)
        else:
            call.kwargs = {**call.kwargs, f"arg{len(region_operands(call))}": value}
    return placeholder
