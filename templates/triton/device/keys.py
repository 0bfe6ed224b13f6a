"""Rows of keys inside kernels: loading them as they are stored, and turning them into values.

A row is plain values, or bytes `payload | bf16 tail | scales` as `dscompile.formats` lays them out. Loading and
decoding are two functions, so that a loop can load the next rows before it computes with these.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.formats.record import PLAIN_DTYPES

# What the kernels' `PAYLOAD` and `SCALE` may be
PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E2M1 = tl.constexpr(2)
UE8M0 = tl.constexpr(1)
SCALE_E4M3 = tl.constexpr(2)
FP32 = tl.constexpr(3)


@dataclass(frozen=True)
class KeyRows:
    """Rows [B, S, width] as a kernel takes them, with a dense last axis, and how one is laid out."""

    data: Tensor
    payload: int = 0
    group: int = 1
    scale: int = 0
    tail: int = 0

    def constants(self, prefix: str) -> dict[str, int]:
        values = {"PAYLOAD": self.payload, "GROUP": self.group, "SCALE": self.scale, "TAIL": self.tail}
        return {prefix + name: value for name, value in values.items()}


def key_rows(rows: Tensor, name: str) -> KeyRows:
    """rows [B, S, width] in the format `name`, or "none" for plain values."""
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    if name == "none":
        return KeyRows(rows)
    record = FORMATS[name]
    if record.is_plain:
        dtype = PLAIN_DTYPES[record.payload]
        if any(size % dtype.itemsize for size in (rows.storage_offset(), *rows.stride()[:2])):
            rows = rows.contiguous()
        return KeyRows(rows.view(dtype))
    scale = {"ue8m0": 1, "e4m3": 2, "fp32": 3}[record.scale]
    return KeyRows(rows, {"e4m3": 1, "e2m1": 2}[record.payload], record.group, scale, record.tail)


def refusal(rows: Tensor, name: str) -> str | None:
    """Why kernels cannot read these rows, or None."""
    record = None if name == "none" else FORMATS[name]
    if record is None or record.is_plain:
        return None
    if record.group & (record.group - 1):
        return f"{name!r} rows with groups of {record.group}, allowed: a power of two"
    if record.tail and record.payload == "e2m1":
        return f"{name!r} rows, allowed: four-bit rows without a bf16 tail"
    odd = [size for size in (rows.storage_offset(), *rows.stride()[:2]) if size % 2]
    if record.tail and odd:
        return f"{name!r} rows {odd[0]} bytes apart, allowed: an even number"
    return None


@triton.jit
def load_columns(base, rows, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[N, BLOCK] elements at base + rows[n] + column; zeros where not valid and from WIDTH on."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None] & tl.full((1, BLOCK), True, tl.int1)
    if WIDTH != BLOCK:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(base + rows[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def load_keys(
    base, rows, valid, D: tl.constexpr, BLOCK_D: tl.constexpr, PAYLOAD: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Rows as stored. rows: int64 [N], where each begins, in elements of `base`; valid: bool [N], the others are zeros.

    -> (payload, scales, tail); what a format does not have is the payload once more.
    """
    if PAYLOAD == PLAIN:
        payload = load_columns(base, rows, valid, D, BLOCK_D)
        return payload, payload, payload
    else:
        HEAD: tl.constexpr = D - TAIL
        PACKED: tl.constexpr = 2 if PAYLOAD == E2M1 else 1
        BYTES: tl.constexpr = HEAD // PACKED
        payload = load_columns(base, rows, valid, BYTES, BLOCK_D // PACKED)
        tail = payload
        if TAIL > 0:
            column = tl.arange(0, BLOCK_D)
            at = base + rows[:, None] + (BYTES + 2 * (column - HEAD))[None, :]
            inside = (column >= HEAD) & (column < D)
            tail = tl.load(at.to(tl.pointer_type(tl.bfloat16), bitcast=True), mask=valid[:, None] & inside[None, :],
                           other=0.0)  # fmt: skip
        start = rows + BYTES + 2 * TAIL
        if SCALE == FP32:
            # From bytes: nothing is known about the alignment of a row.
            scales = tl.zeros((rows.shape[0], BLOCK_D // GROUP), tl.int32)
            group = tl.arange(0, BLOCK_D // GROUP)
            inside = valid[:, None] & (group < HEAD // GROUP)[None, :]
            for byte in tl.static_range(4):
                part = tl.load(base + start[:, None] + (4 * group + byte)[None, :], mask=inside, other=0)
                scales |= part.to(tl.int32) << (8 * byte)
        else:
            scales = load_columns(base, start, valid, HEAD // GROUP, BLOCK_D // GROUP)
        return payload, scales, tail


@triton.jit
def e2m1_small(code):
    """int32 codes 0..15 -> fp32 values times 2^-14."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_values(scales, SCALE: tl.constexpr):
    """Stored scales -> fp32."""
    if SCALE == UE8M0:
        wide = scales.to(tl.int32)
        ends = ((wide == 0) | (wide == 255)).to(tl.int32) << 22  # 2^-127 and NaN
        return ((wide << 23) | ends).to(tl.float32, bitcast=True)
    elif SCALE == SCALE_E4M3:
        return scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return scales.to(tl.float32, bitcast=True)


# Four bytes of two codes each, and the scale of each byte -> (first of each byte, second of each byte), two to a
# register. The bytes of the eight magnitudes in bf16 stand in tables from which PRMT selects by code; signs come after.
E2M1_TIMES_BF16 = tl.constexpr("""{
    .reg .b32 m, x, h, l, s, v;
    and.b32 m, $4, 0x77777777;
    shl.b32 x, $4, 4;
    prmt.b32 h, 0x3f3f3f00, 0x40404040, m;
    prmt.b32 l, 0xc0800000, 0xc0804000, m;
    prmt.b32 v, h, l, 0x2604;
    prmt.b32 s, x, x, 0x9080;
    lop3.b32 v, v, s, 0x80008000, 0xf8;
    mul.rn.bf16x2 $0, v, $5;
    prmt.b32 v, h, l, 0x3715;
    prmt.b32 s, $4, $4, 0x9080;
    lop3.b32 v, v, s, 0x80008000, 0xf8;
    mul.rn.bf16x2 $2, v, $5;
    shr.u32 m, m, 16;
    prmt.b32 h, 0x3f3f3f00, 0x40404040, m;
    prmt.b32 l, 0xc0800000, 0xc0804000, m;
    prmt.b32 v, h, l, 0x2604;
    prmt.b32 s, x, x, 0xb0a0;
    lop3.b32 v, v, s, 0x80008000, 0xf8;
    mul.rn.bf16x2 $1, v, $6;
    prmt.b32 v, h, l, 0x3715;
    prmt.b32 s, $4, $4, 0xb0a0;
    lop3.b32 v, v, s, 0x80008000, 0xf8;
    mul.rn.bf16x2 $3, v, $6;
}""")


@triton.jit
def e2m1_times_bf16(data, scale):
    """uint8 [N, D / 2] and the bf16 scale of every byte -> bf16 values (even, odd), both [N, D / 2].

    Nothing is rounded: a code times a scale has few enough bits.
    """
    return tl.inline_asm_elementwise(
        E2M1_TIMES_BF16, "=&r,=&r,=&r,=&r,r,r,r", [data, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def key_values(
    payload, scales, tail, D: tl.constexpr, BLOCK_D: tl.constexpr, PAYLOAD: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, TAIL: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What `load_keys` returned -> values [N, BLOCK_D] of DTYPE: payload times scale in fp32, rounded once.

    ASM: machine instructions where they are shorter, with the same result; the interpreter has none.
    """
    N: tl.constexpr = payload.shape[0]
    if PAYLOAD == PLAIN:
        return payload.to(DTYPE)
    elif ASM and PAYLOAD == E2M1 and SCALE != FP32 and DTYPE == tl.bfloat16 and BLOCK_D >= 8:
        scale = tl.expand_dims(scale_values(scales, SCALE).to(tl.bfloat16), 2)
        each = tl.reshape(tl.broadcast_to(scale, (N, BLOCK_D // GROUP, GROUP // 2)), (N, BLOCK_D // 2))
        even, odd = e2m1_times_bf16(payload, each)
        return tl.reshape(tl.join(even, odd), (N, BLOCK_D))
    else:
        scale = scale_values(scales, SCALE)
        if PAYLOAD == E2M1:
            wide = payload.to(tl.int32)
            values = tl.reshape(tl.join(e2m1_small(wide & 15), e2m1_small(wide >> 4)), (N, BLOCK_D))
            if SCALE == SCALE_E4M3:
                scale = scale * 16384.0
            else:
                values = values * 16384.0  # such a scale could overflow
        else:
            values = payload.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        grouped = tl.reshape(values, (N, BLOCK_D // GROUP, GROUP)) * tl.expand_dims(scale, 2)
        values = tl.reshape(grouped, (N, BLOCK_D)).to(DTYPE)
        if TAIL > 0:
            column = tl.arange(0, BLOCK_D)
            values = tl.where((column >= D - TAIL)[None, :], tail.to(DTYPE), values)
        return values
