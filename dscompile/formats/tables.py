"""`unpack_by_table`: the same values as `KVFormat.unpack`, faster on a CPU in eager mode.

A row with one-byte scales maps each pair (scale byte, payload byte) to one or two values, so 65536 entries hold every
possible answer and a row is read with one `index_select`. The table is made by `KVFormat.decode` itself, so the two
cannot disagree. For code that runs eagerly (a CPU kernel); code that is traced uses `unpack`.
"""

from functools import lru_cache

import torch
from torch import Tensor

from dscompile.formats.record import KVFormat

_INTEGER_OF_BYTES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_table(fmt: KVFormat) -> bool:
    """True if `fmt` is read faster by table: one-byte scales and no bf16 tail."""
    return fmt.scale_itemsize == 1 and not fmt.tail


@lru_cache(maxsize=16)
def _value_table(fmt: KVFormat, dtype: torch.dtype) -> Tensor:
    """One integer per (scale byte, payload byte) that holds the bits of its one or two values, [65536]."""
    every = torch.arange(256, dtype=torch.uint8)
    payload = every.repeat(256)[:, None].expand(-1, fmt.payload_bytes(fmt.group))
    scales = every.repeat_interleave(256)[:, None]
    pad = scales.new_zeros(scales.shape[0], fmt.pad_bytes)
    values = fmt.decode(payload, torch.cat((scales, pad), -1), fmt.group, dtype)
    values = values[:, : 2 if fmt.payload == "e2m1" else 1].contiguous()
    return values.view(_INTEGER_OF_BYTES[values.shape[1] * values.itemsize]).squeeze(1).clone()


def unpack_by_table(fmt: KVFormat, rows: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [..., row_bytes(dim)] on the CPU -> [..., dim] of `dtype`; bitwise `fmt.unpack(rows, dim, dtype)`.

    Formats without a table (see `has_table`) are read by `unpack`.
    """
    if not has_table(fmt) or rows.device.type != "cpu" or dtype.itemsize > 4:
        return fmt.unpack(rows, dim, dtype)
    fmt.check_rows(rows, dim)
    split, groups = fmt.payload_bytes(dim), dim // fmt.group
    lead = rows.shape[:-1]
    scales = rows[..., split : split + groups].to(torch.int32) << 8
    index = rows[..., :split].to(torch.int32).view(*lead, groups, split // groups) + scales.unsqueeze(-1)
    values = torch.index_select(_value_table(fmt, dtype), 0, index.view(-1))
    return values.view(*lead, split).view(dtype)
