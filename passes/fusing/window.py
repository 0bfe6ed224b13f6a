"""Attention reads the window's rows where they lie, not a copy of them.

index(pool, slots) -> sparse_attention(rows, ..)   becomes   sparse_attention_paged(pool, slots, ..)
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine import PassContext, PassResult, Writes
from dscompile.passes.engine.fxutil import bound_args, emit, fake_mode
from dscompile.passes.engine.graphs import find, subgraphs

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


@dataclass(frozen=True)
class PagedWindow:
    """Takes the gather of window rows into the attention that is its only reader."""

    name: str = "fuse_window"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        changed = 0
        for sub in subgraphs(gm):
            writes = Writes(sub.gm.graph)
            here = sum(_take_in(sub.gm, node, writes) for node in find(sub.gm.graph, dsv4.sparse_attention.default))
            if here:
                sub.gm.graph.lint()
                sub.gm.recompile()
            changed += here
        return PassResult(self.name, notes=(f"{changed} attentions",), seconds=time.perf_counter() - start)


def _take_in(gm: GraphModule, node: Node, writes: Writes) -> bool:
    given = bound_args(node)
    rows = given["window_kv"]
    if not isinstance(rows, Node) or rows.target is not aten.index.Tensor or len(rows.users) != 1:
        return False
    if sum(value is rows for value in given.values()) != 1:
        return False
    pool, (slots, *others) = rows.args
    if others or not isinstance(pool, Node) or not isinstance(slots, Node) or pool.meta["val"].dim() != 2:
        return False
    if not isinstance(pool.meta["val"].shape[0], int):
        return False
    if slots.meta["val"].dim() != 2 or slots.meta["val"].dtype not in (torch.int64, torch.int32):
        return False
    if writes.inside(rows, rows, node) is not None:  # the attention would read the pool too late
        return False
    mode = fake_mode(gm)
    with gm.graph.inserting_before(rows):
        # An index counts from the end where it is negative; the operation skips -1.
        negative = emit(gm.graph, aten.lt.Scalar, (slots, 0), like=node, mode=mode)
        from_end = emit(gm.graph, aten.add.Tensor, (slots, pool.meta["val"].shape[0]), like=node, mode=mode)
        slots = emit(gm.graph, aten.where.self, (negative, from_end, slots), like=node, mode=mode)
    rest = {name: value for name, value in given.items() if name not in ("q", "window_kv")}
    with gm.graph.inserting_before(node):
        paged = emit(
            gm.graph, dsv4.sparse_attention_paged.default, (given["q"], pool, slots, *rest.values()), like=node,
            mode=mode,
        )  # fmt: skip
    node.replace_all_uses_with(paged)
    gm.graph.erase_node(node)
    gm.graph.erase_node(rows)
    return True


PASSES = (PagedWindow(),)
