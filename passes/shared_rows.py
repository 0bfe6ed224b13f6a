"""Decoding of compressed rows as an operation of its own, so that layers which read the same rows can share it.

`sparse_attention` and `index_topk` read packed rows directly. On a CPU that decodes them again in every layer: here the
decoding is taken out in front. A step of one token reads only the rows that were selected; a prompt reads the rows up
to the last selected one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine import PassContext, PassResult
from dscompile.passes.engine.fxutil import bound_args, emit, fake_mode
from dscompile.passes.engine.graphs import find, subgraphs

aten = torch.ops.aten


@dataclass(frozen=True)
class DecodeInFront:
    """Takes the decoding of compressed rows out of every `sparse_attention` that has an index list."""

    name: str = "decode_rows"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        changed = 0
        for sub in subgraphs(gm):
            for node in find(sub.gm.graph, torch.ops.dsv4.sparse_attention.default):
                changed += _take_out(sub.gm, node)
            if changed:
                sub.gm.recompile()
        return PassResult(self.name, notes=(f"{changed} attentions",), seconds=time.perf_counter() - start)


def _take_out(gm: GraphModule, node: Node) -> bool:
    given = bound_args(node)
    rows, index, format = given["comp_kv"], given["comp_idx"], given["comp_format"]
    if format == "none" or not isinstance(rows, Node) or not isinstance(index, Node):
        return False
    q = given["q"].meta["val"]
    one_token = isinstance(q.shape[1], int) and q.shape[1] == 1
    dim = q.shape[3]
    if not isinstance(dim, int):
        return False
    mode = fake_mode(gm)

    def add(target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(gm.graph, target, args, kwargs, like=node, mode=mode)

    with gm.graph.inserting_before(node):
        if one_token:
            picked = add(aten.squeeze.dim, index, 1)
            given["comp_kv"] = add(torch.ops.dsv4.gather_rows.default, rows, picked, format, dim, q.dtype)
            picks = index.meta["val"].shape[2]
            if not isinstance(picks, int):
                return False
            device = index.meta["val"].device
            order = add(aten.arange.start_step, 0, picks, 1, dtype=torch.int64, device=device, pin_memory=False)
            none = add(aten.full.default, [], -1, dtype=torch.int64, device=device, pin_memory=False)
            zero = add(aten.ge.Scalar, index, 0)
            given["comp_idx"] = add(aten.where.self, zero, order, none)
        else:
            given["comp_kv"] = add(torch.ops.dsv4.unpack_used.default, rows, index, format, dim, q.dtype)
    given["comp_format"] = "none"
    node.args = tuple(given.values())
    node.kwargs = {}
    return True
