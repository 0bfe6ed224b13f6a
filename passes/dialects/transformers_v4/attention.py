"""The dense attention with a sink, as a sparse one, where its mask is proven to be a window and a choice of rows.

Scores of every query with every key, a mask added, softmax: nothing in that says which keys matter. The mask does
(`masks`). What is not proven stays dense, and the near miss says what was missing. No configuration is consulted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from dscompile.passes.dialects.common.splice import splice
from dscompile.passes.dialects.transformers_v4.layout import SWAP, TokensFirst, is_swap
from dscompile.passes.dialects.transformers_v4.masks import Limit, Selection, WindowMask, row_mask, window_mask
from dscompile.passes.dialects.transformers_v4.rebuild import RebuildMasks
from dscompile.passes.dialects.transformers_v4.values import Values
from dscompile.passes.engine import Match, Pattern, Reject, Structural
from dscompile.passes.engine.fxutil import bound_args, emit, fake_mode, same_size
from dscompile.passes.engine.normalise import refresh_nodes
from dscompile.passes.engine.optable import CAST, COPIES, PERMUTE, RESHAPE

aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def _search(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor, scale: float, shifted: bool) -> Tensor:
    """q [b, h, t, D], kv [b, 1, s, D], mask [b, 1, t, s], sink [h]; every head gets its copy of the keys."""
    batch, heads, _, width = q.shape
    rows = kv[:, :, None].expand(batch, 1, heads, kv.shape[2], width).reshape(batch, heads, kv.shape[2], width)
    return _attend(q, rows, mask, sink, scale, shifted)


def _attend(q: Tensor, rows: Tensor, mask: Tensor, sink: Tensor, scale: float, shifted: bool) -> Tensor:
    """`shifted`: the largest score is subtracted in front of the softmax, which subtracts it anyway."""
    batch, _, tokens, _ = q.shape
    scores = torch.matmul(q, rows.transpose(2, 3)) * scale + mask
    scores = torch.cat((scores, sink.reshape(1, -1, 1, 1).expand(batch, -1, tokens, -1)), -1)
    if shifted:
        scores = scores - scores.max(-1, keepdim=True).values
    p = F.softmax(scores, -1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(p.to(rows.dtype), rows)


@dataclass(frozen=True)
class _Parts:
    """Rows [B, 1, S, D] of the window with their mask, and compressed rows with theirs (None: there are none)."""

    rows: Node
    mask: WindowMask
    compressed: Node | None = None
    choice: Selection | Limit | None = None


def _split(values: Values, kv: Node, mask: Node) -> _Parts | Reject:
    """Cut keys and mask at the same column."""
    joined = _uncast(mask)
    if joined.target is aten.cat.default and joined.args[1] == 3 and len(joined.args[0]) == 2:  # type: ignore[arg-type]
        left, right = joined.args[0]  # type: ignore[misc]
        choice = row_mask(values, right)
    elif joined.target is aten.constant_pad_nd.default and _pads_rows(joined):
        left, choice = joined.args[0], Limit(None)
    else:
        meaning = window_mask(values, mask)
        return meaning if isinstance(meaning, Reject) else _Parts(kv, meaning)
    meaning = window_mask(values, left)  # type: ignore[arg-type]
    for proven in (meaning, choice):
        if isinstance(proven, Reject):
            return proven
    keys = _uncast(kv, (aten.clone.default,))
    if keys.target is not aten.cat.default or keys.args[1] != 2 or len(keys.args[0]) != 2:  # type: ignore[arg-type]
        return Reject("the mask has a part for compressed rows, the keys are not joined from two parts", kv)
    rows, compressed = keys.args[0]  # type: ignore[misc]
    if not same_size(rows.meta["val"].shape[2], left.meta["val"].shape[3]):  # type: ignore[union-attr]
        return Reject("the keys are joined at another column than the mask", kv)
    return _Parts(rows, meaning, compressed, choice)  # type: ignore[arg-type]


def _uncast(node: Node, kinds: Any = (*COPIES, CAST)) -> Node:
    while node.target in kinds:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _pads_rows(node: Node) -> bool:
    given = bound_args(node)
    pad = list(given["pad"])
    return len(pad) == 2 and pad[0] == 0 and given["value"] == 0


@dataclass(frozen=True)
class _Rotation:
    """A rotation of x, [B, T, H, D] if `tokens_first`, else [B, H, T, D], by one row of cos and sin for each token."""

    node: Node
    x: Node
    cos: Node
    sin: Node
    tokens_first: bool


def _rotation(node: Node, inverse: bool, tokens_first: bool) -> _Rotation | None:
    if node.target is not dsv4.rope.default or bound_args(node)["inverse"] is not inverse:
        return None
    x, cos, sin = node.args[:3]
    shape = cos.meta["val"].shape  # type: ignore[union-attr]
    heads, tokens = (2, 1) if tokens_first else (1, 2)
    fits = len(shape) == 4 and same_size(shape[heads], 1)
    if not fits or not same_size(shape[tokens], x.meta["val"].shape[tokens]):  # type: ignore[union-attr]
        return None
    return _Rotation(node, x, cos, sin, tokens_first)  # type: ignore[arg-type]


def _rotated(query: Node) -> _Rotation | None:
    """The rotation that makes the query [B, H, T, D], if nothing else reads what it makes."""
    node, swapped = query, is_swap(query)
    if swapped:
        if len(query.users) > 1:
            return None
        node = query.args[0]  # type: ignore[assignment]
    return _rotation(node, False, swapped) if len(node.users) == 1 else None


def _rotated_back(out: Node) -> _Rotation | None:
    """The inverse rotation that is all that happens to the output [B, H, T, D], exchanges of its axes aside."""
    node, swapped = out, False
    while len(node.users) == 1:
        node = next(iter(node.users))
        if not is_swap(node):
            return _rotation(node, True, swapped)
        swapped = not swapped
    return None


def _same_tables(a: _Rotation, b: _Rotation) -> bool:
    return all(_table(x) is _table(y) for x, y in ((a.cos, b.cos), (a.sin, b.sin)))


def _table(node: Node) -> Node:
    """The tensor whose elements a table holds, in its order: axes of size 1 aside."""
    while node.target is RESHAPE or is_swap(node) and any(same_size(node.meta["val"].shape[d], 1) for d in (1, 2)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _replace(gm: GraphModule, match: Match) -> Reject | None:
    parts = _split(Values(gm.graph), match.inputs["kv"], match.inputs["mask"])
    if isinstance(parts, Reject):
        return parts
    out, query = match.anchor, match.inputs["q"]
    back = _rotated_back(out)
    if back is not None and not _same_time(out, back):
        back = None
    forward = _rotated(query)
    if forward is not None and (back is None or not _same_tables(forward, back)):
        forward = None
    q, tokens_first = (query, False) if forward is None else (forward.x, forward.tokens_first)
    if is_swap(q) and not tokens_first:
        q, tokens_first = q.args[0], True  # type: ignore[assignment]
    old = out if back is None else back.node
    attention = _attention(parts, match.scalars["scale"], forward is not None, tokens_first, back)
    (new,) = splice(gm, old, attention, old, q=q, **_inputs(parts, match.inputs["sink"], back))
    new.meta["dsv4_pattern"] = match.pattern.name
    if back is None or not back.tokens_first:
        with gm.graph.inserting_before(old):
            new = emit(gm.graph, PERMUTE, (new, SWAP), like=old, mode=fake_mode(gm))
    users = set(old.users)
    old.replace_all_uses_with(new)
    if old is not out:
        _erase_between(old, out)
    refresh_nodes(gm.graph, users, fake_mode(gm))
    return None


def _same_time(out: Node, back: _Rotation) -> bool:
    """Nothing is written between the output and its rotation, so the attention may move there."""
    node = out.next
    while node is not back.node:
        if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            return False
        node = node.next
    return True


def _inputs(parts: _Parts, sink: Node, back: _Rotation | None) -> dict[str, Node]:
    inputs = {"rows": parts.rows, "sink": sink}
    if parts.mask.queries is not None and parts.mask.keys is not None:
        inputs |= {"queries": parts.mask.queries, "keys": parts.mask.keys}
    if parts.compressed is not None:
        inputs["compressed"] = parts.compressed
    if isinstance(parts.choice, Selection):
        inputs["indices"] = parts.choice.indices
    if isinstance(parts.choice, Limit) and parts.choice.count is not None:
        inputs["count"] = parts.choice.count
    if back is not None:
        inputs |= {"cos": back.cos, "sin": back.sin}
    return inputs


def _attention(parts: _Parts, scale: float, rope_q: bool, tokens_first: bool, back: _Rotation | None) -> Any:
    """The replacement, [B, T, H, D], of the graph's own tensors; positions are those that the mask compares."""
    window, limited = parts.mask.window, isinstance(parts.choice, Limit)
    heads_axis = 2 if back is not None and back.tokens_first else 1

    def attention(
        q: Tensor, rows: Tensor, sink: Tensor, queries: Tensor | None = None, keys: Tensor | None = None,
        compressed: Tensor | None = None, indices: Tensor | None = None, count: Tensor | None = None,
        cos: Tensor | None = None, sin: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        q = q if tokens_first else q.transpose(1, 2)
        batch, tokens = q.shape[:2]
        if queries is not None and keys is not None:
            positions, start = queries[:, 0, :, 0].expand(batch, tokens), keys[:, 0, 0, 0].expand(batch)
        else:
            positions = torch.full((batch, tokens), window - 1, dtype=torch.int64, device=q.device)
            start = torch.zeros((batch,), dtype=torch.int64, device=q.device)
        if limited and compressed is not None:
            if count is None:
                count = torch.full((1, 1, 1, 1), 0, dtype=torch.int64, device=q.device) + compressed.shape[2]
            count = count[:, 0, :, 0].expand(batch, tokens)
        tables = [None if t is None else t.squeeze(heads_axis).expand(batch, -1, -1) for t in (cos, sin)]
        return dsv4.sparse_attention(
            q, rows.squeeze(1), positions, start, window, None if compressed is None else compressed.squeeze(1),
            indices, count, sink, scale, *tables, rope_q, "none", "none",
        )  # fmt: skip

    return attention


def _erase_between(last: Node, out: Node) -> None:
    """Erase the old rotation and the permutations in front of it; the engine erases what was matched."""
    while last is not out and not last.users:
        source = last.args[0]
        last.graph.erase_node(last)
        last = source  # type: ignore[assignment]


def _one_head(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor, scale: float, shifted: bool) -> Tensor:
    return _attend(q, kv, mask, sink, scale, shifted)


def _pattern(one_head: bool, shifted: bool) -> Pattern:
    heads = "1" if one_head else "h"
    return Pattern(
        name="attention.masked" + ("" if shifted else ".unshifted") + (".one_head" if one_head else ""),
        family="attention", dialect="transformers_v4", replace=Structural(_replace),
        search=partial(_one_head if one_head else _search, shifted=shifted),
        inputs={"q": f"act[b {heads} t D]", "kv": "act[b 1 s D]", "mask": "m[b 1 t s]", "sink": f"w[{heads}]"},
        dtypes={"m": ("act", torch.float32)},  # wider than the scores under autocast
        scalars={"scale": 0.12345}, key=aten.amax.default if shifted else aten._softmax.default,
    )  # fmt: skip


PATTERNS = tuple(_pattern(one_head, shifted) for shifted, one_head in itertools.product((True, False), (False, True)))

#: In this order, in front of the patterns.
PASSES = (TokensFirst(), RebuildMasks())
