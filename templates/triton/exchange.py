"""Rows for experts on other devices: gathered and packed in one launch, and on return added up in another.

A program takes a part of one row. Groups of a format lie within a part, so that no program needs another's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.targets import Target
from dscompile.templates.triton import row_layout
from dscompile.templates.triton.device.rows import encode
from dscompile.templates.triton.launching import interpreting, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

MOST_ROWS = 64


@triton.jit
def pack_rows_kernel(
    x, token, out, N, x_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr, PAYLOAD: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """out[s] = packed(x[token[s]]), BLOCK of its D values a program; zeros where token[s] is outside [0, N)."""
    slot = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    source = tl.load(token + slot).to(tl.int64)
    present = (source >= 0) & (source < N)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    given = tl.load(x + source * x_stride + column, mask=present & (column < D), other=0.0)
    payload, scales = encode(given.to(tl.float32), 1, BLOCK, PAYLOAD, GROUP, SCALE, POW2, FLOOR, HW)
    PER_BYTE: tl.constexpr = 2 if PAYLOAD == "e2m1" else 1
    byte = first // PER_BYTE + tl.arange(0, BLOCK // PER_BYTE)[None, :]
    to = out + slot * ROW
    tl.store(to + byte, tl.where(present, payload, tl.zeros_like(payload)), mask=byte < D // PER_BYTE)
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
    tl.store(to + D // PER_BYTE + group, tl.where(present, scales, tl.zeros_like(scales)), mask=group < D // GROUP)


@triton.jit
def combine_rows_kernel(
    rows, slot, weight, out, S, row_stride, slot_stride, weight_stride,
    R: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n] = sum over r of weight[n, r] * rows[slot[n, r]]; a slot outside [0, S) is none. BLOCK columns each."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((1, BLOCK), tl.float32)
    for r in tl.static_range(R):
        source = tl.load(slot + token * slot_stride + r).to(tl.int64)
        present = (source >= 0) & (source < S)
        value = tl.load(rows + source * row_stride + column, mask=present & (column < D), other=0.0).to(tl.float32)
        if weight is not None:
            value = value * tl.load(weight + token * weight_stride + r).to(tl.float32)
        # What belongs to no row may be NaN in the weights.
        total += tl.where(present, value, 0.0)
    tl.store(out + token * D + column, total, mask=column < D)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def pack_rows(x: Tensor, token: Tensor, format: str, *, config: Config, target: Target) -> Tensor:
    """`dsv4::pack_rows`: x [N, D], token int [S] -> uint8 [S, row bytes].

    A token that is not below N is none, like -1.
    """
    x, size = _dense(x), x.shape[1]
    record = FORMATS[format]
    out = x.new_empty((token.shape[0], record.row_bytes(size)), dtype=torch.uint8)
    block = _block(config, size, record.group)
    constants = row_layout.constants(format, size)
    launch(
        pack_rows_kernel, (token.shape[0], triton.cdiv(size, block)), x, token.contiguous(), out, x.shape[0],
        x.stride(0), config=config, D=size, BLOCK=block, ROW=out.shape[1],
        HW=target.has("e2m1_cvt") and not interpreting(),
        **{name: constants[name] for name in ("PAYLOAD", "GROUP", "SCALE", "POW2", "FLOOR")},
    )  # fmt: skip
    return out


def combine_rows(
    rows: Tensor, slot: Tensor, weight: Tensor | None, *, config: Config, target: Target
) -> Tensor:  # fmt: skip
    """`dsv4::combine_rows`: rows [S, D], slot int [N, R], weight [N, R] or None -> fp32 [N, D].

    A slot that is not below S is none, like -1.
    """
    rows, slot = _dense(rows), _dense(slot)
    weight = None if weight is None else _dense(weight)
    (tokens, count), size = slot.shape, rows.shape[1]
    out = rows.new_empty((tokens, size), dtype=torch.float32)
    block = _block(config, size, 1)
    launch(
        combine_rows_kernel, (tokens, triton.cdiv(size, block)), rows, slot, weight, out, rows.shape[0],
        rows.stride(0), slot.stride(0), 0 if weight is None else weight.stride(0),
        config=config, R=count, D=size, BLOCK=block,
    )  # fmt: skip
    return out


def _block(config: Config, size: int, group: int) -> int:
    return max(16, group, min(config["BLOCK"], triton.next_power_of_2(size)))


def _pack_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """16 values a thread are 16 bytes of codes; one warp needs no barrier where scales go to other threads."""
    yield config(1, 1, BLOCK=512)
    yield config(1, 1, BLOCK=256)
    yield config(4, 1, BLOCK=2048)


def _combine_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """Tiles of 8 values a thread and more; small ones where there are few tokens, so that all processors have some."""
    few, many = config(2, 1, BLOCK=512), config(4, 1, BLOCK=1024)
    yield from (few, many) if sizes["N"] <= 64 else (many, few)
    yield config(4, 1, BLOCK=2048)


def _packs(meta: Meta) -> str | None:
    format, size = meta["format"], meta["x"].shape[1]
    if row_layout.is_plain(format):
        return f"{format}: plain values, allowed: quantised formats"
    record = FORMATS[format]
    if record.tail or record.scale == "fp32" or record.pad_bytes:
        return f"{format}: fp32 scales, a tail or padding, allowed: codes and scales of a byte"
    if record.group & (record.group - 1):
        return f"{format}: groups of {record.group} values, allowed: a power of two"
    return None if size > 0 else "rows without a value"


def _combines(meta: Meta) -> str | None:
    count = meta["slot"].shape[1]
    if not 0 < count <= MOST_ROWS:
        return f"{count} rows a token, allowed: 1 to {MOST_ROWS}"
    return None if meta["rows"].shape[1] > 0 else "rows without a value"


TEMPLATES = (
    TritonTemplate("pack_rows", "dsv4::pack_rows", pack_rows, _pack_configs, applies=_packs),
    TritonTemplate("combine_rows", "dsv4::combine_rows", combine_rows, _combine_configs, applies=_combines),
)
