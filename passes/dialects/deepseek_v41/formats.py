"""The stored formats that patterns are made for: every record of plain groups, straight from the registry."""

from __future__ import annotations

from dscompile.formats import FORMATS, KVFormat

OUT_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}  # float32 last: the others contain it


def grouped_formats() -> tuple[KVFormat, ...]:
    """Records whose rows are whole groups of payload followed by their scales, one row after the other."""
    return tuple(
        record for record in FORMATS.values() if record.group and record.page.order == "rows" and not record.tail
    )


def width(record: KVFormat, groups: str = "g") -> str:
    """Row bytes of `groups` groups, as a dim expression of a pattern."""
    return f"{record.row_bytes(record.group)}*{groups}"
