"""The number formats below a KV record: E4M3, UE8M0 and E2M1 as short chains of ATen operations.

Every function is branch-free on data, works on any leading shape and on zero rows, and is exact in float32: rounding is
to nearest with ties to the even code, the sign of -0 is kept, and NaN only spreads to what it is combined with. The
chains are short and the same for every shape, because a compiler has to recognise them in a traced graph.
"""

import torch
from torch import Tensor

# The constants of a chain are written as literals where they are used: Dynamo with dynamic=True turns a float that it
# reads from a global or a container into a graph input, and then the chain is no longer the same.


def split_groups(x: Tensor, group: int) -> Tensor:
    """[..., D] -> [..., D / group, group], a view."""
    return x.unflatten(-1, (-1, group))


def join_groups(x: Tensor, dim: int) -> Tensor:
    """[..., D / group, group] -> [..., D]; `dim` is D, known to the caller, so that no size is recomputed."""
    return x.reshape(*x.shape[:-2], dim)


def power_of_two_bits(x: Tensor) -> Tensor:
    """float32 x > 0 -> int32 bits of the smallest power of two >= x, exact; inf and NaN -> the bits of inf.

    A mantissa of zero times the largest float below two stays in its binade, any other mantissa is carried into the
    next one; keeping the exponent bits then rounds up. x is a normal number below 2^127 (the amax floors and the
    division by 6 or 448 see to both). A NaN of either sign keeps exactly the exponent bits of inf.
    """
    return (x * (2.0 - 2.0**-23)).view(torch.int32) & 0x7F800000


def ue8m0_from_bits(bits: Tensor) -> Tensor:
    """int32 bits of a float32 power of two -> its UE8M0 byte (exponent + 127); inf gives 0xFF, which means NaN."""
    return (bits >> 23).to(torch.uint8)


def ue8m0_to_float(scales: Tensor) -> Tensor:
    """uint8 UE8M0 -> float32; 0 is 2^-127, 0xFF is NaN.

    The byte is the exponent field; its two ends take the top mantissa bit as well (2^-127 is subnormal in float32).
    Bits rather than a view as float8_e8m0fnu: Inductor's C++ has no such type.
    """
    ends = ((scales == 0) | (scales == 255)).to(torch.int32) << 22
    return ((scales.to(torch.int32) << 23) | ends).view(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """float32 -> float8_e4m3fn, saturating at +-448; NaN stays NaN.

    The clamp comes first on purpose: whether the bare cast saturates or gives NaN depends on the torch version and
    the device.
    """
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def to_e4m3_scale(x: Tensor) -> Tensor:
    """float32 > 0 -> float8_e4m3fn, saturating at 448; NaN stays NaN."""
    return x.clamp(max=448.0).to(torch.float8_e4m3fn)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """uint8 E4M3 codes -> float32; 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """float32 -> float32 on the E2M1 grid (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives), saturating at +-6.

    The step of the grid is half the power of two below |x|, and never less than a half. Dividing by it is exact, so
    the only rounding is `round`, whose ties go to the even integer, which is the even code.
    """
    x = x.clamp(-6.0, 6.0)
    step = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=1.0) * 0.5
    return torch.round(x / step) * step


def e2m1_to_bytes(values: Tensor) -> Tensor:
    """float32 values on the E2M1 grid [..., D] -> uint8 [..., D / 2]: the even element in the low nibble.

    value / 64 is an E4M3 number whose bits are s00eem00, where seem is the E2M1 code: both formats have subnormals, and
    64 is 2 to the difference of their exponent biases. NaN gets the code of +6 or -6.
    """
    bits = (values * 2.0**-6).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = split_groups(((bits >> 4) & 8) | ((bits >> 2) & 7), 2)
    return codes[..., 0] | (codes[..., 1] << 4)


def bytes_to_e2m1(payload: Tensor) -> Tensor:
    """uint8 [..., P] -> float32 [..., 2 P], exact.

    As above by way of a format with subnormals, here float16 with the bits s000eem000000000 for value * 2^-14: a CPU
    reads float16 much faster than E4M3. (It writes float16 subnormals much slower, hence E4M3 on the way in.)
    """
    codes = payload.to(torch.int16)
    low = ((codes << 12) & -0x8000) | ((codes << 9) & 0x0E00)
    high = ((codes << 8) & -0x8000) | ((codes << 5) & 0x0E00)
    bits = torch.stack((low, high), -1).flatten(-2)
    return bits.view(torch.float16).to(torch.float32) * 2.0**14
