"""Norms and rotations in the layout that tokens come in: [B, T, H, D] instead of [B, H, T, D].

transformers moves heads in front of tokens before it normalises and rotates, and back again afterwards. Both operations
work on the last axis, so the permutation moves behind them, where it meets its inverse.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine import PassContext, PassResult, fxutil
from dscompile.passes.engine.fxutil import same_size
from dscompile.passes.engine.graphs import subgraphs
from dscompile.passes.engine.normalise import refresh_nodes
from dscompile.passes.engine.optable import PERMUTE

dsv4 = torch.ops.dsv4
#: [B, H, T, D] <-> [B, T, H, D].
SWAP = [0, 2, 1, 3]


def is_swap(node: object) -> bool:
    """Whether a node exchanges heads and tokens."""
    return isinstance(node, Node) and node.target is PERMUTE and list(node.args[1]) == SWAP  # type: ignore[arg-type]


@dataclass(frozen=True)
class TokensFirst:
    """Moves the exchange of heads and tokens behind norms and rotations, and drops it where it is undone."""

    name: str = "token_layout"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        count = 0
        for sub in subgraphs(gm):
            dirty: set[Node] = set()
            before = count
            for node in list(sub.gm.graph.nodes):
                if node.target is dsv4.rms_norm.default or node.target is dsv4.rope.default:
                    count += _move_behind(sub.gm, node, dirty)
                elif is_swap(node) and is_swap(node.args[0]):
                    dirty |= set(node.users)
                    node.replace_all_uses_with(node.args[0].args[0])
                    count += 1
            if count > before:
                sub.gm.graph.eliminate_dead_code()
                refresh_nodes(sub.gm.graph, dirty, fxutil.fake_mode(sub.gm))
                sub.gm.recompile()
        return PassResult(self.name, notes=(f"{count} moved",), seconds=time.perf_counter() - start)


def _move_behind(gm: GraphModule, node: Node, dirty: set[Node]) -> bool:
    """`op(swap(x))` -> `swap(op(x))`; a rotation's tables [b, 1, T, r] become [b, T, 1, r]."""
    swapped = node.args[0]
    if not is_swap(swapped):
        return False
    mode = fxutil.fake_mode(gm)
    with gm.graph.inserting_before(node):
        rest = list(node.args[1:])
        if node.target is dsv4.rope.default:
            tables = [t.meta["val"] for t in rest[:2]]  # type: ignore[union-attr]
            if not all(t.dim() == 4 and same_size(t.shape[1], 1) for t in tables):
                return False
            rest[:2] = [fxutil.emit(gm.graph, PERMUTE, (t, SWAP), like=t, mode=mode) for t in rest[:2]]  # type: ignore[arg-type]
        new = fxutil.emit(gm.graph, node.target, (swapped.args[0], *rest), like=node, mode=mode)  # type: ignore[union-attr]
        if "dsv4_pattern" in node.meta:
            new.meta["dsv4_pattern"] = node.meta["dsv4_pattern"]
        back = fxutil.emit(gm.graph, PERMUTE, (new, SWAP), like=node, mode=mode)
    dirty |= set(node.users)
    node.replace_all_uses_with(back)
    return True
