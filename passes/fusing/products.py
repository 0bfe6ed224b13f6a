"""Products of a few rows: with the norm in front of them, or several of the same rows side by side.

For many rows the library's products are better, and the norm is little beside them. In fp32 they always are: there are
no tensor cores for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from dscompile.passes.engine import Match, PassContext, PassResult, Pattern, PatternPass, Reject
from dscompile.passes.engine.fxutil import emit, fake_mode
from dscompile.passes.engine.graphs import find, subgraphs, users_through_views
from dscompile.passes.engine.optable import RESHAPE, VIEWS

aten, dsv4 = torch.ops.aten, torch.ops.dsv4
FEW_ROWS = 256
MOST_WEIGHTS = 4
NARROW = (torch.bfloat16, torch.float16)


def _few(match: Match) -> Reject | None:
    rows = match.inputs["x"].meta["val"].shape[:-1].numel()
    if isinstance(rows, int) and rows <= FEW_ROWS:
        return None
    return Reject(f"{rows} rows, allowed: at most {FEW_ROWS}", match.inputs["x"])


def _normed(rounding: str) -> Pattern:
    def search(x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed = dsv4.rms_norm(x, norm_weight, eps, rounding)
        return F.linear(normed, weight), normed

    def replace(x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, normed = dsv4.norm_linear(x.flatten(0, -2), norm_weight, eps, rounding, weight)
        return y.unflatten(0, x.shape[:-1]), normed.unflatten(0, x.shape[:-1])

    return Pattern(
        f"norm_linear.{rounding}", "linear", "fusing", search, replace,
        inputs={"x": "act[*B K]", "norm_weight": "w[K]", "weight": "act[N K]"}, scalars={"eps": 1.3579e-7},
        dtypes={"act": NARROW}, guard=_few, ranks=(1, 2),
    )  # fmt: skip


NORMS = (_normed("fp32"),)


@dataclass(frozen=True)
class SideBySide:
    """mm(x, a^T), mm(x, b^T) become parts of linears(x, a, b); pairs of stored weights parts of linears_packed."""

    name: str = "fuse_side_by_side"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        changed = 0
        for sub in subgraphs(gm):
            here = 0
            for products in list(_groups(sub.gm)):
                weights = [_transposed_input(node.args[1]) for node in products]
                _join(sub.gm, products, dsv4.linears.default, (*weights, *[None] * (MOST_WEIGHTS - len(weights))))
                here += 1
            for products in list(_stored_pairs(sub.gm)):
                _join(sub.gm, products, dsv4.linears_packed.default, [a for node in products for a in node.args[1:]])
                here += 1
            if here:
                sub.gm.graph.lint()
                sub.gm.recompile()
            changed += here
        return PassResult(self.name, notes=(f"{changed} joined",), seconds=time.perf_counter() - start)


def _groups(gm: GraphModule) -> Iterator[list[Node]]:
    """Products of the same few rows with plain weights that are there from the start, two to four of them."""
    products = (node for node in find(gm.graph, aten.mm.default) if _transposed_input(node.args[1]) is not None)
    return _of_same_rows(products, MOST_WEIGHTS)


def _stored_pairs(gm: GraphModule) -> Iterator[list[Node]]:
    """Two `linear_packed` of the same few rows, with weights that are there from the start."""
    products = (node for node in find(gm.graph, dsv4.linear_packed.default) if all(map(_is_input, node.args[1:])))
    return _of_same_rows(products, 2)


def _of_same_rows(products: Iterable[Node], most: int) -> Iterator[list[Node]]:
    """Two to `most` at a time of those that multiply the same few rows and whose result may be a part of a row."""
    by_factor: dict[Node, list[Node]] = {}
    for node in products:
        x = node.args[0]
        if isinstance(x, Node) and x.meta["val"].dtype in NARROW and _taken_by_operations(node):
            rows = x.meta["val"].shape[:-1].numel()
            if isinstance(rows, int) and rows <= FEW_ROWS:
                by_factor.setdefault(x, []).append(node)
    for found in by_factor.values():
        for first in range(0, len(found) - 1, most):
            yield found[first : first + most]


def _taken_by_operations(node: Node) -> bool:
    """Whether only operations of the vocabulary, which take any strides, see the result: a part of a row of several
    results is not dense."""
    users = users_through_views(node, VIEWS)
    return all(isinstance(u.target, OpOverload) and u.target.namespace == "dsv4" for u in users)


def _transposed_input(value: Any) -> Node | None:
    """w if `value` is the transpose of an argument w [N, K] of the graph."""
    if not isinstance(value, Node) or value.target is not aten.permute.default or list(value.args[1]) != [1, 0]:  # type: ignore[arg-type]
        return None
    return value.args[0] if _is_input(value.args[0]) else None  # type: ignore[return-value]


def _is_input(value: Any) -> bool:
    return isinstance(value, Node) and value.op in ("placeholder", "get_attr")


def _join(gm: GraphModule, products: list[Node], target: Any, weights: Sequence[Any]) -> None:
    """One call of `target` on the rows of `products`, whose results become its parts."""
    graph, mode, first = gm.graph, fake_mode(gm), products[0]
    factor = first.args[0]
    assert isinstance(factor, Node)
    lead = factor.meta["val"].shape[:-1]
    with graph.inserting_before(first):
        rows = factor
        if len(lead) != 1:
            rows = emit(graph, RESHAPE, (factor, [lead.numel(), factor.meta["val"].shape[-1]]), like=first, mode=mode)
        joined = emit(graph, target, (rows, *weights), like=first, mode=mode)
        begin = 0
        for node in products:
            end = begin + node.meta["val"].shape[-1]
            part = emit(graph, aten.slice.Tensor, (joined, 1, begin, end, 1), like=node, mode=mode)
            if len(lead) != 1:
                part = emit(graph, RESHAPE, (part, [*lead, end - begin]), like=node, mode=mode)
            node.replace_all_uses_with(part)
            begin = end
    for node in products:
        graph.erase_node(node)


PASSES = (PatternPass("fuse_norm", NORMS, near_misses=False), SideBySide())
