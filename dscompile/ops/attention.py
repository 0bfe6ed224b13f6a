"""Attention of a query over its window rows and its selected compressed rows; keys and values are the same rows."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.layout import PLAIN, check_rows, decode_rows
from dscompile.ops.registry import define
from dscompile.ops.rope import rope

_CHECK = Check("sparse_attention")
_CHUNK_ELEMENTS = 1 << 23
"""Gathered key values held at a time; bounds the memory of long prompts."""
_MAX_START = -1e30
"""Where the running maximum starts: finite, so that a query without keys gives 0 and not NaN."""


def _validate(
    q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    rope_q: bool, window_format: str, comp_format: str,
) -> None:  # fmt: skip
    check_rest(_CHECK, q, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, cos, sin, rope_q,
               comp_format)  # fmt: skip
    batch, _, _, dim = q.shape
    _CHECK.rank("window_kv", window_kv, 3, "[B, S, D or packed row]")
    check_rows(_CHECK, "window_kv", window_kv, "window_format", window_format, dim)
    _CHECK.that(window_kv.shape[0] == batch, "shape of window_kv", list(window_kv.shape), f"[{batch}, S, row]")


def check_rest(
    check: Check, q: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    rope_q: bool, comp_format: str,
) -> None:  # fmt: skip
    """The checks of all arguments but the window's rows."""
    check.rank("q", q, 4, "[B, T, H, D]")
    check.dtype("q", q, FLOATS)
    batch, tokens, heads, dim = q.shape
    for name, tensor, shape in (("q_pos", q_pos, (batch, tokens)), ("window_start", window_start, (batch,))):
        check.dtype(name, tensor, INTEGERS)
        check.shape(name, tensor, shape)
    check.positive("window", window)
    if comp_kv is None:
        check.that(comp_idx is None, "comp_idx", "given", "None without comp_kv")
        check.that(n_visible is None, "n_visible", "given", "None without comp_kv")
    else:
        check.rank("comp_kv", comp_kv, 3, "[B, C, D or packed row]")
        check_rows(check, "comp_kv", comp_kv, "comp_format", comp_format, dim)
        check.that(comp_kv.shape[0] == batch, "shape of comp_kv", list(comp_kv.shape), f"[{batch}, C, row]")
        one = (comp_idx is None) != (n_visible is None)
        given = "both given" if comp_idx is not None else "both None"
        check.that(one, "comp_idx and n_visible", given, "exactly one of them with comp_kv")
    if comp_idx is not None:
        check.rank("comp_idx", comp_idx, 3, "[B, T, K]")
        check.dtype("comp_idx", comp_idx, INTEGERS)
        check.shape("comp_idx", comp_idx, (batch, tokens, comp_idx.shape[2]))
    if n_visible is not None:
        check.dtype("n_visible", n_visible, INTEGERS)
        check.shape("n_visible", n_visible, (batch, tokens))
    if sink is not None:
        check.dtype("sink", sink, FLOATS)
        check.shape("sink", sink, (heads,))
    check.that((cos is None) == (sin is None), "cos and sin", "only one given", "both or none")
    if cos is None or sin is None:
        check.that(not rope_q, "rope_q", rope_q, "False without cos and sin")
    else:
        check.rank("cos", cos, 3, "[B, T, rotated // 2]")
        for name, tensor in (("cos", cos), ("sin", sin)):
            check.dtype(name, tensor, FLOATS)
            check.shape(name, tensor, (batch, tokens, cos.shape[2]))
        check.that(2 * cos.shape[2] <= dim, "2 * last axis of cos", 2 * cos.shape[2], f"<= head size {dim}")


def _gather_rows(rows: Tensor, index: Tensor, valid: Tensor, format: str, dim: int, dtype: torch.dtype) -> Tensor:
    """rows [B, S, width], index [B, t, M] in range -> values fp32 [B, t, M, D], read as `dtype`, 0 where not valid.

    A row that a query does not see is zeroed before it can be multiplied, because 0 * NaN is NaN.
    """
    batch = torch.arange(rows.shape[0], device=rows.device).view(-1, 1, 1)
    values = decode_rows(rows[batch, index], format, dim, dtype).float()
    return values.masked_fill_(~valid.unsqueeze(-1), 0.0)


def _decode_early(rows: Tensor, format: str, reads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    """The pool as plain fp32 rows if it would be read more often than it has rows, else as it is."""
    if reads < rows.shape[1]:
        return rows, format
    return decode_rows(rows, format, dim, dtype).float(), PLAIN


def _window_index(
    q_pos: Tensor, window_start: Tensor, window: int, rows: int, there: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row index and validity [B, t, M] of the keys a query may see: at most `window` of the `rows` rows.

    there [B, rows]: which rows exist; None for all.
    """
    start = window_start.view(-1, 1, 1)
    if rows <= window:
        index = torch.arange(rows, device=q_pos.device).expand(*q_pos.shape, rows)
    else:
        index = q_pos.unsqueeze(-1) - start - torch.arange(window - 1, -1, -1, device=q_pos.device)
    key_pos = index + start
    age = q_pos.unsqueeze(-1) - key_pos
    valid = (index >= 0) & (index < rows) & (key_pos >= 0) & (age >= 0) & (age < window)
    index = index.clamp(0, max(rows - 1, 0))
    if there is not None and rows > 0:
        valid = valid & there.unsqueeze(1).expand(-1, index.shape[1], -1).gather(2, index)
    return index, valid


def attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor | None, scale: float) -> Tensor:
    """q [B, t, H, D], keys fp32 [B, t, M, D] (0 where not valid), valid [B, t, M] -> [B, t, H, D] in q.dtype.

    p = exp(scale * q . k - max) over the valid keys in fp32; the denominator also holds exp(sink - max); p is rounded
    to q.dtype before it multiplies the keys. Without a valid key the result is 0.
    """
    mask = valid.unsqueeze(2)
    logits = (torch.matmul(q.float(), keys.transpose(-1, -2)) * scale).masked_fill(~mask, _MAX_START)
    top = torch.cat((logits, logits.new_full((*logits.shape[:-1], 1), _MAX_START)), -1).amax(-1, keepdim=True)
    p = torch.exp(logits - top).masked_fill(~mask, 0.0)
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.float().view(1, 1, -1, 1) - top)
    out = torch.matmul(p.to(q.dtype).float(), keys) / total
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0).to(q.dtype)


def sparse_attention(
    q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float, cos: Tensor | None,
    sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> Tensor:  # fmt: skip
    """q [B, T, H, D] -> [B, T, H, D]; every head shares one key-value row per position.

    window_kv [B, S, D or packed row], in order of position: key j of sequence b is at window_start[b] + j, and a query
    at q_pos[b, t] sees it if that position is >= 0 and 0 <= q_pos - position < window.
    comp_kv [B, C, D or packed row]: rows comp_idx [B, T, K] (-1 skips, a duplicate counts twice, another index outside
    [0, C) raises IndexError), or every row j < n_visible[b, t]; exactly one of the two is given. A row may be seen
    both as window and as compressed row.
    sink [H] enters the denominator only. cos, sin [B, T, rotated / 2] of the queries: the output is rotated back by
    them, and with rope_q the query is rotated first. Rows are read as q.dtype; see `attend` for the arithmetic.
    """
    _validate(q, window_kv, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, cos, sin, rope_q,
              window_format, comp_format)  # fmt: skip
    return over_rows(_CHECK, q, window_kv, None, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, scale,
                     cos, sin, rope_q, window_format, comp_format)  # fmt: skip


def over_rows(
    check: Check, q: Tensor, window_kv: Tensor, there: Tensor | None, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float,
    cos: Tensor | None, sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> Tensor:  # fmt: skip
    """`sparse_attention` without checks of shapes. there: bool [B, S], which window rows exist; None for all."""
    batch, tokens, _, dim = q.shape
    if comp_kv is not None and comp_idx is not None:
        check.index_range("comp_idx", comp_idx, -1, comp_kv.shape[1], "compressed rows; -1 skips")
    elif comp_kv is not None and n_visible is not None:
        rows = torch.arange(comp_kv.shape[1], device=q.device)
        comp_idx = torch.where(rows < n_visible.unsqueeze(-1), rows, -1)
    if comp_kv is not None and comp_kv.shape[1] == 0:  # then every index is -1
        comp_kv = comp_idx = None
    if cos is not None and sin is not None:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        if rope_q:
            q = rope(q, cos, sin, False)
    per_query = min(window, window_kv.shape[1]) + (0 if comp_idx is None else comp_idx.shape[2])
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * per_query * dim))
    window_kv, window_format = _decode_early(window_kv, window_format, tokens * window, dim, q.dtype)
    if comp_kv is not None and comp_idx is not None:
        comp_kv, comp_format = _decode_early(comp_kv, comp_format, tokens * comp_idx.shape[2], dim, q.dtype)
    out = torch.empty_like(q)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        index, valid = _window_index(q_pos[:, part], window_start, window, window_kv.shape[1], there)
        keys = _gather_rows(window_kv, index, valid, window_format, dim, q.dtype)
        if comp_kv is not None and comp_idx is not None:
            index = comp_idx[:, part]
            picked = _gather_rows(comp_kv, index.clamp_min(0), index >= 0, comp_format, dim, q.dtype)
            keys, valid = torch.cat((keys, picked), 2), torch.cat((valid, index >= 0), 2)
        out[:, part] = attend(q[:, part], keys, valid, sink, scale)
    return out if cos is None or sin is None else rope(out, cos, sin, True)


def _fake(
    q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float, cos: Tensor | None,
    sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> Tensor:  # fmt: skip
    _validate(q, window_kv, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, cos, sin, rope_q,
              window_format, comp_format)  # fmt: skip
    return q.new_empty(q.shape)


@costed
def cost(
    B: Any, T: Any, H: Any, D: Any, S: Any, window: Any, C: Any, K: Any, window_row_bytes: Any, comp_row_bytes: Any,
    x_bytes: Any = 2, index_bytes: Any = 8,
) -> Cost:  # fmt: skip
    """B * T queries of H heads, each over min(window, S) of S window rows and K of C compressed rows.

    Rows read: of each kind the fewer of all rows and of those that the queries can reach.
    """
    window_rows = sympy.Min(S, window + T - 1)
    comp_rows = sympy.Min(C, T * K)
    read = B * (T * (H * D * x_bytes + K * index_bytes) + window_rows * window_row_bytes + comp_rows * comp_row_bytes)
    return Cost(read, B * T * H * D * x_bytes, 4 * B * T * H * D * (sympy.Min(window, S) + K))


def _sizes(
    q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, *rest: Any,
) -> dict[str, Any]:  # fmt: skip
    batch, tokens, heads, dim = q.shape
    rows = 0 if comp_kv is None else comp_kv.shape[1]
    return {
        "B": batch, "T": tokens, "H": heads, "D": dim, "S": window_kv.shape[1], "window": window, "C": rows,
        "K": rows if comp_idx is None else comp_idx.shape[2],
        "window_row_bytes": window_kv.shape[2] * window_kv.element_size(),
        "comp_row_bytes": 0 if comp_kv is None else comp_kv.shape[2] * comp_kv.element_size(),
        "x_bytes": q.element_size(), "index_bytes": 0 if comp_idx is None else comp_idx.element_size(),
    }  # fmt: skip


define(
    "sparse_attention(Tensor q, Tensor window_kv, Tensor q_pos, Tensor window_start, int window, Tensor? comp_kv, "
    "Tensor? comp_idx, Tensor? n_visible, Tensor? sink, float scale, Tensor? cos, Tensor? sin, bool rope_q, "
    "str window_format, str comp_format) -> Tensor",
    family="attention", reference=sparse_attention, fake=_fake, cost=cost, sizes=_sizes,
)  # fmt: skip
