"""Putting a replacement in place of a match, and refusing to where that would change the program."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from . import fxutil, mutation
from .bindings import Solution, Virtual
from .graphs import after, strip_views
from .matcher import Matcher
from .normalise import explicit_args, normalise, refresh_nodes
from .optable import CHEAP, LAYOUT, PERMUTE, RESHAPE, VIEWS, mutated_args, op_name
from .pattern import PatternError, Structural, Variant
from .records import Match, Reject
from .tracing import trace


def _outer(variant: Variant, s: Solution) -> set[Node]:
    """Graph nodes that stand for the pattern's inputs, or that they are made from."""
    found = (s.map.get(p) for p in variant.inputs)
    return {n.base if isinstance(n, Virtual) else n for n in found if n is not None}


def _inner(variant: Variant, s: Solution) -> set[Node]:
    """Graph nodes that the match consists of."""
    return ({n for p, n in s.map.items() if p not in variant.inputs} | set(s.through)) - _outer(variant, s)


def dtypes_of(node: Node) -> set[torch.dtype]:
    """Dtypes of the tensors that a node computes."""
    return {v.dtype for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)}


def _counts(node: Node) -> bool:
    """Elementwise arithmetic of masks, positions and indices: many layers share it, and it is cheap to repeat."""
    value = node.meta.get("val")
    plain = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex
    return plain and torch.Tag.pointwise in getattr(node.target, "tags", ())


class Rewriter:
    """Applies matches to one graph; remembers traced replacements and which nodes need evaluating again."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        self.mode: FakeTensorMode = fxutil.fake_mode(gm)
        self.writes = mutation.Writes(gm.graph)
        self.dirty: set[Node] = set()
        self.traced: dict[Any, GraphModule] = {}
        self.dtypes: set[torch.dtype] = set().union(*map(dtypes_of, gm.graph.nodes))

    # -- from a raw solution to a checked match ----------------------------------------------------------------------

    def build(self, variant: Variant, matcher: Matcher, s: Solution) -> Match:
        """The match of a solution; inputs that exist only in another layout are created in front of their use."""
        inputs = {}
        for p, name in variant.inputs.items():
            found = s.map.get(p)
            if isinstance(found, Virtual):
                found = self._materialise(found, s)
            if found is not None:
                inputs[name] = found
        dims = matcher.named(s)
        scalars = {name: s.scalars[name] for name in variant.pattern.scalars if name in s.scalars}
        scalars |= {k: dims[k] for k, v in variant.pattern.scalars.items() if type(v) is int and k in dims}
        return Match(
            variant.pattern, tuple(sorted(_inner(variant, s))), inputs, scalars, dims, tuple(s.outputs), variant.dtypes
        )

    def _materialise(self, v: Virtual, s: Solution) -> Node:
        arg = v.arg if v.op is PERMUTE else [s.dims.get(d, d) for d in v.arg]
        arg = [-1 if isinstance(a, torch.SymInt) else a for a in arg]
        with self.graph.inserting_before(after([v.base])):
            return fxutil.emit(self.graph, v.op, (v.base, arg), like=v.base, mode=self.mode)

    def objection(self, variant: Variant, s: Solution) -> str | None:
        """Structural reasons against a solution, checked while other assignments can still be tried."""
        outputs = {n for n in s.outputs if n is not None}
        wild, inner = _outer(variant, s), _inner(variant, s)
        if any(n not in inner for n in outputs):
            return "an output is an input"
        if why := self._escapes(inner, outputs, variant):
            return why
        if len(outputs) > 1 and self._feeds_itself(outputs, wild):
            return "an input depends on an output of the match"
        return None

    def _escapes(self, inner: set[Node], outputs: set[Node], variant: Variant) -> str | None:
        cheap = CHEAP | variant.pattern.shared
        repeatable: dict[Node, bool] = {}
        for node in sorted(inner):
            sources = [n for n in node.all_input_nodes if n in inner and n not in outputs]
            kind = node.op == "get_attr" or node.target in cheap or _counts(node)
            repeatable[node] = kind and all(repeatable[n] for n in sources)
            if node in outputs or repeatable[node]:
                continue
            for user in node.users:
                if user not in inner:
                    what = f"{op_name(node.target)} %{node.name}"
                    return f"{what} is also used by {fxutil.describe(user)}, outside the match"
        return None

    def _feeds_itself(self, outputs: set[Node], wild: set[Node]) -> bool:
        # Nothing but an output leads out of a match, shared constants and the like aside, which any input may use.
        first = min(outputs)
        todo, seen = list(wild), set(wild)
        while todo:
            for source in todo.pop().all_input_nodes:
                if source in outputs:
                    return True
                if source not in seen and first < source:
                    seen.add(source)
                    todo.append(source)
        return False

    # -- applying ----------------------------------------------------------------------------------------------------

    def apply(self, variant: Variant, match: Match) -> Reject | None:
        """Rewrite one match, or say why not (the graph is then unchanged but for dead nodes)."""
        pattern = match.pattern
        if pattern.guard is not None:
            verdict = pattern.guard(match)
            if verdict is not None and not isinstance(verdict, Reject):
                raise PatternError(f"pattern {pattern.name}: guard returned {verdict!r}, expected None or Reject")
            if verdict is not None:
                return verdict
        if isinstance(pattern.replace, Structural):
            verdict = pattern.replace.fn(self.gm, match)
            if verdict is None:
                self.erase(match.nodes)
                self.writes = mutation.Writes(self.graph)
            return verdict
        try:
            body = self._traced(variant, match)
        except Exception as error:  # whatever the replacement's operators refuse
            return Reject(f"the replacement cannot be traced: {type(error).__name__}: {error}", match.anchor)
        results = body.graph.output_node().args[0]
        results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        if why := self._wrong_results(match, results):
            return why
        stores = [n for n in body.graph.nodes if n.op == "call_function" and mutated_args(n.target)]
        point = self._safe_place(match, body, stores, late=False)
        if isinstance(point, Reject) and stores:  # in front of the first use, something still reads the pool as it was
            late = self._safe_place(match, body, stores, late=True)
            point = point if isinstance(late, Reject) else late
        if isinstance(point, Reject):
            return point
        moved, before = point
        new = self._inline(match, body, before)
        for node in moved:
            before.prepend(node)
        self._redirect(match, [new[r] for r in results], bool(stores))
        return None

    def _traced(self, variant: Variant, match: Match) -> GraphModule:
        pattern = match.pattern
        needs_dims = "dims" in inspect.signature(pattern.replace).parameters  # type: ignore[arg-type]
        tensors = {name: node.meta["val"] for name, node in match.inputs.items()}
        key = (
            id(variant),
            *((n, str([*v.shape]), str(v.stride()), v.dtype, v.device) for n, v in tensors.items()),
            *((k, str(v) if isinstance(v, torch.SymInt) else v) for k, v in match.scalars.items()),
            *((k, str(v)) for k, v in match.dims.items() if needs_dims),
        )
        if key not in self.traced:
            others = {**match.scalars, **({"dims": match.dims} if needs_dims else {})}
            wanted = inspect.signature(pattern.replace).parameters  # type: ignore[arg-type]
            tensors = {n: t for n, t in tensors.items() if n in wanted}
            with fxutil.evaluating(self.mode):
                body = trace(pattern.replace, tensors, others)  # type: ignore[arg-type]
            normalise(body, is_pattern=True)
            body.meta["inputs"] = list(tensors)
            self.traced[key] = body
        return self.traced[key]

    def _wrong_results(self, match: Match, results: tuple[Any, ...]) -> Reject | None:
        if len(results) != len(match.outputs):
            name = match.pattern.name
            raise PatternError(f"pattern {name}: replace returns {len(results)} values, search {len(match.outputs)}")
        for i, (old, new) in enumerate(zip(match.outputs, results)):
            if old is None:
                continue
            want, have = old.meta["val"], new.meta["val"]
            if want.dtype != have.dtype:
                return Reject(f"replacement output {i} has dtype {have.dtype}, the graph {want.dtype}", old)
            if not fxutil.same_shape(want.shape, have.shape):
                return Reject(f"replacement output {i} has shape {[*have.shape]}, the graph {[*want.shape]}", old)
            if want.device != have.device:
                return Reject(f"replacement output {i} is on {have.device}, the graph on {want.device}", old)
        return None

    def _safe_place(
        self, match: Match, body: GraphModule, stores: list[Node], late: bool
    ) -> tuple[list[Node], Node] | Reject:
        point = self._place(match, late)
        if isinstance(point, Reject):
            return point
        return self._unsafe_stores(match, body, stores, *point) or point

    def _place(self, match: Match, late: bool) -> tuple[list[Node], Node] | Reject:
        """Where the replacement goes: (nodes that have to move behind it, the node in front of which it goes).

        That is in front of the first use if its inputs are there, or (`late`) where the last output stood.
        """
        inner = set(match.nodes) - self._kept(match)
        outputs = [n for n in match.outputs if n is not None]
        last_input = max(match.inputs.values(), default=outputs[0])
        last = max(outputs)
        users = [u for o in outputs for u in o.users if u not in inner]
        before = last.next
        moved: list[Node] = []
        early = sorted({u for u in users if u < last})
        if early:
            if last_input < early[0] and not late:
                before = early[0]
            else:
                moved, before = self._dependents(early, last), last.next
        for node in match.nodes:
            lo, hi = (node, before) if node < before else (before, node)
            if (write := self.writes.inside(node, lo, hi)) is not None:
                return Reject(f"{op_name(write.target)} %{write.name} writes to what %{node.name} reads", node)
        for node in moved:
            if mutation.written_roots(node) or self.writes.inside(node, node, before):
                return Reject(f"%{node.name} would have to move across a write", node)
        return moved, before

    def _kept(self, match: Match) -> set[Node]:
        """Matched nodes that stay since something outside uses them."""
        inner, kept = set(match.nodes), set[Node]()
        for node in reversed(match.nodes):
            if node not in match.outputs and any(u not in inner or u in kept for u in node.users):
                kept.add(node)
        return kept

    def _dependents(self, early: list[Node], last: Node) -> list[Node]:
        out, todo = set(early), list(early)
        while todo:
            for user in todo.pop().users:
                if user < last and user not in out:
                    out.add(user)
                    todo.append(user)
        return sorted(out)

    def _unsafe_stores(
        self, match: Match, body: GraphModule, stores: list[Node], moved: list[Node], before: Node
    ) -> Reject | None:
        """A replacement may write to an input only if the graph writes it back anyway and nobody reads it old later."""
        holders = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), body.meta["inputs"]))
        for store in stores:
            for owner in mutation.written_roots(store):
                if owner not in holders:
                    continue
                name, pool = holders[owner], match.inputs[holders[owner]]
                memory = strip_views(pool, (RESHAPE,))
                if memory.op != "placeholder" or fxutil.storage(pool.meta["val"]) != fxutil.storage(memory.meta["val"]):
                    return Reject(f"input {name} is written by the replacement but is no graph input", pool)
                epilogue = self.writes.epilogue(memory)
                if epilogue is None:
                    return Reject(f"input {name} is not written back by the graph", pool)
                for reader in mutation.readers(memory):
                    if reader in match.nodes or reader is epilogue or (reader < before and reader not in moved):
                        continue
                    if reader.target is not RESHAPE:
                        return Reject(f"%{reader.name} reads {name} as it was before the store", reader)
        return None

    def _inline(self, match: Match, body: GraphModule, before: Node) -> dict[Node, Node]:
        new: dict[Node, Node] = {}
        names = iter(body.meta["inputs"])
        origin = next((n for n in (match.anchor, *reversed(match.nodes)) if "stack_trace" in n.meta), match.anchor)
        with self.graph.inserting_before(before):
            for node in body.graph.nodes:
                if node.op == "placeholder":
                    new[node] = match.inputs[next(names)]
                elif node.op == "get_attr":
                    new[node] = self._constant(body, node)
                elif node.op == "call_function":
                    copy = self.graph.node_copy(node, lambda n: new[n])
                    copy.meta = {}
                    fxutil.copy_origin(copy, origin)
                    copy.meta["original_aten"] = copy.target
                    copy.meta["dsv4_pattern"] = match.pattern.name
                    fxutil.set_val(copy, fxutil.evaluate(copy, self.mode))
                    explicit_args(copy)
                    self.writes.add(copy)
                    self.dtypes |= dtypes_of(copy)
                    new[node] = copy
        return new

    def _constant(self, body: GraphModule, node: Node) -> Node:
        value = getattr(body, str(node.target))
        name = next(n for i in range(10**6) if not hasattr(self.gm, n := f"_pattern_constant{i}"))
        self.gm.register_buffer(name, value, persistent=False)
        copy = self.graph.get_attr(name)
        fxutil.set_val(copy, self.mode.from_tensor(value))
        return copy

    def _redirect(self, match: Match, results: list[Node], stored: bool) -> None:
        for old, new in zip(match.outputs, results):
            if old is None or old is new:
                continue
            moved = old.meta["val"].stride() != new.meta["val"].stride()
            for user in list(old.users):
                if moved or user.target in VIEWS:
                    self.dirty.add(user)
                user.replace_input_with(old, new)
        self.erase(match.nodes)
        if stored:
            for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
                if strip_views(node.args[1], (RESHAPE,)) is node.args[0] and not node.users:
                    self.writes.drop(node)
                    self.graph.erase_node(node)

    def erase(self, nodes: Iterable[Node]) -> None:
        """Drop those of the nodes that nothing uses any more."""
        for node in sorted((n for n in nodes if not n._erased), reverse=True):
            if not node.users and not mutation.written_roots(node):
                self.dirty.discard(node)
                self.graph.erase_node(node)

    def discard(self, match: Match) -> None:
        """Forget inputs that were created for a match that came to nothing."""
        self.erase(n for n in match.inputs.values() if n.target in LAYOUT and not n.users)

    def finish(self) -> None:
        """Evaluate again what saw a changed layout, drop dead nodes, check the graph."""
        refresh_nodes(self.graph, self.dirty, self.mode)
        self.graph.eliminate_dead_code()  # checks the graph too
        self.gm.recompile()
