"""Sparse attention whose window rows lie anywhere in a pool, found through a list of slots."""

from __future__ import annotations

from typing import Any

import sympy
from torch import Tensor

from dscompile.ops import attention
from dscompile.ops.checks import INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.layout import check_rows
from dscompile.ops.registry import define

_CHECK = Check("sparse_attention_paged")


def _validate(
    q: Tensor, window_pool: Tensor, window_slots: Tensor, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> None:  # fmt: skip
    attention.check_rest(_CHECK, q, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, cos, sin, rope_q,
                         comp_format)  # fmt: skip
    _CHECK.rank("window_pool", window_pool, 2, "[P, D or packed row]")
    check_rows(_CHECK, "window_pool", window_pool, "window_format", window_format, q.shape[3])
    _CHECK.rank("window_slots", window_slots, 2, "[B, S]")
    _CHECK.dtype("window_slots", window_slots, INTEGERS)
    batch, shape = q.shape[0], window_slots.shape
    _CHECK.that(shape[0] == batch, "shape of window_slots", list(shape), f"[{batch}, S]")


def sparse_attention_paged(
    q: Tensor, window_pool: Tensor, window_slots: Tensor, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float,
    cos: Tensor | None, sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> Tensor:  # fmt: skip
    """`sparse_attention` over window rows in a pool: q [B, T, H, D] -> [B, T, H, D].

    window_pool [P, D or packed row], window_slots [B, S]: key j of sequence b is row window_slots[b, j] of the pool and
    stands at position window_start[b] + j. Nobody sees a key whose slot is -1; another slot outside [0, P) raises
    IndexError. Two keys may share a row. All else is as in `sparse_attention`.
    """
    _validate(q, window_pool, window_slots, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, cos, sin,
              rope_q, window_format, comp_format)  # fmt: skip
    _CHECK.index_range("window_slots", window_slots, -1, window_pool.shape[0], "rows of the pool; -1: no key")
    there = window_slots >= 0
    if window_pool.shape[0] == 0:
        window_kv = window_pool.new_zeros((*window_slots.shape, window_pool.shape[1]))
    else:
        window_kv = window_pool[window_slots.clamp_min(0)]
    return attention.over_rows(_CHECK, q, window_kv, there, q_pos, window_start, window, comp_kv, comp_idx, n_visible,
                               sink, scale, cos, sin, rope_q, window_format, comp_format)  # fmt: skip


def _fake(
    q: Tensor, window_pool: Tensor, window_slots: Tensor, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float,
    cos: Tensor | None, sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> Tensor:  # fmt: skip
    _validate(q, window_pool, window_slots, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, cos, sin,
              rope_q, window_format, comp_format)  # fmt: skip
    return q.new_empty(q.shape)


@costed
def _cost(
    B: Any, T: Any, H: Any, D: Any, S: Any, P: Any, window: Any, C: Any, K: Any, window_row_bytes: Any,
    comp_row_bytes: Any, x_bytes: Any = 2, index_bytes: Any = 8, slot_bytes: Any = 8,
) -> Cost:  # fmt: skip
    """As `sparse_attention`, with at most the P rows of the pool as window rows, and a slot for each key."""
    rest = attention.cost(B=B, T=T, H=H, D=D, S=S, window=window, C=C, K=K, window_row_bytes=0,
                          comp_row_bytes=comp_row_bytes, x_bytes=x_bytes, index_bytes=index_bytes)  # fmt: skip
    keys = B * sympy.Min(S, window + T - 1)
    return rest + Cost(sympy.Min(P, keys) * window_row_bytes + keys * slot_bytes, 0, 0)


def _sizes(
    q: Tensor, window_pool: Tensor, window_slots: Tensor, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, *rest: Any,
) -> dict[str, Any]:  # fmt: skip
    batch, tokens, heads, dim = q.shape
    rows = 0 if comp_kv is None else comp_kv.shape[1]
    return {
        "B": batch, "T": tokens, "H": heads, "D": dim, "S": window_slots.shape[1], "P": window_pool.shape[0],
        "window": window, "C": rows, "K": rows if comp_idx is None else comp_idx.shape[2],
        "window_row_bytes": window_pool.shape[1] * window_pool.element_size(),
        "comp_row_bytes": 0 if comp_kv is None else comp_kv.shape[2] * comp_kv.element_size(),
        "x_bytes": q.element_size(), "index_bytes": 0 if comp_idx is None else comp_idx.element_size(),
        "slot_bytes": window_slots.element_size(),
    }  # fmt: skip


define(
    "sparse_attention_paged(Tensor q, Tensor window_pool, Tensor window_slots, Tensor q_pos, Tensor window_start, "
    "int window, Tensor? comp_kv, Tensor? comp_idx, Tensor? n_visible, Tensor? sink, float scale, Tensor? cos, "
    "Tensor? sin, bool rope_q, str window_format, str comp_format) -> Tensor",
    family="attention", reference=sparse_attention_paged, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
