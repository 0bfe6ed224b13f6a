"""E2M1, E4M3 and UE8M0 inside kernels: bit for bit what `dscompile.formats.numeric` says.

Groups lie along the last axis. `HW` selects the conversion instruction of sm_100a and newer for E2M1; the arithmetic
form gives the same codes everywhere.
"""

import triton
import triton.language as tl


@triton.jit
def pow2_ceil_bits(x):
    """fp32 > 0 -> int32 bits of the smallest power of two >= x; inf and NaN -> the bits of inf."""
    return (x * 1.99999988079071044921875).to(tl.int32, bitcast=True) & 0x7F800000


@triton.jit
def e2m1_codes(x):
    """fp32 -> int32 codes 0..15 (sign, two bits of exponent, one of mantissa); ties to the even code, NaN to 6."""
    v = tl.abs(x)
    # Negated, so that NaN counts everywhere. A tie belongs to the neighbour whose code is even.
    code = 1 - (v <= 0.25).to(tl.int32)
    code += 1 - (v < 0.75).to(tl.int32)
    code += 1 - (v <= 1.25).to(tl.int32)
    code += 1 - (v < 1.75).to(tl.int32)
    code += 1 - (v <= 2.5).to(tl.int32)
    code += 1 - (v < 3.5).to(tl.int32)
    code += 1 - (v <= 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_pack_hw(low, high):
    """Two fp32 tensors -> int32 bytes: `low` in the low nibble. One instruction a pair; sm_100a and newer."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, $2, $1; cvt.u32.u8 $0, b; }",
        "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_bytes(x, N: tl.constexpr, D: tl.constexpr, HW: tl.constexpr):
    """fp32 [N, D] -> uint8 [N, D / 2], the even element in the low nibble."""
    low, high = tl.split(tl.reshape(x, (N, D // 2, 2)))
    if HW:
        return e2m1_pack_hw(low, high).to(tl.uint8)
    return (e2m1_codes(low) | (e2m1_codes(high) << 4)).to(tl.uint8)


@triton.jit
def e2m1_value(code):
    """int32 codes 0..15 -> fp32. By way of fp16 bits s000eem000000000, which are the value * 2^-14."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e2m1_values(data, N: tl.constexpr, D: tl.constexpr):
    """uint8 [N, D / 2] -> fp32 [N, D]."""
    wide = data.to(tl.int32)
    return tl.reshape(tl.join(e2m1_value(wide & 15), e2m1_value(wide >> 4)), (N, D))


@triton.jit
def ue8m0_value(data):
    """uint8 -> fp32; 0 is 2^-127, 255 is NaN."""
    wide = data.to(tl.int32)
    ends = ((wide == 0) | (wide == 255)).to(tl.int32) << 22
    return ((wide << 23) | ends).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(data):
    """uint8 -> fp32."""
    return data.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def max_nan(a, b):
    """The larger; NaN if either is."""
    return tl.where((a != a) | (a > b), a, b)


@triton.jit
def group_amax(x, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """fp32 [N, D] -> fp32 [N, D / GROUP]: the largest absolute value of a group, NaN if one of them is."""
    grouped = tl.abs(tl.reshape(x, (N, D // GROUP, GROUP)))
    holds_nan = tl.max((grouped != grouped).to(tl.int32), 2)
    return tl.where(holds_nan > 0, float("nan"), tl.max(grouped, 2))


@triton.jit
def scales_of(
    x, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr,
):  # fmt: skip
    """fp32 [N, D] -> (fp32 scales [N, D / GROUP], their bytes uint8): UE8M0 with POW2, else E4M3.

    LARGEST: of the payload type, 6 or 448; FLOOR: smallest amax. See `KVFormat`.
    """
    amax = group_amax(x, N, D, GROUP)
    # A floor that NaN passes: the comparison is false for it.
    amax = tl.where(amax < FLOOR, FLOOR, amax)
    if POW2:
        bits = pow2_ceil_bits(amax * (1.0 / LARGEST))
        stored = (bits >> 23).to(tl.uint8)
        return ue8m0_value(stored), stored
    else:
        quotient = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        code = tl.where(quotient > 448.0, 448.0, quotient).to(tl.float8e4nv)
        return code.to(tl.float32), code.to(tl.uint8, bitcast=True)


@triton.jit
def divide_by_scales(x, scales, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 [N, D], scales [N, D / GROUP] -> fp32 [N, D] within +-LARGEST, NaN kept; a true division."""
    grouped = tl.reshape(x, (N, D // GROUP, GROUP))
    scale = tl.broadcast_to(tl.expand_dims(scales, 2), (N, D // GROUP, GROUP))
    scaled = tl.reshape(tl.div_rn(grouped, scale), (N, D))
    scaled = tl.where(scaled > LARGEST, LARGEST, scaled)
    return tl.where(scaled < -LARGEST, -LARGEST, scaled)


@triton.jit
def e4m3_bytes(x):
    """fp32 within +-448 -> uint8."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
