"""What experts on other devices are sent and send back: rows packed for the way there, rows added up on return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.layout import row_width
from dscompile.ops.registry import define

_PACK, _COMBINE = Check("pack_rows"), Check("combine_rows")


def _validate_pack(x: Tensor, token: Tensor, format: str) -> Any:
    """Check the arguments and return the bytes of a packed row."""
    _PACK.dtype("x", x, FLOATS)
    _PACK.rank("x", x, 2, "[N, D]")
    _PACK.dtype("token", token, INTEGERS)
    _PACK.rank("token", token, 1, "[S]")
    _PACK.choice("format", format, tuple(FORMATS))
    return row_width(_PACK, "format", format, x.shape[1])


def pack_rows(x: Tensor, token: Tensor, format: str) -> Tensor:
    """out[s] = x[token[s]] in `format`, -1: zero bytes.

    x [N, D], token int [S] below N -> uint8 [S, row bytes], as `quant_pack` lays them out: for "fp8_g32_ue8m0" D codes
    in E4M3, then D / 32 scales in UE8M0. Raises IndexError for a token below -1 or not below N.
    """
    width = _validate_pack(x, token, format)
    _PACK.index_range("token", token, -1, x.shape[0], "number of rows, -1 for none")
    return packed_rows(x, token, format, width)


def packed_rows(x: Tensor, token: Tensor, format: str, width: int) -> Tensor:
    """`pack_rows` into rows of `width` bytes, for tokens known to be right: no value is looked at, so that a GPU is not
    waited for."""
    if x.shape[0] == 0:
        return x.new_zeros((token.shape[0], width), dtype=torch.uint8)
    rows: Tensor = FORMATS[format].pack(x[token.clamp(min=0).long()])
    return rows.masked_fill((token < 0).unsqueeze(-1), 0)


def _validate_combine(rows: Tensor, slot: Tensor, weight: Tensor | None) -> None:
    _COMBINE.dtype("rows", rows, FLOATS)
    _COMBINE.rank("rows", rows, 2, "[S, D]")
    _COMBINE.dtype("slot", slot, INTEGERS)
    _COMBINE.rank("slot", slot, 2, "[N, R]")
    if weight is not None:
        _COMBINE.dtype("weight", weight, FLOATS)
        _COMBINE.shape("weight", weight, slot.shape)


def combine_rows(rows: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    """out[n] = sum over r of weight[n, r] * rows[slot[n, r]], in the order of r; -1 adds nothing.

    rows [S, D], slot int [N, R] below S, weight [N, R] or None for 1 -> fp32 [N, D]. Products and sums are rounded to
    fp32 one by one. Raises IndexError for a slot below -1 or not below S.
    """
    _validate_combine(rows, slot, weight)
    _COMBINE.index_range("slot", slot, -1, rows.shape[0], "number of rows, -1 for none")
    return added_rows(rows, slot, weight)


def added_rows(rows: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    """`combine_rows` for slots known to be right; no value is looked at either."""
    out = rows.new_zeros((slot.shape[0], rows.shape[1]), dtype=torch.float32)
    if rows.shape[0] == 0:
        return out
    for r in range(slot.shape[1]):
        value = rows[slot[:, r].clamp(min=0).long()].float()
        if weight is not None:
            value = value * weight[:, r].float().unsqueeze(-1)
        out = out + value.masked_fill((slot[:, r] < 0).unsqueeze(-1), 0)
    return out


def _pack_fake(x: Tensor, token: Tensor, format: str) -> Tensor:
    return x.new_empty((token.shape[0], _validate_pack(x, token, format)), dtype=torch.uint8)


def _combine_fake(rows: Tensor, slot: Tensor, weight: Tensor | None) -> Tensor:
    _validate_combine(rows, slot, weight)
    return rows.new_empty((slot.shape[0], rows.shape[1]), dtype=torch.float32)


@costed
def _pack_cost(N: Any, S: Any, D: Any, row_bytes: Any, x_bytes: Any = 2, index_bytes: Any = 8) -> Cost:
    """N rows of D values, named by S tokens, become S rows of `row_bytes` bytes; absolute maximum, divide, clamp,
    round. N is an upper bound where fewer rows are named."""
    return Cost(N * D * x_bytes + S * index_bytes, S * row_bytes, 4 * S * D)


@costed
def _combine_cost(N: Any, R: Any, D: Any, x_bytes: Any = 2, index_bytes: Any = 8, weight_bytes: Any = 0) -> Cost:
    """R rows of D values each for N tokens: a product, where there are weights, and a sum."""
    return Cost(N * R * (D * x_bytes + index_bytes + weight_bytes), N * D * 4, 2 * N * R * D)


def _pack_sizes(x: Tensor, token: Tensor, format: str) -> dict[str, Any]:
    return {
        "N": x.shape[0], "S": token.shape[0], "D": x.shape[1],
        "row_bytes": row_width(_PACK, "format", format, x.shape[1]), "x_bytes": x.element_size(),
        "index_bytes": token.element_size(),
    }  # fmt: skip


def _combine_sizes(rows: Tensor, slot: Tensor, weight: Tensor | None) -> dict[str, Any]:
    return {
        "N": slot.shape[0], "R": slot.shape[1], "D": rows.shape[1], "x_bytes": rows.element_size(),
        "index_bytes": slot.element_size(), "weight_bytes": 0 if weight is None else weight.element_size(),
    }  # fmt: skip


define(
    "pack_rows(Tensor x, Tensor token, str format) -> Tensor",
    family="experts", reference=pack_rows, fake=_pack_fake, cost=_pack_cost, sizes=_pack_sizes,
)  # fmt: skip
define(
    "combine_rows(Tensor rows, Tensor slot, Tensor? weight) -> Tensor",
    family="experts", reference=combine_rows, fake=_combine_fake, cost=_combine_cost, sizes=_combine_sizes,
)  # fmt: skip
