"""Prefill without the tokens that nobody needs: the layers behind the last KV source run on each sequence's tail.

`liveness` says for how many tokens at its end a sequence needs every value. Where that is fewer than all, operations
run on the tail alone: rows are picked where values come from the part that runs on all tokens, and a region that runs
on a tail is a copy of it for that many tokens. How much a value depends on is decided exactly; values are then computed
for a few numbers of tokens only, so that few regions are made: the last token, and one tail for all layers.

A sequence that is not longer than the tail is not cut: its chunk and what it reads of the rings are as they were. Of a
longer one the rings in front of the tail are stale, which reaches as far as the windows do, layer by layer. The exact
form has that many tokens in front of those that are kept; since the rings end every chunk exact, it is exact for
prompts in several chunks as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from dscompile.passes.dialects.deepseek_v41.positions import why_padding_may_be_in_front
from dscompile.passes.elision import Elision
from dscompile.passes.engine.fxutil import bound_args, emit, evaluate, fake_mode, set_val
from dscompile.passes.engine.graphs import find
from dscompile.passes.liveness import ATTENTION, GraphNeeds, Liveness
from dscompile.passes.regions import (
    HOP,
    is_region_call,
    redirect_call,
    region_calls,
    region_module,
    region_operands,
    region_results,
)
from dscompile.passes.shorten import Shortener, aten, erase_unused, rewritten, shortened_region
from dscompile.passes.tail import Tails
from dscompile.passes.token_rows import TokenSizes

Label = Callable[[Node], str]


class ElisionError(ValueError):
    """A tail that is too short for what decoding reads. The message names the value and what is allowed."""


def elide(gm: GraphModule, mode: str, tail: int | None, label: Label) -> Elision:
    """Cuts a recognised prefill graph to what its last logits and its caches need.

    A graph whose length is dynamic gets the guard that it is longer than the tail. Logits of other tokens than each
    sequence's last are 0 afterwards.

    Args:
        gm: the graph, with regions in functionalised form; changed in place.
        mode: "exact" or "bounded".
        tail: tokens of each sequence that "bounded" keeps; None takes the width of the widest ring.
        label: the layer that a region call or another operation belongs to, "" for none.

    Raises:
        ElisionError: `tail` is shorter than a ring.
    """
    positions = _positions(gm)
    if isinstance(positions, str):
        return Elision(mode, reason=positions)
    batch, length = positions.meta["val"].shape
    if not isinstance(batch, int):
        return Elision(mode, reason="the batch size is dynamic")
    if isinstance(length, int) and length == 1:
        return Elision(mode, reason="a step of one token")
    liveness = Liveness(gm, positions, TokenSizes(batch, length))
    found = liveness.run()
    needed, window = found.tokens(), liveness.window
    if not _layers_among(found):
        return Elision(mode, reason=_why_nothing(gm, found, label))
    if unproven := why_padding_may_be_in_front(positions):
        return Elision(mode, reason=unproven)
    layers, partial = _layers(found, label, liveness.sizes)
    if mode == "bounded":
        tail = window if tail is None else tail
        if tail < window:
            raise ElisionError(f"option 'elide_tail' is {tail}; allowed: >= {window}, the rows that a ring here keeps")
        if tail < needed:
            found = Liveness(gm, positions, TokenSizes(batch, length), limit=tail).run()
    longest = found.tokens()
    if not bool(length > longest):  # the guard
        return Elision(mode, None, needed, window, reason=f"prompts of up to {longest} tokens need all of them")
    writer = _Writer(gm, found, Tails(positions, batch), clip=longest < needed)
    writer.write()
    return Elision(mode, longest, needed, window, layers, partial, exact=longest >= needed)


def _positions(gm: GraphModule) -> Node | str:
    """The one tensor of positions that every attention takes, or what is wrong with it."""
    found = {bound_args(node)["q_pos"]: None for node in find(gm.graph, ATTENTION)}
    for call in region_calls(gm):
        region = region_module(gm, call)
        outside = dict(zip(region.graph.find_nodes(op="placeholder"), region_operands(call), strict=True))
        inner = (bound_args(node)["q_pos"] for node in find(region.graph, ATTENTION))
        found |= {outside.get(position, position): None for position in inner}
    if not found:
        return "no attention was recognised"
    if len(found) > 1:
        return "attention takes positions from several places"
    positions = next(iter(found))
    return positions if positions.graph is gm.graph else "attention takes positions that only its layer knows"


def _layers_among(found: GraphNeeds) -> bool:
    return any(node.target is ATTENTION or node in found.calls for node in found.rows)


def _why_nothing(gm: GraphModule, found: GraphNeeds, label: Label) -> str:
    """What keeps the last layer on all tokens keeps everything in front of it."""
    layers = [node for node in gm.graph.nodes if node.target is ATTENTION or is_region_call(node)]
    causes = [found.causes[node] for node in reversed(layers) if node in found.causes]
    if not causes:
        return "no layer runs on tokens"
    node, why = causes[0]
    where = "" if node.op == "output" else f"{label(node) or node.name}, "
    return f"the last layers need all tokens: {where}{why}"


def _layers(found: GraphNeeds, label: Label, sizes: TokenSizes) -> tuple[dict[str, int], tuple[str, ...]]:
    """Layer -> tokens that it depends on, in order; and the layers of which a part runs on all tokens."""
    layers: dict[str, int] = {}
    for node in sorted(found.rows):
        if (node in found.calls or node.target is ATTENTION) and (name := label(node)):
            layers[name] = max(layers.get(name, 0), found.runs[node], found.chunks.get(node, 0))
    on_all = [node for node in found.needs if node not in found.rows and sizes.lead_of(node.meta.get("val"))]
    whole = {label(node) for node in on_all if node.op == "call_function" and found.needs[node] is None}
    return layers, tuple(name for name in layers if name in whole)


@dataclass
class _Writer:
    """Rewrites the outermost graph. clip: hide the ring's rows where tokens in front of the tail were left out."""

    gm: GraphModule
    found: GraphNeeds
    tails: Tails
    clip: bool
    _levels: dict[Node, int] = field(default_factory=dict)
    _asked: dict[Node, int] = field(default_factory=dict)
    _regions: dict[Any, tuple[Node, GraphModule]] = field(default_factory=dict)

    def write(self) -> None:
        self._choose_levels()
        self._mode = fake_mode(self.gm)
        shorten = Shortener(self.gm.graph, self._mode, self.tails.batch)
        for node in list(self.gm.graph.nodes):
            if node in self.found.calls:
                self._call(node)
            elif node in self.found.windows:
                self._attention(node)
            elif node in self.found.rows:
                level, rows = self._levels[node], self.found.rows[node]
                values = {source: self._value(source, lead, level, node) for source, lead in rows.items()}
                shorten.operation(node, self.found.needs[node], level, values)
            elif node.target is operator.getitem and node.args[0] in self._levels:
                if not is_region_call(node.args[0]):
                    set_val(node, evaluate(node, self._mode))
        self._full_logits()
        erase_unused(self.gm)
        self.gm.graph.lint()
        self.gm.recompile()

    def _choose_levels(self) -> None:
        """How many tokens each operation runs on: the next of few numbers, and what those that use it run on."""
        rows, runs = self.found.rows, self.found.runs
        layer = max(runs[node] for node in rows if node.target is ATTENTION or node in self.found.calls)
        steps = sorted({1, layer, self.found.tokens()})
        asked = self._asked

        def ask(node: Node, level: int) -> None:
            asked[node] = max(asked.get(node, 0), level)

        for node in reversed(self.gm.graph.nodes):
            if node.target is operator.getitem and node in asked:
                ask(node.args[0], asked[node])
            if node not in rows:
                continue
            level = max(next(step for step in steps if step >= runs[node]), asked.get(node, 0))
            self._levels[node] = level
            for source in rows[node]:
                ask(source, level)
            if node in self.found.windows:
                wanted = self.found.chunks[node]
                ask(self.found.windows[node].chunk, max(level, next(step for step in steps if step >= wanted)))

    def _level(self, value: Node) -> int | None:
        """On how many tokens the operation behind a value runs; None for all."""
        if value.target is operator.getitem and isinstance(value.args[0], Node):
            value = value.args[0]
        return self._levels.get(value) if value in self.found.rows and value.op == "call_function" else None

    def _value(self, value: Node, lead: int, level: int, user: Node) -> Node:
        within = self._level(value)
        return value if within == level else self.tails.pick(value, lead, level, within, user)

    def _attention(self, node: Node) -> None:
        level, window = self._levels[node], self.found.windows[node]
        values = {source: self._value(source, lead, level, node) for source, lead in self.found.rows[node].items()}
        reach = self._level(window.chunk) or self._asked[window.chunk]
        chunk = self._value(window.chunk, 2, reach, node)
        first = self.tails.pick(self.tails.positions, 2, reach, None, node)
        hidden = self.tails.hide_history(window.before, reach) if self.clip else None
        shorten = Shortener(self.gm.graph, self._mode, self.tails.batch)
        shorten.attention(node, window, values, chunk, first, hidden, self.tails.sequence)

    def _call(self, call: Node) -> None:
        level, inside = self._levels[call], self.found.calls[call]
        region, operands = region_module(self.gm, call), region_operands(call)
        arguments = region.graph.find_nodes(op="placeholder")
        changed = {
            position: self._value(operands[position], need.lead, level, call)
            for position, argument in enumerate(arguments)
            if (need := inside.needs.get(argument)) is not None
        }
        hidden: dict[int, tuple[Node, Node]] = {}
        if self.clip:
            widths = dict.fromkeys(window.before for window in inside.windows.values())
            hidden = {width: self.tails.hide_history(width, level) for width in widths}
        unused = frozenset(range(region_results(call))) - {u.args[1] for u in call.users if u in self.found.needs}  # type: ignore[operator]
        key = (region, level, unused, frozenset(changed), frozenset(hidden), rewritten(inside))
        if key not in self._regions:
            short = shortened_region(region, inside, level, self.tails.batch, changed, hidden, unused)
            same = sum(taken[:2] == key[:2] for taken in self._regions)  # of which each call needs something else
            name = f"{_attribute(call).target}_tail{level}" + (f"_{same + 1}" if same else "")
            setattr(self.gm, name, short)
            with self.gm.graph.inserting_before(call):
                self._regions[key] = self.gm.graph.get_attr(name), short
        attribute, short = self._regions[key]
        extra = [each for pair in hidden.values() for each in pair]
        changed |= {len(operands) + position: value for position, value in enumerate(extra)}
        redirect_call(call, attribute, str(attribute.target), changed)
        call.meta.pop("eager_input_vals", None)  # of the call as it was
        outputs: Any = short.graph.output_node().args[0]
        results = [value.meta.get("val") if isinstance(value, Node) else value for value in outputs]
        call.meta["val"] = (*results, *call.meta["val"][len(results) :])
        for user in call.users:
            set_val(user, call.meta["val"][user.args[1]])

    def _full_logits(self) -> None:
        """Logits keep their shape: rows that were not computed are 0."""
        logits, tails = self.found.logits, self.tails
        level = None if logits is None else self._level(logits)
        if logits is None or level is None:
            return
        output, like = self.gm.graph.output_node(), logits.meta["val"]
        sizes = [tails.batch, tails.length, *like.shape[2:]]
        options = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
        with self.gm.graph.inserting_before(output):
            zeros = emit(self.gm.graph, aten.full.default, (sizes, 0), options, like=logits, mode=self._mode)
            args = (zeros, [tails.sequence, tails.index(level)], logits)
            full = emit(self.gm.graph, aten.index_put.default, args, like=logits, mode=self._mode)
        output.args = fx.map_arg(output.args, lambda value: full if value is logits else value)


def _attribute(call: Node) -> Node:
    found = call.args[0] if call.target is HOP.invoke_subgraph else call.kwargs["subgraph"]
    assert isinstance(found, Node)
    return found
