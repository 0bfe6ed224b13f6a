"""What one row of an exchange holds, byte by byte: the token's values, the slots that it wants there, their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.ops.exchange import packed_rows

PAYLOAD = "fp8_g32_ue8m0"
_SLOT, _WEIGHT = torch.int16, torch.float32


def payload_bytes(hidden: int, dtype: torch.dtype, payload: str) -> int:
    """Bytes of a token's values: hidden + hidden / 32 for "fp8" (5,280 at 5,120), else those of the dtype."""
    return FORMATS[PAYLOAD].row_bytes(hidden) if payload == "fp8" else hidden * dtype.itemsize


def label_bytes(top_k: int) -> int:
    """Bytes of a row's slots (int16) and weights (fp32)."""
    return top_k * (_SLOT.itemsize + _WEIGHT.itemsize)


def pack(x: Tensor, token: Tensor, slots: Tensor, weights: Tensor, payload: str) -> Tensor:
    """x [N, D], token int64 [S] (-1: an unused row), slots int64 [S, k], weights [N, k] -> uint8 [S, row bytes].

    An unused row is zero but for its slots, which are -1.
    """
    if payload == "fp8":
        # The operator would read the tokens to check them.
        values = packed_rows(x, token, PAYLOAD, payload_bytes(x.shape[1], x.dtype, payload))
    else:
        values = _bytes(_rows(x, token))
    shares = _rows(weights.to(_WEIGHT), token)
    return torch.cat((values, _bytes(slots.to(_SLOT)), _bytes(shares)), 1)


def unpack(
    rows: Tensor, hidden: int, top_k: int, dtype: torch.dtype, weights_dtype: torch.dtype, payload: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows uint8 [M, row bytes] -> x [M, hidden] in `dtype`, slots int64 [M, k], weights [M, k]."""
    ends = payload_bytes(hidden, dtype, payload)
    values, labels = rows[:, :ends].contiguous(), rows[:, ends:]
    x = FORMATS[PAYLOAD].unpack(values, hidden, dtype) if payload == "fp8" else _as(values, dtype)
    cut = top_k * _SLOT.itemsize
    slots = _as(labels[:, :cut], _SLOT).long()
    return x, slots, _as(labels[:, cut:], _WEIGHT).to(weights_dtype)


def _rows(values: Tensor, token: Tensor) -> Tensor:
    if values.shape[0] == 0:
        return values.new_zeros((token.shape[0], values.shape[1]))
    return values[token.clamp(min=0)].masked_fill((token < 0).unsqueeze(1), 0)


def _bytes(values: Tensor) -> Tensor:
    if values.shape[0] == 0:
        return values.new_empty((0, values.shape[1] * values.element_size()), dtype=torch.uint8)
    return values.contiguous().view(torch.uint8)


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.shape[0] == 0:
        return values.new_empty((0, values.shape[1] // dtype.itemsize), dtype=dtype)
    # A copy, not contiguous(): a single row counts as contiguous, whatever its stride and offset.
    return values.clone(memory_format=torch.contiguous_format).view(dtype)
