"""Rotary embedding of adjacent pairs, inside kernels."""

import triton
import triton.language as tl


@triton.jit
def rotate_pairs(even, odd, c, s):
    """Each pair turned by its angle; products and sums are rounded one by one."""
    return even * c - odd * s, odd * c + even * s


@triton.jit
def load_angles(at, live, BLOCK: tl.constexpr, FIRST: tl.constexpr, R: tl.constexpr):
    """Cosines or sines for `rotate_tail`. at: pointers [N, 1] to each row's R / 2 numbers; live [N, 1]: which to load.

    Apart from the rotation, so that a kernel can ask for them before it waits for the values.
    """
    pair = tl.arange(0, BLOCK // 2)[None, :] - FIRST // 2
    return tl.load(at + pair, mask=live & (pair >= 0) & (pair < R // 2), other=0.0)


@triton.jit
def rotate_tail(
    values, cos, sin, N: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, R: tl.constexpr,
    INVERSE: tl.constexpr = False,
):  # fmt: skip
    """fp32 [N, BLOCK] with the R values from column FIRST (even) on rotated; the others as they were.

    cos, sin [N, BLOCK / 2]: from `load_angles`.
    """
    even, odd = tl.split(tl.reshape(values, (N, BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)[None, :] - FIRST // 2
    turns = (pair >= 0) & (pair < R // 2)
    c, s = cos.to(tl.float32), sin.to(tl.float32)
    if INVERSE:
        s = -s
    first, second = rotate_pairs(even, odd, c, s)
    # Selected rather than multiplied by one and zero, which would spread NaN from one value of a pair to the other.
    return tl.reshape(tl.join(tl.where(turns, first, even), tl.where(turns, second, odd)), (N, BLOCK))
