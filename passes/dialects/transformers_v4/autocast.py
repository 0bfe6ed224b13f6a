"""Products that `torch.autocast` made narrow although float32 goes in and comes out, where the vocabulary is float32.

Autocast casts the operands of a matrix product, and the next float32 operation casts the result back. For the mix of a
hyper-connection, the mixing of its streams and the scores of the indexer, the operations of the vocabulary work in
float32; such a product is written as one in float32, which is what the model is without autocast. Others stay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine import PassContext, PassResult, fxutil
from dscompile.passes.engine.graphs import find, strip_views, subgraphs
from dscompile.passes.engine.optable import CAST, EXPAND, PERMUTE, RESHAPE, SELECT, SLICE

aten, dsv4 = torch.ops.aten, torch.ops.dsv4
_VIEWS = frozenset({RESHAPE, PERMUTE, EXPAND})
_KEPT = _VIEWS | {SLICE, SELECT, aten.relu.default}
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WidenProducts:
    """Undoes autocast around products that become part of a float32 operation of the vocabulary."""

    name: str = "autocast"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        count = 0
        for sub in subgraphs(gm):
            before = count
            for target in (aten.mm.default, aten.bmm.default):
                for product in find(sub.gm.graph, target):
                    count += _widen(sub.gm, product)
            if count > before:
                sub.gm.graph.eliminate_dead_code()
                sub.gm.recompile()
        return PassResult(self.name, notes=(f"{count} products",), seconds=time.perf_counter() - start)


def _widen(gm: GraphModule, product: Node) -> bool:
    if product.meta["val"].dtype not in _NARROW:
        return False
    wide = [_wide_source(a) for a in product.args]
    found = _until_wide(product)
    if None in wide or found is None or not _wanted(wide, found[0]):  # type: ignore[arg-type]
        return False
    inside, ends = found
    mode = fxutil.fake_mode(gm)
    new: dict[Node, Node] = {}
    with gm.graph.inserting_before(product):
        operands = tuple(_again(gm, a, mode) for a in product.args)
        new[product] = fxutil.emit(gm.graph, product.target, operands, like=product, mode=mode)
    for node in inside[1:]:
        with gm.graph.inserting_before(node):
            args = torch.fx.node.map_arg(node.args, lambda n: new.get(n, n))
            new[node] = fxutil.emit(gm.graph, node.target, args, dict(node.kwargs), like=node, mode=mode)
    for end in ends:
        end.replace_all_uses_with(new[end.args[0]])  # type: ignore[index]
    return True


def _wide_source(operand: Any) -> Node | None:
    """The float32 tensor that an operand was cast from, views aside."""
    node = strip_views(operand, _VIEWS)
    source = node.args[0] if node.target is CAST else None
    return source if isinstance(source, Node) and source.meta["val"].dtype == torch.float32 else None


def _again(gm: GraphModule, operand: Any, mode: Any) -> Node:
    """The operand's views on top of what it was cast from."""
    if operand.target is CAST:
        return operand.args[0]
    return fxutil.emit(gm.graph, operand.target, (_again(gm, operand.args[0], mode), *operand.args[1:]), like=operand,
                       mode=mode)  # fmt: skip


def _until_wide(product: Node) -> tuple[list[Node], list[Node]] | None:
    """What is made of a product up to casts to float32, in graph order, and those casts; None if it goes elsewhere."""
    inside, ends, todo = {product}, set[Node](), [product]
    while todo:
        for user in todo.pop().users:
            if user.target is CAST and user.meta["val"].dtype == torch.float32:
                ends.add(user)
            elif user.target in _KEPT or user.target is aten.mul.Tensor and _scales(user):
                if user not in inside:
                    inside.add(user)
                    todo.append(user)
            else:
                return None
    return (sorted(inside), sorted(ends)) if ends else None


def _scales(node: Node) -> bool:
    """A product with a number or a scalar tensor."""
    other = node.args[1]
    return not isinstance(other, Node) or other.meta["val"].dim() == 0


def _wanted(sources: list[Node], inside: list[Node]) -> bool:
    """Whether it is one of the products named above."""
    mixes = any(s.target is dsv4.rms_norm.default and s.args[1] is None for s in sources)
    moves = any(strip_views(s, _VIEWS).target is dsv4.sinkhorn.default for s in sources)
    return mixes or moves or any(n.target is aten.relu.default for n in inside)
