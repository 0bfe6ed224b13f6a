"""What is known of position tensors: that a row's positions rise by one, or are -1 (padding) from some token on.

Attention needs no more: a position below 0 neither sees nor is seen. What counts tokens has to know as well that a row
has no positions below 0 in front of others, which the model tests with `positions >= 0`.

The model cleans its positions once, in front of all layers. Layers are regions that get them as an argument, so what
was proven in front is noted on the region's argument if every call hands in such a tensor.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine import PassContext, PassResult
from dscompile.passes.engine.fxutil import bound_args
from dscompile.passes.regions import region_calls, region_module, region_operands

aten = torch.ops.aten
_FACT = "dsv4_contiguous_positions"
_FROM_FIRST = "dsv4_positions_from_first_token"


@dataclass(frozen=True)
class PositionFacts:
    """Marks the tensors that are proven to hold contiguous positions."""

    name: str = "positions"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        for node in gm.graph.find_nodes(op="call_function", target=aten.where.self):
            tests = _tests_of_kept(node)
            if any(_compares_with_count(test, node.args[1]) for test in tests):
                node.meta[_FACT] = True
                if any(_is_valid(test, node.args[1]) for test in tests):
                    node.meta[_FROM_FIRST] = True
        calls: dict[GraphModule, list[list[object]]] = {}
        for call in region_calls(gm):
            calls.setdefault(region_module(gm, call), []).append(region_operands(call))
        for region, operands in calls.items():
            for index, placeholder in enumerate(region.graph.find_nodes(op="placeholder")):
                handed_in = [row[index] for row in operands]
                for fact in (_FACT, _FROM_FIRST):
                    if all(isinstance(value, Node) and value.meta.get(fact) for value in handed_in):
                        placeholder.meta[fact] = True
        return PassResult(self.name, seconds=time.perf_counter() - start)


def why_not_contiguous(positions: Node) -> str | None:
    """None if a row's positions rise by one (or are -1 from some token on), else what could not be proven."""
    length = positions.meta["val"].shape[1]
    if isinstance(length, int) and length == 1:
        return None
    if positions.meta.get(_FACT):
        return None
    return f"positions %{positions.name} are not proven to rise by one within a row"


def why_padding_may_be_in_front(positions: Node) -> str | None:
    """None if a row's tokens are its first ones, with positions that rise by one, else what could not be proven."""
    if why := why_not_contiguous(positions):
        return why
    if positions.meta.get(_FROM_FIRST):
        return None
    return f"positions %{positions.name} are not proven to be 0 or more from a row's first token on"


def _tests_of_kept(node: Node) -> list[Node]:
    """The tests of `where((test & ..) cumulated, p, -1)`: from the first token on that fails one, -1."""
    condition, positions, filler = node.args
    if not (isinstance(condition, Node) and isinstance(positions, Node) and _is_constant(filler, -1)):
        return []
    if condition.target is not aten.eq.Scalar or condition.args[1] != 1:
        return []
    product = condition.args[0]
    if not isinstance(product, Node) or product.target is not aten.cumprod.default or bound_args(product)["dim"] != 1:
        return []
    tests = product.args[0]
    while isinstance(tests, Node) and tests.target is aten._to_copy.default:
        tests = tests.args[0]
    return _conjuncts(tests) if isinstance(tests, Node) else []


def _conjuncts(node: Node) -> list[Node]:
    if node.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        return [found for part in node.args if isinstance(part, Node) for found in _conjuncts(part)]
    return [node]


def _is_valid(test: Node, positions: object) -> bool:
    """`p >= 0`."""
    bound = {aten.ge.Scalar: 0, aten.gt.Scalar: -1}.get(test.target)  # type: ignore[arg-type]
    return bound is not None and test.args == (positions, bound)


def _compares_with_count(test: Node, positions: object) -> bool:
    """`p == p[:, :1] + arange`."""
    if test.target is not aten.eq.Tensor:
        return False
    for count, other in (test.args, reversed(test.args)):
        if other is positions and isinstance(count, Node) and count.target is aten.add.Tensor:
            if count.kwargs:  # a factor of the second part
                continue
            parts = [part for part in count.args if isinstance(part, Node)]
            if any(_is_first(part, positions) for part in parts) and any(_is_range(part) for part in parts):
                return True
    return False


def _is_first(node: Node, positions: object) -> bool:
    if node.target is not aten.slice.Tensor or node.args[0] is not positions:
        return False
    given = bound_args(node)
    return given["dim"] == 1 and given["start"] in (0, None) and given["end"] == 1


def _is_range(node: Node) -> bool:
    if node.target is not aten.arange.start_step:
        return False
    given = bound_args(node)
    return given["start"] == 0 and given["step"] == 1


def _is_constant(value: object, wanted: int) -> bool:
    if isinstance(value, Node) and value.target is aten.full.default:
        return value.args[1] == wanted
    return value == wanted


PASSES = (PositionFacts(),)
