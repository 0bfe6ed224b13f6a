"""Rows written into a pool: normalise, rotate, quantise and store in one step, or just store.

A store is `index_put` with one index tensor. A negative index counts from the end there, while the operation skips -1:
the index is wrapped first, so that both write to the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dscompile.formats import KVFormat
from dscompile.passes.dialects.deepseek_v41.formats import grouped_formats, width
from dscompile.passes.engine import Pattern

_Two = tuple[Tensor, Tensor]


def _put(pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    return torch.ops.aten.index_put(pool, [slots], rows)


def _wrapped(slots: Tensor, capacity: int) -> Tensor:
    """A slot below -capacity stays what it is: the operation refuses it, as indexing does."""
    return torch.where((slots < 0) & (slots >= -capacity), slots + capacity, slots)


def _store(pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    torch.ops.dsv4.store_rows(pool, rows, _wrapped(slots, pool.shape[0]))
    return pool


def _norm_rope(record: KVFormat) -> Pattern:
    def search(pool: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, eps: float) -> _Two:
        rotated = torch.ops.dsv4.rope(torch.ops.dsv4.rms_norm(x, weight, eps, "fp32"), cos, sin, False)
        rows = torch.ops.dsv4.quant_pack(rotated, record.name)
        return _put(pool, slots, rows.flatten(0, 1)), rows

    def replace(pool: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, eps: float) -> _Two:
        rows = torch.ops.dsv4.norm_rope_store(
            pool, x.flatten(0, 1), weight, cos.flatten(0, 1), sin.flatten(0, 1), _wrapped(slots, pool.shape[0]), eps,
            record.name,
        )  # fmt: skip
        return pool, rows.unflatten(0, x.shape[:2])

    return Pattern(
        f"norm_rope_store.{record.name}", "store", "deepseek_v41", search, replace,
        inputs={
            "pool": f"u8[s {width(record)}]", "x": f"act[b t {record.group}*g]", "weight": f"f32[{record.group}*g]",
            "cos": "f32[b t r]", "sin": "f32[b t r]", "slots": "i64[b*t]",
        },
        scalars={"eps": 1.3579e-7},
    )  # fmt: skip


def _rope_only(record: KVFormat) -> Pattern:
    def search(pool: Tensor, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> _Two:
        rows = torch.ops.dsv4.quant_pack(torch.ops.dsv4.rope(x, cos, sin, False), record.name)
        return _put(pool, slots, rows.flatten(0, 1)), rows

    def replace(pool: Tensor, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> _Two:
        rows = torch.ops.dsv4.norm_rope_store(
            pool, x.flatten(0, 1), None, cos.flatten(0, 1), sin.flatten(0, 1), _wrapped(slots, pool.shape[0]), 0.0,
            record.name,
        )  # fmt: skip
        return pool, rows.unflatten(0, x.shape[:2])

    return Pattern(
        f"rope_store.{record.name}", "store", "deepseek_v41", search, replace,
        inputs={
            "pool": f"u8[s {width(record)}]", "x": f"act[b t {record.group}*g]", "cos": "f32[b t r]",
            "sin": "f32[b t r]", "slots": "i64[b*t]",
        },
    )  # fmt: skip


def _all() -> Iterator[Pattern]:
    for make in (_norm_rope, _rope_only):
        yield from map(make, grouped_formats())
    yield Pattern(
        "store_rows", "store", "deepseek_v41", _put, _store,
        inputs={"pool": "row[s w]", "slots": "i64[n]", "rows": "row[n w]"},
        dtypes={"row": (torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.int64)},
    )  # fmt: skip


PATTERNS = tuple(_all())
