"""Attention over blocks of keys that are their own values: online softmax, rotation of queries and results."""

import triton
import triton.language as tl

# Where the running maximum starts: finite, so that a query without keys gives 0 and not NaN.
START = tl.constexpr(-1e30)


@triton.jit
def rotated(
    x, cos, sin, row, there, TOKENS: tl.constexpr, INVERSE: tl.constexpr, SKIP: tl.constexpr, HALF: tl.constexpr
):
    """x [M, N] with 2 * HALF columns from SKIP on rotated pair by pair, in fp32, rounded once to x's dtype.

    cos, sin: pointers to rows of HALF; row: int64 [TOKENS], which of them is for each M / TOKENS rows of x; there: bool
    [TOKENS], whether there is one. N is a power of two, SKIP even.
    """
    EACH: tl.constexpr = x.shape[0] // TOKENS
    PAIRS: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, PAIRS)
    inside = (pair >= SKIP // 2) & (pair < SKIP // 2 + HALF)
    at = row[:, None] * HALF + (pair - SKIP // 2)[None, :]
    mask = there[:, None] & inside[None, :]
    c = tl.expand_dims(tl.load(cos + at, mask=mask, other=0.0).to(tl.float32), 1)
    s = tl.expand_dims(tl.load(sin + at, mask=mask, other=0.0).to(tl.float32), 1)
    if INVERSE:
        s = -s
    even, odd = tl.split(tl.reshape(x, (TOKENS, EACH, PAIRS, 2)))
    a, b = even.to(tl.float32), odd.to(tl.float32)
    inside = inside[None, None, :]
    even = tl.where(inside, (a * c - b * s).to(x.dtype), even)
    odd = tl.where(inside, (b * c + a * s).to(x.dtype), odd)
    return tl.reshape(tl.join(even, odd), (TOKENS * EACH, 2 * PAIRS))


@triton.jit
def rotate_stored(
    out, at, live, cos, sin, row, there, TOKENS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate back the last 2 * HALF of D columns of the rows at out + at [M] that this program has just stored.

    They are few, and as a tile of their own they need few registers; the whole result stands in the layout of a matrix
    product, where a thread has too many columns. BLOCK >= 2 * HALF, a power of two.
    """
    tl.debug_barrier()
    column = tl.arange(0, BLOCK)
    mask = live[:, None] & (column < 2 * HALF)[None, :]
    pointers = out + at[:, None] + (D - 2 * HALF + column)[None, :]
    turned = rotated(tl.load(pointers, mask=mask, other=0.0), cos, sin, row, there, TOKENS, True, 0, HALF)
    tl.debug_barrier()
    tl.store(pointers, turned, mask=mask)


@triton.jit
def attend(q, keys, valid, at, low, high, top, total, acc, scale, TOKENS: tl.constexpr, SWAP: tl.constexpr):
    """One block of keys [N, D], zeros where not valid [N], for queries q [M, D] of TOKENS tokens.

    A token sees the valid keys; if there are several tokens, those of them with low [M] <= at [N] < high [M].
    top, total: fp32 [M], acc fp32 [M, D]; returns the three, brought forward.
    SWAP computes transposed, with the queries as columns and acc [D, M]: few queries then fill a matrix instruction
    that has at least 64 rows.
    """
    AXIS: tl.constexpr = 0 if SWAP else 1
    if TOKENS == 1:
        seen = tl.expand_dims(valid, 1 - AXIS)
    else:
        # What is no number in a row must not reach a token that does not see the row by way of 0 * NaN.
        odd = tl.max((tl.abs(keys.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1) > 0
        keys = tl.where(odd[:, None], 0.0, keys).to(keys.dtype)
        at = tl.expand_dims(at, 1 - AXIS)
        seen = (at >= tl.expand_dims(low, AXIS)) & (at < tl.expand_dims(high, AXIS)) & tl.expand_dims(valid, 1 - AXIS)
    if SWAP:
        z = tl.dot(keys, tl.trans(q), input_precision="ieee") * scale
    else:
        z = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if TOKENS > 1:
        z = tl.where(tl.expand_dims(odd, 1 - AXIS), float("nan"), z)
    z = tl.where(seen, z, START)
    higher = tl.maximum(top, tl.max(z, AXIS))
    p = tl.where(seen, tl.exp(z - tl.expand_dims(higher, AXIS)), 0.0)
    shrink = tl.exp(top - higher)
    total = total * shrink + tl.sum(p, AXIS)
    acc = acc * tl.expand_dims(shrink, AXIS)
    p = p.to(keys.dtype)
    if SWAP:
        acc = tl.dot(tl.trans(keys), p, acc, input_precision="ieee")
    else:
        acc = tl.dot(p, keys, acc, input_precision="ieee")
    return higher, total, acc


@triton.jit
def finished(acc, total, top, sink, head, live, some):
    """acc [M, D] over the denominator, which the sinks (pointer or None) of `head` [M] join; 0 where not `some` [M]."""
    if sink is not None:
        total += tl.exp(tl.load(sink + head, mask=live, other=0.0).to(tl.float32) - top)
    return tl.where(some[:, None], acc / total[:, None], 0.0)


@triton.jit
def combined(
    part, ends, sink, query, head, live, written, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """What SPLITS programs have seen of their keys, put together: fp32 [M, BLOCK_D].

    part [.., SPLITS, H, D], ends [.., SPLITS, 2, H]: the sums, maxima and denominators that they left, of which a part
    without keys has no sum; `query` and `head` [M] say where. written: how many parts, from the first on, have a sum,
    or None if only their denominators tell. PADDED: SPLITS or more, a power of two. TOGETHER: parts loaded at a time.
    """
    split = tl.arange(0, PADDED)[:, None]
    place = ends + (query * SPLITS * 2 * H + head)
    mask = (split < SPLITS) & live[None, :]
    tops = tl.load(place[None, :] + 2 * split * H, mask=mask, other=START)
    totals = tl.load(place[None, :] + (2 * split + 1) * H, mask=mask, other=-1.0)
    top = tl.max(tops, 0)
    some = tl.max((totals != -1.0).to(tl.int32), 0) > 0
    total = tl.sum(tl.where(totals == -1.0, 0.0, totals) * tl.exp(tops - top[None, :]), 0)
    column = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (column < D)[None, :]
    at = part + ((query * SPLITS * H + head) * D)[:, None] + column[None, :]
    acc = tl.zeros((head.shape[0], BLOCK_D), tl.float32)
    for first in tl.range(0, SPLITS, TOGETHER):
        for more in tl.static_range(TOGETHER):
            now = first + more
            if written is not None:
                there = tl.full(head.shape, 0, tl.int32) + now < written
            else:
                there = live & (tl.full(head.shape, 0, tl.int32) + now < SPLITS)
                there = tl.load(place + (2 * now + 1) * H, mask=there, other=0.0) > 0.0
            shrink = tl.exp(tl.load(place + 2 * now * H, mask=live & there, other=START) - top)
            acc += shrink[:, None] * tl.load(at + now * H * D, mask=inside & there[:, None], other=0.0)
    return finished(acc, total, top, sink, head, live, some)
