"""How many tokens of each sequence every value of a prefill graph is needed for.

What is wanted of a prefill are the logits of each sequence's last token and the rows that its caches keep. Going back
from these, each operation says which tokens of its inputs it needs for the last k of its result: one that works row by
row k, attention to a window of W rows k + W - 1 of the rows and k of the queries, a ring of W rows the last W. Whatever
is not known to get by with fewer needs every token. Nothing but the graph is consulted.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine.fxutil import bound_args
from dscompile.passes.engine.optable import is_pure, op_name
from dscompile.passes.regions import is_region_call, region_module, region_operands, region_results
from dscompile.passes.token_outputs import ATTENTION, returned, wanted_outputs
from dscompile.passes.token_rows import TokenSizes, row_inputs
from dscompile.passes.token_windows import Place, WindowRows, kept_tokens, window_rows

aten, dsv4 = torch.ops.aten, torch.ops.dsv4

#: Operations that write rows into a pool: the argument with the slots, and all arguments with a row per token.
STORES: dict[Any, tuple[str, tuple[str, ...]]] = {
    dsv4.norm_rope_store.default: ("slots", ("x", "cos", "sin", "slots")),
    dsv4.store_rows.default: ("slots", ("rows", "slots")),
}


@dataclass(frozen=True)
class Need:
    """The last `tokens` tokens of each sequence; a row per token in the first `lead` axes."""

    lead: int
    tokens: int


#: Every token, or a value that is not one row per token.
WHOLE = None

#: The operation that made all tokens necessary, and why.
Cause = tuple[Node, str]


@dataclass
class GraphNeeds:
    """What one graph's values are needed for.

    needs: every value that is needed at all. rows: of each operation that can run on fewer tokens, the inputs that hold
    tokens, with their `lead`; runs: on how many it has to. windows: attention's window rows; chunks: how many of the
    chunk's own it needs. calls: of region calls, the region's needs. causes: of each value that all tokens are needed
    of, the operation that needs them, and why. logits: the output of which each sequence's last token is enough.
    """

    needs: dict[Node, Need | None] = field(default_factory=dict)
    rows: dict[Node, dict[Node, int]] = field(default_factory=dict)
    runs: dict[Node, int] = field(default_factory=dict)
    windows: dict[Node, WindowRows] = field(default_factory=dict)
    chunks: dict[Node, int] = field(default_factory=dict)
    calls: dict[Node, GraphNeeds] = field(default_factory=dict)
    causes: dict[Node, Cause] = field(default_factory=dict)
    logits: Node | None = None

    def tokens(self) -> int:
        """The most tokens that any of the values is needed for; 0 if none of them holds tokens.

        A chunk's rows count even where all of them are needed for something else.
        """
        return max(
            (*(need.tokens for need in self.needs.values() if need is not None), *self.chunks.values()), default=0
        )


@dataclass
class Liveness:
    """Analysis of a graph and its regions.

    positions: the graph's node with every token's position, proven to rise by one. limit: a bound for every need, for
    an approximation.
    """

    gm: GraphModule
    positions: Node
    sizes: TokenSizes
    limit: int | None = None
    window: int = 0

    def run(self) -> GraphNeeds:
        """The needs of the outermost graph: of its logits the last row, and what its stores keep."""
        outputs = wanted_outputs(self.gm, self.positions, self.sizes)
        found = GraphNeeds(logits=outputs.logits)
        for value in filter(lambda each: isinstance(each, Node), returned(self.gm)):
            need = Need(2, 1) if value is outputs.logits else WHOLE
            self._add(found, value, need, outputs.whole.get(value))
        found.needs[self.positions] = WHOLE
        self._walk(self.gm, found, Place(self.positions))
        return found

    def _walk(self, gm: GraphModule, found: GraphNeeds, place: Place) -> None:
        for node in reversed(gm.graph.nodes):
            if node.op != "call_function":
                continue
            if is_region_call(node) and place.operands:
                self._all(found, node, "a region inside a region")
            elif is_region_call(node):
                self._region(gm, node, found, place)
            elif node.target is aten.copy_.default:
                if not _memory_of_call(node.args[1]):
                    self._all(found, node, "writes all of it to a tensor of the caller's")
            elif node.target in STORES or node.target is aten.index_put.default:
                self._store(node, found, place)
            elif node.target is operator.getitem:
                if node in found.needs and not is_region_call(node.args[0]):  # type: ignore[arg-type]
                    self._add(found, node.args[0], found.needs[node], found.causes.get(node))  # type: ignore[arg-type]
            elif node in found.needs or not is_pure(node.target):
                self._operation(node, found, place)

    def _operation(self, node: Node, found: GraphNeeds, place: Place) -> None:
        need = found.needs.get(node)
        if need is WHOLE:
            return self._all(found, node, "" if node in found.needs else "may do more than give a result")
        if node.target is ATTENTION:
            return self._attention(node, need, found, place)
        rows = row_inputs(node, need.lead, self.sizes) if is_pure(node.target) else None
        if rows is None:
            return self._all(found, node, f"{op_name(node.target)} is not known to work token by token")
        self._rows(found, node, rows, need.tokens)

    def _rows(self, found: GraphNeeds, node: Node, rows: dict[Node, int], tokens: int) -> None:
        found.rows[node], found.runs[node] = rows, self._bound(tokens)
        for source in node.all_input_nodes:
            need = Need(rows[source], tokens) if source in rows else WHOLE
            self._add(found, source, need, (node, _takes_whole(node)))

    def _attention(self, node: Node, need: Need, found: GraphNeeds, place: Place) -> None:
        given = bound_args(node)
        window = window_rows(node, self.sizes, place)
        if isinstance(window, str):
            return self._all(found, node, window)
        names = ("q", "q_pos", "comp_idx", "n_visible", "cos", "sin")
        rows = {given[name]: 2 for name in names if given[name] is not None}
        if not all(self._holds_rows(source, 2) for source in rows):
            return self._all(found, node, "it takes arguments that have no row per token")
        found.rows[node], found.runs[node], found.windows[node] = rows, need.tokens, window
        cause = (node, _takes_whole(node))
        for source in rows:
            self._add(found, source, need, cause)
        found.chunks[node] = self._bound(need.tokens + window.reach - 1)
        self._add(found, window.chunk, Need(2, found.chunks[node]), cause)
        for source in (window.history, given["comp_kv"], given["sink"]):
            if source is not None:
                self._add(found, source, WHOLE, cause)

    def _store(self, node: Node, found: GraphNeeds, place: Place) -> None:
        """Rows that a store does not keep are needed by nobody; of a ring these are all but its last."""
        if node.target is aten.index_put.default:
            pool, slots, values = node.args[:3]
            if len(slots) != 1 or len(node.args) > 3 and node.args[3]:  # type: ignore[arg-type]
                return self._all(found, node, "writes elsewhere than to rows that each token has one of")
            slot, rows, own = slots[0], [slots[0], values], 0  # type: ignore[index]
            ranks = {slot: 1, values: pool.meta["val"].dim()}  # type: ignore[union-attr]
        else:
            given, (name, names) = bound_args(node), STORES[node.target]
            slot, rows, own = given[name], [given[each] for each in names], 1
            ranks = {}
        fits = all(isinstance(row, Node) and self.sizes.fits(row.meta["val"], 1) for row in rows)
        # Values of fewer axes than the pool's rows are written to each of them.
        fits = fits and all(row.meta["val"].dim() == rank for row, rank in ranks.items())
        kept = kept_tokens(slot, place) if fits else None
        need = found.needs.get(node) if own else Need(1, 0)
        if kept is None:
            return self._all(found, node, "stores rows of all tokens")
        if own and node in found.needs and need is WHOLE:
            return self._all(found, node)
        if need is not None and need.lead != 1:
            return self._all(found, node, "gives rows that are read in another form")
        self.window = max(self.window, kept)
        tokens = max(kept, need.tokens if need is not None else 0)
        found.needs[node] = Need(1, self._bound(tokens)) if own else WHOLE
        self._rows(found, node, dict.fromkeys(rows, 1), tokens)

    def _region(self, gm: GraphModule, call: Node, found: GraphNeeds, place: Place) -> None:
        region, operands = region_module(gm, call), region_operands(call)
        inside = GraphNeeds()
        wanted = {user.args[1]: user for user in call.users if user in found.needs}
        for index, value in enumerate(returned(region)):
            if index in wanted and isinstance(value, Node):
                user = wanted[index]
                self._add(inside, value, found.needs[user], found.causes.get(user))
        arguments = region.graph.find_nodes(op="placeholder")
        self._walk(region, inside, place.inside(dict(zip(arguments, operands, strict=True))))
        results = [user for index, user in wanted.items() if index < region_results(call)]  # type: ignore[operator]
        if cause := self._why_whole(call, inside, found, results):
            found.causes[call] = cause
            return self._all(found, call)
        found.calls[call] = inside
        rows: dict[Node, int] = {}
        for argument, operand in zip(arguments, operands, strict=True):
            need = inside.needs.get(argument, WHOLE)
            if isinstance(operand, Node):
                self._add(found, operand, need, (call, inside.causes.get(argument, (call, ""))[1]))
                if need is not None:
                    rows[operand] = need.lead
        found.rows[call], found.runs[call] = rows, inside.tokens()

    def _why_whole(self, call: Node, inside: GraphNeeds, found: GraphNeeds, results: list[Node]) -> Cause | None:
        """Why a region has to run on all tokens; None if it does not: then all that it works on are rows of tokens."""
        for user in results:
            if found.needs[user] is WHOLE:
                return found.causes.get(user, (call, "all tokens of its result are needed"))
        mixed = [
            source
            for node, rows in inside.rows.items()
            for source in (*rows, *([inside.windows[node].chunk] if node in inside.windows else []))
            if inside.needs[source] is WHOLE
        ]
        if mixed or not inside.rows:
            whys = [inside.causes[source][1] for source in mixed if source in inside.causes]
            whys += [why for node, (_, why) in inside.causes.items() if node.op == "call_function"]
            return call, next(filter(None, whys), "works on all tokens")
        return None

    def _all(self, found: GraphNeeds, node: Node, why: str = "") -> None:
        """The operation runs on all tokens, because of itself or (no `why`) because all of its result are needed."""
        found.rows.pop(node, None)
        found.needs[node] = WHOLE
        cause = (node, why) if why else found.causes.get(node, (node, ""))
        found.causes[node] = cause
        for source in node.all_input_nodes:
            self._add(found, source, WHOLE, cause)

    def _add(self, found: GraphNeeds, node: Node, need: Need | None, cause: Cause | None) -> None:
        """Notes a need; `cause` says why if it comes to all tokens."""
        if need is not None and not self._holds_rows(node, need.lead):
            need = WHOLE
        if need is not None:
            need = Need(need.lead, self._bound(need.tokens))
        if node in found.needs:
            before = found.needs[node]
            same = before is not None and need is not None and before.lead == need.lead
            need = max(before, need, key=lambda each: each.tokens) if same else WHOLE  # type: ignore[union-attr, type-var]
        found.needs[node] = need
        if need is WHOLE and cause is not None:
            found.causes.setdefault(node, cause)

    def _holds_rows(self, node: Node, lead: int) -> bool:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):  # of several results those that are used are checked where they are taken
            return True
        return self.sizes.fits(value, lead)

    def _bound(self, tokens: int) -> int:
        return tokens if self.limit is None else min(tokens, self.limit)


def _takes_whole(node: Node) -> str:
    return f"{op_name(node.target)} takes all tokens of what it is given"


def _memory_of_call(value: Any) -> bool:
    """Whether a value only names what a region call left in memory it was handed."""
    if not isinstance(value, Node) or value.target is not operator.getitem:
        return False
    call, index = value.args
    return isinstance(call, Node) and is_region_call(call) and index >= region_results(call)  # type: ignore[operator]
