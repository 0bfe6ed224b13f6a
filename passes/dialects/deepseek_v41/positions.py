"""What is known of position tensors: that a row's positions rise by one, or are -1 (padding) from some token on.

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


@dataclass(frozen=True)
class PositionFacts:
    """Marks the tensors that are proven to hold contiguous positions."""

    name: str = "positions"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        for node in gm.graph.find_nodes(op="call_function", target=aten.where.self):
            if _is_cleaned(node):
                node.meta[_FACT] = True
        calls: dict[GraphModule, list[list[object]]] = {}
        for call in region_calls(gm):
            calls.setdefault(region_module(gm, call), []).append(region_operands(call))
        for region, operands in calls.items():
            for index, placeholder in enumerate(region.graph.find_nodes(op="placeholder")):
                handed_in = [row[index] for row in operands]
                if all(isinstance(value, Node) and value.meta.get(_FACT) for value in handed_in):
                    placeholder.meta[_FACT] = True
        return PassResult(self.name, seconds=time.perf_counter() - start)


def why_not_contiguous(positions: Node) -> str | None:
    """None if a row's positions rise by one (or are -1 from some token on), else what could not be proven."""
    length = positions.meta["val"].shape[1]
    if isinstance(length, int) and length == 1:
        return None
    if positions.meta.get(_FACT):
        return None
    return f"positions %{positions.name} are not proven to rise by one within a row"


def _is_cleaned(node: Node) -> bool:
    """`where((p == p[:, :1] + arange) & .. cumulated, p, -1)`: from the first break on, -1."""
    condition, positions, filler = node.args
    if not (isinstance(condition, Node) and isinstance(positions, Node) and _is_constant(filler, -1)):
        return False
    if condition.target is not aten.eq.Scalar or condition.args[1] != 1:
        return False
    product = condition.args[0]
    if not isinstance(product, Node) or product.target is not aten.cumprod.default or bound_args(product)["dim"] != 1:
        return False
    tests = product.args[0]
    while isinstance(tests, Node) and tests.target is aten._to_copy.default:
        tests = tests.args[0]
    return isinstance(tests, Node) and any(_compares_with_count(test, positions) for test in _conjuncts(tests))


def _conjuncts(node: Node) -> list[Node]:
    if node.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        return [found for part in node.args if isinstance(part, Node) for found in _conjuncts(part)]
    return [node]


def _compares_with_count(test: Node, positions: Node) -> bool:
    if test.target is not aten.eq.Tensor:
        return False
    for count, other in (test.args, reversed(test.args)):
        if other is positions and isinstance(count, Node) and count.target is aten.add.Tensor:
            parts = [part for part in count.args if isinstance(part, Node)]
            if any(_is_first(part, positions) for part in parts) and any(_is_range(part) for part in parts):
                return True
    return False


def _is_first(node: Node, positions: Node) -> bool:
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
