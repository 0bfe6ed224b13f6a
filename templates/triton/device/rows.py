"""Packed rows inside kernels: `payload | bf16 tail | scales | zero bytes`, of any `KVFormat` that is given as data.

PAYLOAD "e4m3" or "e2m1", GROUP, SCALE "ue8m0", "e4m3" or "fp32", POW2 (scales are powers of two), FLOOR, HEAD
(quantised values of a row), TAIL (bf16 values after them), PAD: see `row_layout.py`. Tiles are [N, BLOCK] with HEAD +
TAIL <= BLOCK, a power of two; what stands beyond is neither read nor written. ALIGNED: fp32 scales and bf16 tails lie
at multiples of their size.
"""

import triton
import triton.language as tl

from dscompile.templates.triton.device.formats import (
    e2m1_bytes,
    e2m1_codes,
    e2m1_value,
    e2m1_values,
    e4m3_bytes,
    e4m3_value,
    group_scales,
    quotient,
    spread,
    ue8m0_bytes,
    ue8m0_value,
)


@triton.jit
def encode(
    values, N: tl.constexpr, BLOCK: tl.constexpr, PAYLOAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    POW2: tl.constexpr, FLOOR: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """fp32 [N, BLOCK] -> (payload uint8 [N, BLOCK], or [N, BLOCK / 2] with two values to a byte; scales).

    The scales [N, BLOCK / GROUP] come as they are stored: uint8, or fp32 for SCALE "fp32".
    """
    LARGEST: tl.constexpr = 6.0 if PAYLOAD == "e2m1" else 448.0
    scales = group_scales(values, N, BLOCK, GROUP, LARGEST, FLOOR, POW2, SCALE == "e4m3")
    scaled = quotient(values, scales, N, BLOCK, GROUP, POW2, SCALE == "e4m3")  # not clamped: the codes saturate
    if PAYLOAD == "e2m1":
        payload = e2m1_bytes(scaled, N, BLOCK, HW)
    else:
        payload = e4m3_bytes(scaled)
    if SCALE == "ue8m0":
        stored = ue8m0_bytes(scales)
    elif SCALE == "e4m3":
        stored = e4m3_bytes(scales)
    else:
        stored = scales
    return payload, stored


@triton.jit
def store_words(at, place, bits, mask, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """The lowest SIZE bytes (2 or 4) of int32 bits to at + SIZE * place; at: uint8 pointers."""
    if ALIGNED:
        KIND: tl.constexpr = tl.int32 if SIZE == 4 else tl.int16
        tl.store(at.to(tl.pointer_type(KIND), bitcast=True) + place, bits.to(KIND), mask=mask)
    else:
        for byte in tl.static_range(SIZE):
            tl.store(at + SIZE * place + byte, (bits >> (8 * byte)).to(tl.uint8), mask=mask)


@triton.jit
def load_words(at, place, mask, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """The opposite: int32 bits, 0 where the mask is False."""
    if ALIGNED:
        KIND: tl.constexpr = tl.int32 if SIZE == 4 else tl.int16
        bits = tl.load(at.to(tl.pointer_type(KIND), bitcast=True) + place, mask=mask, other=0).to(tl.int32)
    else:
        bits = tl.load(at + SIZE * place, mask=mask, other=0).to(tl.int32)
        for byte in tl.static_range(1, SIZE):
            bits |= tl.load(at + SIZE * place + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return bits


@triton.jit
def write_rows(
    at, write, payload, scales, values, N: tl.constexpr, BLOCK: tl.constexpr, PAYLOAD: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, PAD: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store whole rows. at: uint8 pointers [N, 1] to them; write bool [N, 1]; the rest from `encode`."""
    WIDTH: tl.constexpr = BLOCK // 2 if PAYLOAD == "e2m1" else BLOCK
    HEAD_BYTES: tl.constexpr = HEAD // 2 if PAYLOAD == "e2m1" else HEAD
    SCALES_AT: tl.constexpr = HEAD_BYTES + 2 * TAIL
    byte = tl.arange(0, WIDTH)[None, :]
    tl.store(at + byte, payload, mask=write & (byte < HEAD_BYTES))
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    if SCALE == "fp32":
        bits = scales.to(tl.int32, bitcast=True)
        store_words(at + SCALES_AT, group, bits, write & (group < HEAD // GROUP), 4, ALIGNED)
    else:
        tl.store(at + SCALES_AT + group, scales, mask=write & (group < HEAD // GROUP))
    if TAIL > 0:
        column = tl.arange(0, BLOCK)[None, :] - HEAD
        bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        store_words(at + HEAD_BYTES, column, bits, write & (column >= 0) & (column < TAIL), 2, ALIGNED)
    for byte in tl.static_range(PAD):
        SIZE: tl.constexpr = 4 if SCALE == "fp32" else 1
        tl.store(at + SCALES_AT + HEAD // GROUP * SIZE + byte, tl.zeros((N, 1), tl.uint8), mask=write)


@triton.jit
def read_rows(
    at, read, N: tl.constexpr, BLOCK: tl.constexpr, PAYLOAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, ALIGNED: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """The quantised values of rows, fp32 [N, BLOCK]; zeros from HEAD on and in rows with read False.

    at, read: as in `write_rows`.
    """
    WIDTH: tl.constexpr = BLOCK // 2 if PAYLOAD == "e2m1" else BLOCK
    HEAD_BYTES: tl.constexpr = HEAD // 2 if PAYLOAD == "e2m1" else HEAD
    SCALES_AT: tl.constexpr = HEAD_BYTES + 2 * TAIL
    byte = tl.arange(0, WIDTH)[None, :]
    payload = tl.load(at + byte, mask=read & (byte < HEAD_BYTES), other=0)
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    present = read & (group < HEAD // GROUP)
    if SCALE == "fp32":
        scales = load_words(at + SCALES_AT, group, present, 4, ALIGNED).to(tl.float32, bitcast=True)
    elif SCALE == "ue8m0":
        scales = ue8m0_value(tl.load(at + SCALES_AT + group, mask=present, other=0))
    else:
        scales = e4m3_value(tl.load(at + SCALES_AT + group, mask=present, other=0))
    if PAYLOAD == "e2m1":
        values = e2m1_values(payload, N, BLOCK, HW)
    else:
        values = e4m3_value(payload)
    return values * spread(scales, N, BLOCK, GROUP)


@triton.jit
def read_tails(
    at, read, BLOCK_TAIL: tl.constexpr, PAYLOAD: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """The unquantised values of rows, bf16 [N, BLOCK_TAIL], zeros from TAIL on."""
    HEAD_BYTES: tl.constexpr = HEAD // 2 if PAYLOAD == "e2m1" else HEAD
    column = tl.arange(0, BLOCK_TAIL)[None, :]
    bits = load_words(at + HEAD_BYTES, column, read & (column < TAIL), 2, ALIGNED)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def quantised(
    values, N: tl.constexpr, BLOCK: tl.constexpr, PAYLOAD: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    POW2: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """fp32 [N, BLOCK] -> fp32 [N, BLOCK]: what a reader sees after a row was stored."""
    LARGEST: tl.constexpr = 6.0 if PAYLOAD == "e2m1" else 448.0
    scales = group_scales(values, N, BLOCK, GROUP, LARGEST, FLOOR, POW2, SCALE == "e4m3")
    scaled = quotient(values, scales, N, BLOCK, GROUP, POW2, SCALE == "e4m3")  # not clamped: the codes saturate
    if PAYLOAD == "e2m1":
        codes = e2m1_value(e2m1_codes(scaled))
    else:
        codes = e4m3_value(e4m3_bytes(scaled))
    if SCALE == "ue8m0":
        scales = ue8m0_value(ue8m0_bytes(scales))  # NaN where it was inf
    return codes * spread(scales, N, BLOCK, GROUP)
