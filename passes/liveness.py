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
from dscompile.passes.token_rows import TokenSizes, row_inputs
from dscompile.passes.token_windows import Place, WindowRows, kept_tokens, window_rows

aten, dsv4 = torch.ops.aten, torch.ops.dsv4
ATTENTION = dsv4.sparse_attention.default

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


@dataclass
class GraphNeeds:
    """What one graph's values are needed for.

    needs: every value that is needed at all. rows: of each operation that can run on fewer tokens, the inputs that hold
    tokens, with their `lead`; runs: on how many it has to. windows: attention's window rows. calls: of region calls,
    the region's needs. whole: (operation, reason) wherever all tokens became necessary, in graph order from the end.
    """

    needs: dict[Node, Need | None] = field(default_factory=dict)
    rows: dict[Node, dict[Node, int]] = field(default_factory=dict)
    runs: dict[Node, int] = field(default_factory=dict)
    windows: dict[Node, WindowRows] = field(default_factory=dict)
    calls: dict[Node, GraphNeeds] = field(default_factory=dict)
    whole: list[tuple[Node, str]] = field(default_factory=list)

    def tokens(self) -> int:
        """The most tokens that any of the values is needed for; 0 if none of them holds tokens."""
        return max((need.tokens for need in self.needs.values() if need is not None), default=0)


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
        """The needs of the outermost graph: of outputs with a row per token the last, and what its stores keep."""
        found = GraphNeeds()
        for value in _outputs(self.gm):
            floating = isinstance(value.meta.get("val"), torch.Tensor) and value.meta["val"].is_floating_point()
            logits = floating and self.sizes.fits(value.meta["val"], 2) and value.meta["val"].is_contiguous()
            self._add(found, value, Need(2, 1) if logits else WHOLE)
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
                    self._all(found, node)
            elif node.target in STORES or node.target is aten.index_put.default:
                self._store(node, found, place)
            elif node.target is operator.getitem:
                if node in found.needs and not is_region_call(node.args[0]):  # type: ignore[arg-type]
                    self._add(found, node.args[0], found.needs[node])  # type: ignore[arg-type]
            elif node in found.needs or not is_pure(node.target):
                self._operation(node, found, place)

    def _operation(self, node: Node, found: GraphNeeds, place: Place) -> None:
        need = found.needs.get(node)
        if need is WHOLE:
            return self._all(found, node)
        if node.target is ATTENTION:
            return self._attention(node, need, found, place)
        rows = row_inputs(node, need.lead, self.sizes) if is_pure(node.target) else None
        if rows is None:
            return self._all(found, node, f"{op_name(node.target)} is not known to work token by token")
        self._rows(found, node, rows, need.tokens)

    def _rows(self, found: GraphNeeds, node: Node, rows: dict[Node, int], tokens: int) -> None:
        found.rows[node], found.runs[node] = rows, self._bound(tokens)
        for source in node.all_input_nodes:
            self._add(found, source, Need(rows[source], tokens) if source in rows else WHOLE)

    def _attention(self, node: Node, need: Need, found: GraphNeeds, place: Place) -> None:
        given = bound_args(node)
        window = window_rows(node, self.sizes, place)
        if isinstance(window, str):
            return self._all(found, node, window)
        names = ("q", "q_pos", "comp_idx", "n_visible", "cos", "sin")
        rows = {given[name]: 2 for name in names if given[name] is not None}
        found.rows[node], found.runs[node], found.windows[node] = rows, need.tokens, window
        for source in rows:
            self._add(found, source, need)
        self._add(found, window.chunk, Need(2, need.tokens + window.reach - 1))
        for source in (window.history, given["comp_kv"], given["sink"]):
            if source is not None:
                self._add(found, source, WHOLE)

    def _store(self, node: Node, found: GraphNeeds, place: Place) -> None:
        """Rows that a store does not keep are needed by nobody; of a ring these are all but its last."""
        if node.target is aten.index_put.default:
            pool, slots, values = node.args[:3]
            if len(slots) != 1 or len(node.args) > 3 and node.args[3]:  # type: ignore[arg-type]
                return self._all(found, node)
            slot, rows, own = slots[0], [slots[0], values], 0  # type: ignore[index]
        else:
            given, (name, names) = bound_args(node), STORES[node.target]
            slot, rows, own = given[name], [given[each] for each in names], 1
        fits = all(isinstance(row, Node) and self.sizes.fits(row.meta["val"], 1) for row in rows)
        kept = kept_tokens(slot, place) if fits else None
        need = found.needs.get(node) if own else Need(1, 0)
        if kept is None or (own and node in found.needs and need is WHOLE) or (need is not None and need.lead != 1):
            return self._all(found, node, "" if kept else "stores rows of all tokens")
        self.window = max(self.window, kept)
        tokens = max(kept, need.tokens if need is not None else 0)
        found.needs[node] = Need(1, self._bound(tokens)) if own else WHOLE
        self._rows(found, node, dict.fromkeys(rows, 1), tokens)

    def _region(self, gm: GraphModule, call: Node, found: GraphNeeds, place: Place) -> None:
        region, operands = region_module(gm, call), region_operands(call)
        inside = GraphNeeds()
        wanted = {user.args[1]: found.needs[user] for user in call.users if user in found.needs}
        for index, value in enumerate(_outputs(region)):
            if index in wanted:
                self._add(inside, value, wanted[index])
        arguments = region.graph.find_nodes(op="placeholder")
        self._walk(region, inside, place.inside(dict(zip(arguments, operands, strict=True))))
        reason = self._why_whole(inside, wanted, region_results(call))
        if reason:
            return self._all(found, call, reason)
        found.calls[call] = inside
        rows: dict[Node, int] = {}
        for argument, operand in zip(arguments, operands, strict=True):
            need = inside.needs.get(argument, WHOLE)
            if isinstance(operand, Node):
                self._add(found, operand, need)
                if need is not None:
                    rows[operand] = need.lead
        found.rows[call], found.runs[call] = rows, inside.tokens()

    def _why_whole(self, inside: GraphNeeds, wanted: dict[Any, Need | None], results: int) -> str:
        """Why a region has to run on all tokens; "" if it does not: then all that it works on are rows of tokens."""
        if any(wanted[index] is WHOLE for index in wanted if index < results):
            return "all tokens of its result are needed"
        mixed = [
            source
            for node, rows in inside.rows.items()
            for source in (*rows, *([inside.windows[node].chunk] if node in inside.windows else []))
            if inside.needs[source] is WHOLE
        ]
        if mixed or not inside.rows:
            return next((why for _, why in inside.whole if why), "") or "works on all tokens"
        return ""

    def _all(self, found: GraphNeeds, node: Node, why: str = "") -> None:
        """The operation runs on all tokens."""
        if why:
            found.whole.append((node, why))
        found.rows.pop(node, None)
        found.needs[node] = WHOLE
        for source in node.all_input_nodes:
            self._add(found, source, WHOLE)

    def _add(self, found: GraphNeeds, node: Node, need: Need | None) -> None:
        if need is not None and not self._holds_rows(node, need.lead):
            need = WHOLE
        if need is not None:
            need = Need(need.lead, self._bound(need.tokens))
        if node in found.needs:
            before = found.needs[node]
            same = before is not None and need is not None and before.lead == need.lead
            need = max(before, need, key=lambda each: each.tokens) if same else WHOLE  # type: ignore[union-attr, type-var]
        found.needs[node] = need

    def _holds_rows(self, node: Node, lead: int) -> bool:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):  # of several results those that are used are checked where they are taken
            return True
        return self.sizes.fits(value, lead)

    def _bound(self, tokens: int) -> int:
        return tokens if self.limit is None else min(tokens, self.limit)


def _outputs(gm: GraphModule) -> list[Node]:
    leaves = torch.utils._pytree.tree_leaves(gm.graph.output_node().args[0])
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Node)))


def _memory_of_call(value: Any) -> bool:
    """Whether a value only names what a region call left in memory it was handed."""
    if not isinstance(value, Node) or value.target is not operator.getitem:
        return False
    call, index = value.args
    return isinstance(call, Node) and is_region_call(call) and index >= region_results(call)  # type: ignore[operator]
