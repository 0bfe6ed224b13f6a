"""Products of a few rows: with the norm in front of them, or several of the same rows side by side.

For many rows the library's products are better, and the norm is little beside them. In fp32 they always are: there are
no tensor cores for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
                weights = [_transposed_input(node.args[1]) for node in products]  # type: ignore[arg-type]
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
    """Products of the same few rows with weights that are there from the start, two to four of them."""
    by_factor: dict[Node, list[Node]] = {}
    for node in find(gm.graph, aten.mm.default):
        x, weight = node.args
        if isinstance(x, Node) and isinstance(weight, Node) and _transposed_input(weight) is not None:
            if not _taken_by_operations(node):
                continue
            rows = x.meta["val"].shape[0]
            if isinstance(rows, int) and rows <= FEW_ROWS and x.meta["val"].dtype in NARROW:
                by_factor.setdefault(x, []).append(node)
    for products in by_factor.values():
        for first in range(0, len(products), MOST_WEIGHTS):
            group = products[first : first + MOST_WEIGHTS]
            if len(group) > 1:
                yield group


def _taken_by_operations(node: Node) -> bool:
    """Whether only operations of the vocabulary, which take any strides, see the result: a part of a row of several
    results is not dense."""
    users = users_through_views(node, VIEWS)
    return all(isinstance(u.target, OpOverload) and u.target.namespace == "dsv4" for u in users)


def _transposed_input(node: Node) -> Node | None:
    """w if `node` is the transpose of an argument w [N, K] of the graph."""
    if node.op != "call_function" or node.target is not aten.permute.default or list(node.args[1]) != [1, 0]:  # type: ignore[arg-type]
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and source.op in ("placeholder", "get_attr") else None


def _stored_pairs(gm: GraphModule) -> Iterator[list[Node]]:
    """Two `linear_packed` of the same few rows, with weights that are arguments of the graph."""
    by_factor: dict[Node, list[Node]] = {}
    for node in find(gm.graph, dsv4.linear_packed.default):
        x, *weight = node.args
        there = all(isinstance(part, Node) and part.op in ("placeholder", "get_attr") for part in weight)
        if isinstance(x, Node) and there and x.meta["val"].dtype in NARROW and _taken_by_operations(node):
            rows = x.meta["val"].shape[:-1].numel()
            if isinstance(rows, int) and rows <= FEW_ROWS:
                by_factor.setdefault(x, []).append(node)
    for products in by_factor.values():
        for first in range(0, len(products) - 1, 2):
            yield products[first : first + 2]


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
