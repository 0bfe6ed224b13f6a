"""E2M1, E4M3 and UE8M0 inside kernels: bit for bit what `dscompile.formats.numeric` says.

Groups lie along the last axis. `HW` selects the conversion instructions of sm_100a and newer for E2M1; the arithmetic
form gives the same codes and values everywhere.
"""

import triton
import triton.language as tl

#: The interpreter rounds the product in a fused multiply-add.
FUSED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def pow2_ceil_bits(x):
    """fp32 > 0 -> int32 bits of the smallest power of two >= x; inf and NaN -> the bits of inf."""
    return (x * 1.99999988079071044921875).to(tl.int32, bitcast=True) & 0x7F800000


@triton.jit
def e2m1_codes(x):
    """fp32 -> int32 codes 0..15 (sign, two bits of exponent, one of mantissa); ties to the even code, NaN to +-6."""
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    v = tl.minimum(tl.abs(x), 6.0)  # also where x is NaN: the minimum is the number then
    # Adding 2^22 times the power of two below v (at least 1) leaves room for one bit of mantissa: the sum is rounded
    # to the grid, ties to even. Numbers of the grid times 2^-126 have their code in the topmost bits below the sign.
    exponent = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    shift = (exponent + 0x0B000000).to(tl.float32, bitcast=True)
    rounded = ((v + shift) - shift) * 1.1754943508222875e-38
    return (rounded.to(tl.int32, bitcast=True) >> 22) | sign


@triton.jit
def e2m1_pack_hw(low, high):
    """Two fp32 tensors -> int32 bytes: `low` in the low nibble. One instruction a pair; sm_100a and newer."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, $2, $1; cvt.u32.u8 $0, b; }",
        "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_words_hw(low, high):
    """As `e2m1_pack_hw`, with uint8 bytes that lie four to a register."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 a, b, c, d;
        cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;
        cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
        cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;
        cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
        mov.b32 $0, {a, b, c, d};
        }""",
        "=r,f,f,f,f,f,f,f,f", [low, high], dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def e2m1_bytes(x, N: tl.constexpr, D: tl.constexpr, HW: tl.constexpr):
    """fp32 [N, D] -> uint8 [N, D / 2], the even element in the low nibble."""
    low, high = tl.split(tl.reshape(x, (N, D // 2, 2)))
    if HW:
        packed = e2m1_words_hw(low, high)
    else:
        packed = (e2m1_codes(low) | (e2m1_codes(high) << 4)).to(tl.uint8)
    return packed


@triton.jit
def e2m1_value(code):
    """int32 codes 0..15 -> fp32. By way of fp16 bits s000eem000000000, which are the value * 2^-14."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e2m1_halves_hw(data):
    """uint8 -> (values of the low nibbles, of the high nibbles), fp16; one instruction a byte; sm_100a and newer."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 b; .reg .b32 t; cvt.u8.u32 b, $2; cvt.rn.f16x2.e2m1x2 t, b; mov.b32 {$0, $1}, t; }",
        "=h,=h,r", [data.to(tl.int32)], dtype=(tl.float16, tl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_values(data, N: tl.constexpr, D: tl.constexpr, HW: tl.constexpr = False):
    """uint8 [N, D / 2] -> fp32 [N, D]."""
    if HW:
        low, high = e2m1_halves_hw(data)
        pairs = tl.join(low.to(tl.float32), high.to(tl.float32))
    else:
        wide = data.to(tl.int32)
        pairs = tl.join(e2m1_value(wide & 15), e2m1_value(wide >> 4))
    return tl.reshape(pairs, (N, D))


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
    # As integers, magnitudes are in the same order, with inf above all numbers and NaN above inf.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.reshape(bits, (N, D // GROUP, GROUP)), 2).to(tl.float32, bitcast=True)


@triton.jit
def group_scales(
    x, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """fp32 [N, D] -> fp32 [N, D / GROUP]: the scales as a reader sees them, but inf for what is stored as UE8M0 NaN.

    LARGEST: of the payload type, 6 or 448; FLOOR: smallest amax; POW2: rounded up to a power of two (UE8M0, or fp32
    with pow2); E4M3: rounded to that type; neither: exact (fp32). See `KVFormat`.
    """
    amax = group_amax(x, N, D, GROUP)
    # A floor that NaN passes: the comparison is false for it.
    amax = tl.where(amax < FLOOR, FLOOR, amax)
    if E4M3:
        quotient = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        scales = tl.where(quotient > 448.0, 448.0, quotient).to(tl.float8e4nv).to(tl.float32)
    elif POW2:
        scales = pow2_ceil_bits(amax * (1.0 / LARGEST)).to(tl.float32, bitcast=True)
    else:
        scales = amax * (1.0 / LARGEST)
    return scales


@triton.jit
def ue8m0_bytes(scales):
    """fp32 powers of two, or inf -> uint8."""
    return (scales.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def scales_of(
    x, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr,
):  # fmt: skip
    """fp32 [N, D] -> (fp32 scales [N, D / GROUP], their bytes uint8): UE8M0 with POW2, else E4M3."""
    scales = group_scales(x, N, D, GROUP, LARGEST, FLOOR, POW2, not POW2)
    if POW2:
        stored = ue8m0_bytes(scales)
        scales = ue8m0_value(stored)
    else:
        stored = e4m3_bytes(scales)
    return scales, stored


@triton.jit
def spread(scales, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """[N, D / GROUP] -> [N, D]: each for the values of its group."""
    return tl.reshape(tl.broadcast_to(tl.expand_dims(scales, 2), (N, D // GROUP, GROUP)), (N, D))


@triton.jit
def clamp_to(x, LARGEST: tl.constexpr):
    """fp32 -> within +-LARGEST, NaN kept."""
    x = tl.where(x > LARGEST, LARGEST, x)
    return tl.where(x < -LARGEST, -LARGEST, x)


@triton.jit
def quotient(
    x, scales, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, POW2: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """fp32 [N, D] / scales [N, D / GROUP], rounded to nearest as a division is; what the scales are makes it cheaper.

    POW2: powers of two from 2^-126 to 2^126, or inf; E4M3: what `group_scales` makes of x, and not 0
    (its FLOOR is at least 2^-10 times LARGEST).
    """
    if POW2:
        # The reciprocal and the product with it are exact.
        opposite = tl.maximum(0x7F000000 - scales.to(tl.int32, bitcast=True), 0)
        result = x * spread(opposite.to(tl.float32, bitcast=True), N, D, GROUP)
    elif E4M3 and FUSED:
        # One division a group. The first guess is off by at most 1.5 units in the last place, the remainder is exact
        # (the scale has four bits), and so the second is off by less than 2^-23 units before it is rounded, while a
        # quotient by four bits is a thirtieth of a unit or more away from where rounding changes. The order of signs
        # keeps -0, the bounds keep infinities (whatever is beyond 448 saturates).
        reciprocal = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
        scale, factor = spread(scales, N, D, GROUP), spread(reciprocal, N, D, GROUP)
        guess = tl.maximum(tl.minimum(x * factor, 1024.0), -1024.0)
        result = tl.fma(tl.fma(guess, scale, -x), -factor, guess)
    else:
        result = tl.div_rn(x, spread(scales, N, D, GROUP))
    return result


@triton.jit
def divide_by_scales(
    x, scales, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    POW2: tl.constexpr = False,
):  # fmt: skip
    """fp32 [N, D], scales [N, D / GROUP] -> fp32 [N, D] within +-LARGEST, NaN kept; a true division. See `quotient`."""
    return clamp_to(quotient(x, scales, N, D, GROUP, POW2, False), LARGEST)


@triton.jit
def e4m3_bytes(x):
    """fp32 -> uint8; saturates at +-448, NaN kept."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
