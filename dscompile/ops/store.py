"""Writes of rows into a pool that the caller owns. The pool is changed in place; slot -1 means "store nothing"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.layout import row_dtype, row_width
from dscompile.ops.norm import rms_norm
from dscompile.ops.quant import quant_pack
from dscompile.ops.registry import define
from dscompile.ops.rope import rope

_STORE, _FUSED = Check("store_rows"), Check("norm_rope_store")


def _validate_slots(check: Check, pool: Tensor, rows: Any, slots: Tensor) -> None:
    check.rank("pool", pool, 2, "[slots, row width]")
    check.dtype("slots", slots, (torch.int64,))
    check.shape("slots", slots, (rows,))


def _validate_store(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    _STORE.rank("rows", rows, 2, "[N, row width]")
    _validate_slots(_STORE, pool, rows.shape[0], slots)
    _STORE.shape("rows", rows, (rows.shape[0], pool.shape[1]))
    _STORE.dtype("rows", rows, (pool.dtype,))


def _write(check: Check, pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Range check in 64 bits first, so a bad slot leaves the pool as it was; of equal slots the last row stays."""
    check.index_range("slots", slots, -1, pool.shape[0], "pool capacity; -1 stores nothing")
    if slots.numel() == 0:
        return
    by_slot, order = torch.sort(slots, stable=True)
    last = torch.ones_like(by_slot, dtype=torch.bool)
    last[:-1] = by_slot[1:] != by_slot[:-1]
    last &= by_slot >= 0
    pool[by_slot[last]] = rows[order[last]]


def store_rows(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """pool [S, R] is changed: pool[slots[i]] = rows[i]. rows [N, R] of pool.dtype, slots int64 [N].

    Slot -1 is skipped, whatever its row holds. A slot below -1 or >= S raises IndexError and nothing is written.
    """
    _validate_store(pool, rows, slots)
    _write(_STORE, pool, rows, slots)


def _validate_fused(
    pool: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, slots: Tensor, eps: float, format: str
) -> Any:
    """Check the arguments and return the width of a stored row."""
    _FUSED.rank("x", x, 2, "[N, D]")
    _FUSED.dtype("x", x, FLOATS)
    width = row_width(_FUSED, "format", format, x.shape[1])
    _validate_slots(_FUSED, pool, x.shape[0], slots)
    allowed = f"[slots, {width}] ({format!r} rows of {x.shape[1]} values)"
    _FUSED.that(pool.shape[1] == width, "shape of pool", list(pool.shape), allowed)
    _FUSED.dtype("pool", pool, (row_dtype(format, x.dtype),))
    _FUSED.rank("cos", cos, 2, "[N, rotated // 2]")
    _FUSED.shape("cos", cos, (x.shape[0], cos.shape[1]))
    _FUSED.shape("sin", sin, cos.shape)
    _FUSED.that(2 * cos.shape[1] <= x.shape[1], "2 * last axis of cos", 2 * cos.shape[1], f"<= {x.shape[1]}")
    _FUSED.that(eps >= 0, "eps", eps, ">= 0")
    if weight is not None:
        _FUSED.dtype("weight", weight, FLOATS)
        _FUSED.shape("weight", weight, x.shape[1:])
    return width


def norm_rope_store(
    pool: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    eps: float,
    format: str,
) -> Tensor:
    """Normalise, rotate, pack and store the rows x [N, D]; returns the packed rows [N, R] (skipped ones too).

    pool [S, R] is changed at slots as in `store_rows`; cos, sin [N, rotated / 2] belong to each row's own position.
    weight None: no normalisation. format "none": rows stay plain values of x.dtype. Values are rounded to x.dtype
    after the norm and after the rotation, before they are quantised.
    """
    _validate_fused(pool, x, weight, cos, sin, slots, eps, format)
    normed = x if weight is None else rms_norm(x, weight, eps, "fp32")
    rows = quant_pack(rope(normed, cos, sin, False), format)
    _write(_FUSED, pool, rows, slots)
    return rows


def _store_fake(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    _validate_store(pool, rows, slots)


def _fused_fake(
    pool: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, slots: Tensor, eps: float, format: str
) -> Tensor:
    width = _validate_fused(pool, x, weight, cos, sin, slots, eps, format)
    return x.new_empty((x.shape[0], width), dtype=row_dtype(format, x.dtype))


@costed
def _store_cost(N: Any, row_bytes: Any) -> Cost:
    """N rows; 8 bytes of slot each."""
    return Cost(N * (row_bytes + 8), N * row_bytes, 0)


@costed
def _fused_cost(N: Any, D: Any, R: Any, row_bytes: Any, x_bytes: Any = 2, weight_bytes: Any = 4) -> Cost:
    """N rows of D values, R of them rotated; rows are written to the pool and returned."""
    read = N * (D * x_bytes + R * 4 + 8) + D * weight_bytes
    return Cost(read, 2 * N * row_bytes, N * (8 * D + 3 * R))


def _store_sizes(pool: Tensor, rows: Tensor, slots: Tensor) -> dict[str, Any]:
    return {"N": rows.shape[0], "row_bytes": rows.shape[1] * rows.element_size()}


def _fused_sizes(
    pool: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, slots: Tensor, eps: float, format: str
) -> dict[str, Any]:
    return {
        "N": x.shape[0], "D": x.shape[1], "R": 2 * cos.shape[1], "row_bytes": pool.shape[1] * pool.element_size(),
        "x_bytes": x.element_size(), "weight_bytes": 0 if weight is None else weight.element_size(),
    }  # fmt: skip


define(
    "store_rows(Tensor(a!) pool, Tensor rows, Tensor slots) -> ()",
    family="store", reference=store_rows, fake=_store_fake, cost=_store_cost, sizes=_store_sizes,
)  # fmt: skip
define(
    "norm_rope_store(Tensor(a!) pool, Tensor x, Tensor? weight, Tensor cos, Tensor sin, Tensor slots, float eps, "
    "str format) -> Tensor",
    family="store", reference=norm_rope_store, fake=_fused_fake, cost=_fused_cost, sizes=_fused_sizes,
)  # fmt: skip
