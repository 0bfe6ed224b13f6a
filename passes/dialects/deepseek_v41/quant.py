"""Packing, unpacking and fake quantisation of every registered format: the traced record itself is the pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dscompile.formats import KVFormat
from dscompile.passes.dialects.deepseek_v41.formats import OUT_DTYPES, grouped_formats, width
from dscompile.passes.engine import Pattern


def _fake_quant(record: KVFormat) -> Pattern:
    def replace(x: Tensor) -> Tensor:
        return torch.ops.dsv4.fake_quant(x, record.name)

    return Pattern(
        f"fake_quant.{record.name}", "quant", "deepseek_v41", lambda x: record.fake_quant(x), replace,
        inputs={"x": f"act[*B {record.group}*g]"},
    )  # fmt: skip


def _pack(record: KVFormat) -> Pattern:
    def replace(x: Tensor) -> Tensor:
        return torch.ops.dsv4.quant_pack(x, record.name)

    return Pattern(
        f"quant_pack.{record.name}", "quant", "deepseek_v41", lambda x: record.pack(x), replace,
        inputs={"x": f"act[*B {record.group}*g]"},
    )  # fmt: skip


def _unpack(record: KVFormat, dtype: torch.dtype, short: str) -> Pattern:
    per_group = record.row_bytes(record.group)

    def dim(rows: Tensor) -> int:
        return rows.shape[-1] // per_group * record.group

    def search(rows: Tensor) -> Tensor:
        return record.unpack(rows, dim(rows), dtype)

    def replace(rows: Tensor) -> Tensor:
        return torch.ops.dsv4.unpack(rows, record.name, dim(rows), dtype)

    return Pattern(
        f"unpack.{record.name}.{short}", "quant", "deepseek_v41", search, replace,
        inputs={"rows": f"u8[*B {width(record)}]"},
    )  # fmt: skip


def _all() -> Iterator[Pattern]:
    make: Callable[[KVFormat], Pattern]
    for make in (_fake_quant, _pack):
        yield from map(make, grouped_formats())
    for record in grouped_formats():
        for short, name in OUT_DTYPES.items():
            yield _unpack(record, getattr(torch, name), short)


PATTERNS = tuple(_all())
