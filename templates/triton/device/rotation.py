"""Rotary embedding of adjacent pairs, inside kernels."""

import triton
import triton.language as tl


@triton.jit
def rotate_pairs(even, odd, c, s):
    """Each pair turned by its angle; products and sums are rounded one by one."""
    return even * c - odd * s, odd * c + even * s


@triton.jit
def rotate_tail(
    values, cos, sin, live, N: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, R: tl.constexpr,
    INVERSE: tl.constexpr = False,
):  # fmt: skip
    """fp32 [N, BLOCK] with the R values from column FIRST (even) on rotated; the others as they were.

    cos, sin: pointers [N, 1] to each row's R / 2 numbers; live [N, 1]: which rows to load them for.
    """
    even, odd = tl.split(tl.reshape(values, (N, BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)[None, :] - FIRST // 2
    turns = (pair >= 0) & (pair < R // 2)
    c = tl.load(cos + pair, mask=live & turns, other=1.0).to(tl.float32)
    s = tl.load(sin + pair, mask=live & turns, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    first, second = rotate_pairs(even, odd, c, s)
    # Selected rather than multiplied by one and zero, which would spread NaN from one value of a pair to the other.
    return tl.reshape(tl.join(tl.where(turns, first, even), tl.where(turns, second, odd)), (N, BLOCK))
