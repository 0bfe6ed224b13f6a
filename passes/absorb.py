"""What an attention or an index selection can do itself moves into it: decoding, and rotation of q and of the output.

unpack(rows) -> sparse_attention(.., "none")   becomes   sparse_attention(rows, .., format)
rope(q) -> sparse_attention -> rope(inverse)   becomes   sparse_attention(q, cos, sin, rope_q=True)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine import PassContext, PassResult
from dscompile.passes.engine.fxutil import bound_args, emit, evaluate, fake_mode, same_shape, set_val
from dscompile.passes.engine.graphs import find, strip_views, subgraphs
from dscompile.passes.engine.optable import RESHAPE

dsv4 = torch.ops.dsv4
_ATTENTION, _ROPE, _UNPACK = dsv4.sparse_attention.default, dsv4.rope.default, dsv4.unpack.default
_INDEXERS = (dsv4.index_topk.default, dsv4.index_topk_candidates.default)


@dataclass(frozen=True)
class Absorb:
    """Moves decoding and rotation into the operations that take them."""

    name: str = "absorb"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        changed = 0
        for sub in subgraphs(gm):
            graph = sub.gm.graph
            for node in find(graph, _ATTENTION):
                dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
                changed += _decode_inside(node, "window_kv", "window_format", dtype)
                changed += _decode_inside(node, "comp_kv", "comp_format", dtype)
                changed += _rotate_inside(sub.gm, node)
            for target in _INDEXERS:
                for node in find(graph, target):
                    dtype = bound_args(node)["q"].meta["val"].dtype
                    changed += _decode_inside(node, "keys", "key_format", dtype)
            graph.eliminate_dead_code(is_impure_node=_writes)
            graph.lint()
            sub.gm.recompile()
        return PassResult(self.name, notes=(f"{changed} moved",), seconds=time.perf_counter() - start)


def _writes(node: Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and (schema is None or schema.is_mutable) and not _is_getitem(node)


def _is_getitem(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _decode_inside(node: Node, rows: str, format: str, dtype: torch.dtype) -> bool:
    given = bound_args(node)
    source = given[rows]
    if given[format] != "none" or not isinstance(source, Node) or source.target is not _UNPACK:
        return False
    unpacked = bound_args(source)
    if unpacked["dtype"] != dtype or unpacked["format"] == "none":
        return False
    given[rows], given[format] = unpacked["rows"], unpacked["format"]
    node.args, node.kwargs = tuple(given.values()), {}
    return True


def _rotate_inside(gm: GraphModule, node: Node) -> bool:
    """The output's only user rotates it back by the angles of its queries: the attention does that itself.

    The rotation of q moves in as well if it is by the same angles and nothing else reads the rotated q.
    """
    given = bound_args(node)
    if given["cos"] is not None or len(node.users) != 1:
        return False
    back = next(iter(node.users))
    if back.target is not _ROPE or back.args[0] is not node or bound_args(back)["inverse"] is not True:
        return False
    angles = bound_args(back)
    tables = {name: _per_token(gm, node, angles[name]) for name in ("cos", "sin")}
    if None in tables.values():
        return False
    given |= tables
    q = given["q"]
    if isinstance(q, Node) and q.target is _ROPE and len(q.users) == 1:
        forward = bound_args(q)
        same = all(forward[name] is angles[name] for name in ("cos", "sin"))
        if same and forward["inverse"] is False:
            given["q"], given["rope_q"] = forward["x"], True
    node.args, node.kwargs = tuple(given.values()), {}
    _move_after_arguments(node)
    set_val(node, evaluate(node, fake_mode(gm)))
    back.replace_all_uses_with(node)
    gm.graph.erase_node(back)
    return True


def _per_token(gm: GraphModule, node: Node, table: Any) -> Node | None:
    """The table as [B, T, rd / 2], given one with a dimension of size 1 for the heads; None if it has another shape."""
    q = node.args[0].meta["val"]  # type: ignore[union-attr]
    value = table.meta["val"]
    if value.dim() != 4 or value.shape[2] != 1 or not same_shape(value.shape[:2], q.shape[:2]):
        return None
    source = strip_views(table, (RESHAPE,))
    if same_shape(source.meta["val"].shape, (*value.shape[:2], value.shape[3])):
        return source
    with gm.graph.inserting_after(table):
        return emit(gm.graph, torch.ops.aten.squeeze.dim, (table, 2), like=table, mode=fake_mode(gm))


def _move_after_arguments(node: Node) -> None:
    """The tables of the output's rotation may stand behind the attention: it moves behind them."""
    order = {other: position for position, other in enumerate(node.graph.nodes)}
    latest = max(node.all_input_nodes, key=order.__getitem__)
    if order[latest] > order[node]:
        latest.append(node)
