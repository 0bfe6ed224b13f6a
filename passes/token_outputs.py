"""Which output of a prefill graph is its logits, so that only those of each sequence's last token are wanted.

Logits are rows of tokens: they follow, operation by operation and row by row, from what attention gives for the graph's
tokens. Sizes alone say nothing, since a pooled vector may be as long as the prompt. Another output may have a row per
token as well, such as hidden states; nothing tells which of the two the caller reads for which tokens, so that then
all tokens of both are wanted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine.fxutil import bound_args, describe, same_size
from dscompile.passes.engine.optable import is_pure
from dscompile.passes.regions import is_region_call, region_module, region_operands
from dscompile.passes.token_rows import TokenSizes, row_inputs
from dscompile.passes.token_windows import Place

ATTENTION = torch.ops.dsv4.sparse_attention.default

#: A value with a row per token in so many of its first axes.
_Rows = tuple[Node, int]


@dataclass(frozen=True)
class Outputs:
    """logits: of which each sequence's last token is enough; None for none. whole: of the others, the operation that
    makes all tokens of them wanted, and why.
    """

    logits: Node | None
    whole: dict[Node, tuple[Node, str]]


def returned(gm: GraphModule) -> list[Any]:
    """What a graph or a region returns, in order, flat."""
    return torch.utils._pytree.tree_leaves(gm.graph.output_node().args[0])


def wanted_outputs(gm: GraphModule, positions: Node, sizes: TokenSizes) -> Outputs:
    """Tells the logits of a graph from its other outputs."""
    names: dict[Node, str] = {}
    for place, node in enumerate(returned(gm)):
        if isinstance(node, Node):
            names.setdefault(node, f"output {place} ({describe(node)})")
    whole = {node: (gm.graph.output_node(), f"{name} is not the logits") for node, name in names.items()}
    rows = _rows_of_tokens(gm, sizes, Place(positions))
    likely = [node for node in names if _is_floating(node) and _has_token_axis(node, sizes, rows)]
    if len(likely) > 1:
        several = " and ".join(names[node] for node in likely)
        why = f"{several} may each have a row per token, and only logits may lose rows"
        return Outputs(None, whole | dict.fromkeys(likely, (gm.graph.output_node(), why)))
    for node in likely:
        if unclear := _why_not_logits(node, sizes, rows):
            broken, why = unclear
            return Outputs(None, whole | {node: (broken or gm.graph.output_node(), f"{names[node]} {why}")})
        return Outputs(node, {other: cause for other, cause in whole.items() if other is not node})
    return Outputs(None, whole)


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _has_token_axis(node: Node, sizes: TokenSizes, rows: set[_Rows]) -> bool:
    """Whether an output may have a row per token, wherever its axes are: proven, or so it looks."""
    if (node, 2) in rows or (node, 1) in rows:
        return True
    shape = node.meta["val"].shape
    if len(shape) < 3:  # [B * T, V]; a vector per sequence may be of any length
        return len(shape) == 2 and same_size(shape[0], sizes.batch * sizes.length)
    return any(same_size(size, tokens) for size in shape for tokens in (sizes.length, sizes.batch * sizes.length))


def _why_not_logits(node: Node, sizes: TokenSizes, rows: set[_Rows]) -> tuple[Node | None, str] | None:
    """None for logits; else what they lack, and the operation to blame, if it is one."""
    value = node.meta["val"]
    if not sizes.fits(value, 2) or value.dim() < 3:
        return None, "is no tensor of logits [batch, tokens, vocabulary]"
    if (node, 2) not in rows:
        broken = _not_by_rows(node, sizes)
        what = f": {describe(broken)} is not known to work token by token" if broken else ""
        return broken, f"is not proven to follow from attention token by token{what}"
    return None if value.is_contiguous() else (None, "is not contiguous")


def _not_by_rows(node: Node, sizes: TokenSizes) -> Node | None:
    """The operation at which a row per token can be followed no further back from an output; None for no operation."""
    lead = 2
    while node.op == "call_function" and not is_region_call(node):
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        elif not (rows := row_inputs(node, lead, sizes)):
            return node
        else:
            node, lead = next(iter(rows.items()))
    return node if node.op == "call_function" else None


def _rows_of_tokens(gm: GraphModule, sizes: TokenSizes, place: Place, known: Iterable[_Rows] = ()) -> set[_Rows]:
    """Values that hold rows of the graph's tokens: attention's results, and what follows from these by rows.

    known: those of a region's arguments that do.
    """
    found = set(known)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if is_region_call(node):
            if not place.operands:
                found |= _rows_of_region(gm, node, sizes, place, found)
        elif node.target is ATTENTION:
            if place.is_positions(bound_args(node)["q_pos"]):
                found.add((node, 2))
        elif is_pure(node.target):
            found |= {(node, lead) for lead in (1, 2) if _follows(node, lead, sizes, found)}
    return found


def _rows_of_region(gm: GraphModule, call: Node, sizes: TokenSizes, place: Place, found: set[_Rows]) -> set[_Rows]:
    """The results of a region's call that hold rows, where they are taken from the call."""
    region = region_module(gm, call)
    operands = dict(zip(region.graph.find_nodes(op="placeholder"), region_operands(call), strict=True))
    known = [(argument, lead) for argument, operand in operands.items() for lead in (1, 2) if (operand, lead) in found]
    inside = _rows_of_tokens(region, sizes, place.inside(operands), known)
    results = returned(region)
    return {
        (user, lead)
        for user in call.users
        if user.target is operator.getitem and user.args[1] < len(results)  # type: ignore[operator]
        for lead in (1, 2)
        if (results[user.args[1]], lead) in inside  # type: ignore[index]
    }


def _follows(node: Node, lead: int, sizes: TokenSizes, found: set[_Rows]) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not sizes.fits(value, lead):
        return False
    if node.target is operator.getitem:
        return (node, lead) in found or (node.args[0], lead) in found
    rows = row_inputs(node, lead, sizes)
    return rows is not None and any(row in found for row in rows.items())
