"""How operations name storage: a record of `dscompile.formats`, or "none" for plain values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscompile.formats import FORMATS, KVFormat
from dscompile.ops.checks import FLOATS, Check

PLAIN = "none"


def lookup(check: Check, argument: str, name: str) -> KVFormat | None:
    """The format record, or None for plain rows; ValueError lists the known names."""
    if name == PLAIN:
        return None
    check.choice(argument, name, (PLAIN, *FORMATS))
    return FORMATS[name]


def row_width(check: Check, argument: str, name: str, dim: Any) -> Any:
    """Elements of one stored row: bytes of a packed row, or the values themselves for plain rows."""
    fmt = lookup(check, argument, name)
    if fmt is None:
        return dim
    try:
        return fmt.row_bytes(dim)
    except ValueError as error:
        raise ValueError(check.message(argument, repr(name), f"a format that can hold the row ({error})")) from None


def row_dtype(name: str, plain: torch.dtype) -> torch.dtype:
    return plain if name == PLAIN else torch.uint8


def check_rows(check: Check, argument: str, rows: Tensor, format_argument: str, name: str, dim: Any) -> None:
    """The last axis of `rows` holds rows of `dim` values in this format."""
    width = row_width(check, format_argument, name, dim)
    check.dtype(argument, rows, FLOATS if name == PLAIN else (torch.uint8,))
    allowed = f"last axis {width} ({name!r} rows of {dim} values)"
    check.that(rows.shape[-1] == width, f"shape of {argument}", list(rows.shape), allowed)


def fresh(out: Tensor, source: Tensor) -> Tensor:
    """`out`, copied if it shares memory with `source`: an operation must not return a view of its argument."""
    shared = out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return out.clone() if shared else out


def decode_rows(rows: Tensor, name: str, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] to values [..., dim]."""
    if name == PLAIN:
        return rows.to(dtype)
    return FORMATS[name].unpack(rows.contiguous(), dim, dtype)  # its views of bytes need a dense last axis
