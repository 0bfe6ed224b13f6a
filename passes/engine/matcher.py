"""Finding a traced pattern in a graph: depth-first search over pairs of nodes that must agree, with backtracking.

The pattern's output is laid on a graph node; ``unify`` says what follows for the nodes below; further outputs are then
looked for from the nodes matched so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from torch.fx import Node

from .bindings import Alternative, Goal, Solution, Virtual
from .fxutil import same_size
from .optable import LAYOUT, RESHAPE, SLICE, op_name
from .pattern import NAME
from .unify import Unifier

MAX_STEPS = 20_000
Accept = Callable[[Solution], "str | None"]


class Matcher(Unifier):
    """Matches one variant; ``match`` may be called for any number of anchors."""

    def match(self, anchor: Node, output: int = 0, accept: Accept | None = None) -> Solution | None:
        """The first consistent assignment with output number ``output`` at ``anchor`` that ``accept`` lets pass.

        On None, ``self.failure`` holds the constraint that stopped the deepest attempt.
        """
        self.reset()
        goals: Any = None
        for i in range(len(self.v.outputs) - 1, -1, -1):
            if i != output:
                goals = (("output", i), goals)
        goals = ((self.v.outputs[output], anchor), goals)
        choices: list[tuple[int, Any, Iterator[Alternative]]] = []
        for _ in range(MAX_STEPS):
            if goals is None:
                solution = self._solution()
                why = self._incomplete(solution) or (accept(solution) if accept else None)
                if why is None:
                    return solution
                self._fail(why, None, anchor)
            else:
                (p, t), rest = goals
                options = self._output_places(t) if p == "output" else self._alternatives(p, t)
                choices.append((len(self.trail), rest, options))
            while choices:
                mark, rest, options = choices[-1]
                self._undo(mark)
                new = self._first(options, mark)
                if new is not None:
                    goals = self._push(new, rest)
                    break
                choices.pop()
            else:
                return None
        self._fail(f"search given up after {MAX_STEPS} steps", None, anchor)
        return None

    def _first(self, options: Iterator[Alternative], mark: int) -> list[Goal] | None:
        for option in options:
            goals = option()
            if goals is not None:
                return goals
            self._undo(mark)
        return None

    @staticmethod
    def _push(new: list[Goal], rest: Any) -> Any:
        """Inner nodes first, inputs last: operators rule out a wrong path sooner than wildcards do."""
        inputs = [g for g in new if isinstance(g[0], Node) and g[0].op == "placeholder"]
        inner = [g for g in new if g not in inputs]
        for goal in reversed(inner + inputs):
            rest = (goal, rest)
        return rest

    def _solution(self) -> Solution:
        outputs = [n if isinstance(n := self.map.get(o), Node) else None for o in self.v.outputs]
        return Solution(dict(self.map), dict(self.dims), dict(self.scalars), list(self.through), outputs)

    def _output_places(self, index: int) -> Iterator[Alternative]:
        """Places for a further output; it may be absent if the graph does not compute it and it is not required."""
        out = self.v.outputs[index]
        if out in self.map:
            yield list
            return
        for candidate in self._reached(out):
            yield lambda c=candidate: [(out, c)]  # type: ignore[misc]
        if index not in self.v.pattern.required:
            yield list
        else:
            self._fail(f"output {index} ({op_name(out.target)}) not found", out, None)

    def _reached(self, out: Node) -> list[Node]:
        """Graph nodes that can be ``out``: reached along the pattern's own path from the nearest matched node."""
        back: dict[Node, Node | None] = {out: None}
        todo, inputs = [out], []
        while todo:
            node = todo.pop(0)
            start = self.map.get(node)
            if isinstance(start, Node) and node not in self.v.inputs:
                return climb(node, start, _path(back, node))
            if isinstance(start, Node):
                inputs.append(node)
            for source in node.all_input_nodes:
                if source not in back:
                    back[source] = node
                    todo.append(source)
        return next((found for n in inputs if (found := climb(n, self.map[n], _path(back, n)))), [])

    def _incomplete(self, s: Solution) -> str | None:
        """Conditions on a whole assignment: all inputs known, sizes consistent with their expressions."""
        for p, name in self.v.inputs.items():
            if p not in s.map and p.users:
                return f"input {name} belongs only to outputs that the graph does not compute"
        for p, found in s.map.items():
            if isinstance(found, Virtual) and (why := self._unreachable(p, found, s)):
                return why
        known = self.named(s)
        for value, have in s.dims.items():
            want = self.v.evaluate(value, known)
            if want is not None and not same_size(want, have):
                return f"dim {self._size_name(value)} must be {want}, here {have}"
        return None

    def _unreachable(self, p: Node, v: Virtual, s: Solution) -> str | None:
        """Why an input cannot be made by reshaping what the graph has, if it cannot."""
        if v.op is not RESHAPE:
            return None
        shape = [s.dims.get(d) if self.v.is_size(d) else d for d in v.arg]
        if any(d is None for d in shape):
            return f"the shape of input {self.v.inputs[p]} is not determined"
        have = v.base.meta["val"].shape
        if not same_size(prod(shape), prod(have)):
            return f"input {self.v.inputs[p]}: {[*have]} cannot become {shape}"
        return None

    def named(self, s: Solution) -> dict[str, Any]:
        """Sizes by name, those included that only occur inside an expression with one unknown."""
        known = {name: s.dims[v] for name, v in self.v.sizes.items() if v in s.dims}
        known |= {name: v for name, v in self.v.sizes.items() if v < 5}
        for value, text in self.v.names.items():
            unknown = [n for n in NAME.findall(text) if n not in known]
            have = s.dims.get(value)
            if len(set(unknown)) == 1 and isinstance(have, int) and have < 10_000:
                for guess in range(1, have + 1):
                    if self.v.evaluate(value, {**known, unknown[0]: guess}) == have:
                        known[unknown[0]] = guess
                        break
        return known


def climb(p: Node, t: Node, path: list[Node]) -> list[Node]:
    """Graph nodes reached from ``t`` (which matches ``p``) by the operators of ``path``, layout steps being free."""
    frontier = [t]
    for step in path:
        if step.target in LAYOUT or step.target is SLICE:
            continue
        reach = _layout_closure(frontier)
        frontier = list(dict.fromkeys(u for n in reach for u in n.users if u.target == step.target))
        if not frontier:
            return []
    if path and (path[-1].target in LAYOUT or path[-1].target is SLICE):
        return _layout_closure(frontier)[::-1]
    return frontier


def _layout_closure(nodes: list[Node]) -> list[Node]:
    out = dict.fromkeys(nodes)
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in out and user.op == "call_function" and (user.target in LAYOUT or user.target is SLICE):
                out[user] = None
                todo.append(user)
    return list(out)


def _path(back: dict[Node, Node | None], node: Node) -> list[Node]:
    out, step = [], back[node]
    while step is not None:
        out.append(step)
        step = back[step]
    return out


def path_up(source: Node, out: Node) -> list[Node] | None:
    """Nodes of a pattern on a shortest way from ``source`` (excluded) to ``out``; None if there is none."""
    back: dict[Node, Node | None] = {out: None}
    todo = [out]
    while todo:
        node = todo.pop(0)
        if node is source:
            return _path(back, node)
        for below in node.all_input_nodes:
            if below not in back:
                back[below] = node
                todo.append(below)
    return None
