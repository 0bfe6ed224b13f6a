"""The number formats below a KV record: E4M3, UE8M0 and E2M1 as short chains of ATen operations.

Every function is branch-free on data, works on any leading shape and on zero rows, and is exact in float32: rounding is
to nearest with ties to the even code, the sign of -0 is kept, and NaN only spreads to what it is combined with. The
chains are short and the same for every shape, because a compiler has to recognise them in a traced graph.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_FLOAT32_EXPONENT = 0x7F800000
_BELOW_TWO = 2.0 - 2.0**-23  # the largest float32 below 2


def split_groups(x: Tensor, group: int) -> Tensor:
    """[..., D] -> [..., D / group, group], a view."""
    return x.unflatten(-1, (-1, group))


def power_of_two_bits(x: Tensor) -> Tensor:
    """float32 x > 0 -> int32 bits of the smallest power of two >= x, exact; inf and NaN -> the bits of inf.

    A mantissa of zero times the largest float below two stays in its binade, any other mantissa is carried into the
    next one; keeping the exponent bits then rounds up. x is a normal number below 2^127 (the amax floors and the
    division by 6 or 448 see to both). A NaN of either sign keeps exactly the exponent bits of inf.
    """
    return (x * _BELOW_TWO).view(torch.int32) & _FLOAT32_EXPONENT


def ue8m0_from_bits(bits: Tensor) -> Tensor:
    """int32 bits of a float32 power of two -> its UE8M0 byte (exponent + 127); inf gives 0xFF, which means NaN."""
    return (bits >> 23).to(torch.uint8)


def ue8m0_to_float(scales: Tensor) -> Tensor:
    """uint8 UE8M0 -> float32; 0 is 2^-127, 0xFF is NaN."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """float32 -> float8_e4m3fn, saturating at +-448; NaN stays NaN.

    The clamp comes first on purpose: whether the bare cast saturates or gives NaN depends on the torch version and
    the device.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """uint8 E4M3 codes -> float32; 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """float32 -> float32 on the E2M1 grid (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives), saturating at +-6.

    The step of the grid is half the power of two below |x|, and never less than a half. Dividing by it is exact, so
    the only rounding is `round`, whose ties go to the even integer, which is the even code.
    """
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    step = (x.view(torch.int32) & _FLOAT32_EXPONENT).view(torch.float32).clamp(min=1.0) * 0.5
    return torch.round(x / step) * step


def e2m1_to_bytes(values: Tensor) -> Tensor:
    """float32 values on the E2M1 grid [..., D] -> uint8 [..., D / 2]: the even element in the low nibble.

    value / 64 is an E4M3 number whose bits are s00eem00, where seem is the E2M1 code. NaN gets the code of +-6.
    """
    bits = (values * 2.0**-6).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = ((bits >> 4) & 8) | ((bits >> 2) & 7)
    pairs = split_groups(codes, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def bytes_to_e2m1(payload: Tensor) -> Tensor:
    """uint8 [..., P] -> float32 [..., 2 P], exact."""
    low = ((payload << 4) & 0x80) | ((payload << 2) & 0x1C)
    high = (payload & 0x80) | ((payload >> 2) & 0x1C)
    bits = torch.stack((low, high), -1).flatten(-2)
    return e4m3_to_float(bits) * 64.0
