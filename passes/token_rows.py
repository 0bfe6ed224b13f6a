"""Which operations work row by row on tokens, and which of their inputs hold the rows.

A tensor holds a row per token in its leading axes: two of them, [B, T, ..] (`lead` 2), or one, [B * T, ..] (`lead` 1).
An operation works by rows if a token's row of the result depends on the same token's rows of some inputs and on other
inputs as a whole. Picking tokens from its result is then the same as picking them from those inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dscompile.passes.engine.fxutil import bound_args, same_size
from dscompile.passes.engine.optable import CAST, CLONE, EXPAND, PERMUTE, REDUCTIONS, RESHAPE, SELECT, SLICE, is_op

aten = torch.ops.aten

#: Operations of the vocabulary -> their arguments that hold a row per token, with the axes that a row itself has at
#: least; all other arguments are taken as a whole.
ROWS: dict[str, dict[str, int]] = {
    "engram_gate": {"streams": 2, "key": 2, "value": 1, "mask": 0},
    "engram_gather": {"rows": 1},
    "experts": {"x": 1, "indices": 1, "weights": 1},
    "experts_packed": {"x": 1, "indices": 1, "weights": 1},
    "fake_quant": {"x": 1},
    "grouped_output": {"o": 2},
    "grouped_output_packed": {"o": 2},
    "hc_head": {"streams": 2},
    "hc_post": {"y": 1, "streams": 2, "post": 1, "comb": 2},
    "hc_pre": {"streams": 2, "pre_in": 1},
    "index_topk": {"q": 2, "head_weights": 1, "n_visible": 0, "candidates": 1},
    "index_topk_candidates": {"q": 2, "head_weights": 1, "n_visible": 0},
    "linear_packed": {"x": 1},
    "quant_pack": {"x": 1},
    "rms_norm": {"x": 1},
    "rope": {"x": 1, "cos": 1, "sin": 1},
    "router": {"x": 1, "forced_indices": 1},
    "sinkhorn": {"logits": 2},
    "unpack": {"rows": 1},
}

_ALONG_LAST = frozenset({
    aten._softmax.default, aten.softmax.int, aten.cumsum.default, aten.cumprod.default, aten.topk.default,
    aten.sort.default, aten.argmax.default,
})  # fmt: skip


@dataclass(frozen=True)
class TokenSizes:
    """The batch's sizes: B sequences of T tokens each, ints or SymInts."""

    batch: Any
    length: Any

    def fits(self, value: Any, lead: int) -> bool:
        """Whether a tensor can hold a row per token in its first `lead` axes."""
        if not isinstance(value, torch.Tensor) or value.dim() < lead:
            return False
        if lead == 1:
            return same_size(value.shape[0], self.batch * self.length)
        return same_size(value.shape[0], self.batch) and same_size(value.shape[1], self.length)

    def lead_of(self, value: Any) -> int | None:
        """Where a tensor holds tokens: 2, 1, or None if it cannot hold any."""
        return next((lead for lead in (2, 1) if self.fits(value, lead)), None)


def row_inputs(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    """Input node -> its `lead`, of those that hold a row per token, for a result that does in its first `lead` axes.

    None: it is not known that the operation works by rows.
    """
    found = _found(node, lead, sizes)
    if not found or any(not sizes.fits(source.meta.get("val"), own) for source, own in found.items()):
        return None
    return found


def _found(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    target: Any = node.target
    if not is_op(target):
        return None
    if target.namespace == "dsv4":
        return _vocabulary(node, lead)
    if target in _HANDLERS:
        return _HANDLERS[target](node, lead, sizes)
    if target in (CAST, CLONE) or torch.Tag.pointwise in target.tags:
        return _pointwise(node, lead, sizes)
    if target in REDUCTIONS or target in _ALONG_LAST:
        return _along(node, lead)
    return None


def _vocabulary(node: Node, lead: int) -> dict[Node, int] | None:
    """An operation of `ROWS`; None where one value is handed in both as rows and as a whole."""
    axes = ROWS.get(node.target._opname)  # type: ignore[union-attr]
    if axes is None:
        return None
    given = {name: value for name, value in bound_args(node).items() if isinstance(value, Node)}
    rows = {value: lead for name, value in given.items() if name in axes}
    if any(value in rows for name, value in given.items() if name not in axes):
        return None
    # Tokens in an axis that the operation works across are none of its rows.
    short = any(given[name].meta["val"].dim() - own < lead for name, own in axes.items() if name in given)
    return None if short else rows


def _pointwise(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    """Elementwise with broadcasting: an input either lacks the token axes or has size 1 there, or holds the rows."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return None
    rank = node.meta["val"].dim()
    rows: dict[Node, int] = {}
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        axes = lead - (rank - value.dim())  # token axes of the result that this input has too
        if axes <= 0 or same_size(value.shape[axes - 1], 1):
            continue  # the same for all tokens of a sequence
        if axes != lead:
            return None
        rows[source] = lead
    return rows


def _along(node: Node, lead: int) -> dict[Node, int] | None:
    """Reductions, sorts and sums along axes behind the tokens'."""
    source, dims = node.args[0], bound_args(node).get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(source, Node) or not dims:
        return None
    rank = source.meta["val"].dim()
    return {source: lead} if all(dim % rank >= lead for dim in dims) else None


def _reshape(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    source = node.args[0]
    assert isinstance(source, Node)
    own = sizes.lead_of(source.meta.get("val"))
    sized = all(isinstance(size, int) for size in node.meta["val"].shape[lead:])
    return {source: own} if own is not None and sized else None


def _expand(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    source = node.args[0]
    assert isinstance(source, Node)
    same_rank = source.meta["val"].dim() == node.meta["val"].dim()
    sized = all(isinstance(size, int) for size in node.meta["val"].shape[lead:])
    return {source: lead} if same_rank and sized else None


def _permute(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    source, dims = node.args
    return {source: lead} if list(dims[:lead]) == list(range(lead)) else None  # type: ignore[index, arg-type, dict-item]


def _part(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    source, dim = node.args[0], bound_args(node)["dim"]
    return {source: lead} if dim >= lead else None  # type: ignore[dict-item]


def _cat(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    given = bound_args(node)
    rank = node.meta["val"].dim()
    return dict.fromkeys(given["tensors"], lead) if given["dim"] % rank >= lead else None


def _product(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    """Rows times a matrix: the first argument has the rows, in `addmm` the second. What is added may have rows too."""
    given = bound_args(node)
    x, matrix, added = (
        (given["input"], given["weight"], given["bias"])
        if node.target is aten.linear.default
        else (given.get("mat1", given["self"]), given["mat2"], given["self"] if "mat1" in given else None)
    )
    if not isinstance(x, Node) or x is matrix or x.meta["val"].dim() - 1 < lead:
        return None
    rows = {x: lead}
    if isinstance(added, Node):
        value = added.meta["val"]
        if value.dim() > 1 and not all(same_size(size, 1) for size in value.shape[:-1]):
            if added is matrix or value.dim() != node.meta["val"].dim():
                return None
            rows[added] = lead
    return rows


def _lookup(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    """`table[ids]`: the ids hold the rows."""
    table, ids = node.args[:2]
    if node.target is aten.index.Tensor:
        if len(ids) != 1:  # type: ignore[arg-type]
            return None
        ids = ids[0]  # type: ignore[index]
    if not isinstance(ids, Node) or ids is table or ids.meta["val"].dim() < lead:
        return None
    masks = (torch.bool, torch.uint8)  # which choose rows instead of naming them
    return None if ids.meta["val"].dtype in masks else {ids: lead}


def _gather(node: Node, lead: int, sizes: TokenSizes) -> dict[Node, int] | None:
    source, dim, index = node.args[:3]
    rank = node.meta["val"].dim()
    return {source: lead, index: lead} if dim % rank >= lead else None  # type: ignore[operator, dict-item]


_HANDLERS: dict[Any, Callable[[Node, int, TokenSizes], dict[Node, int] | None]] = {
    RESHAPE: _reshape, EXPAND: _expand, PERMUTE: _permute, SLICE: _part, SELECT: _part, aten.cat.default: _cat,
    aten.mm.default: _product, aten.addmm.default: _product, aten.linear.default: _product,
    aten.embedding.default: _lookup, aten.index.Tensor: _lookup, aten.gather.default: _gather,
}  # fmt: skip
