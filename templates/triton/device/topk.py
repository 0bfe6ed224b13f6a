"""Choosing the k best of a stream inside kernels, exactly, ties by index.

A score and its index make one int64 that orders as the choice does, so every number is different and a threshold
separates exactly k of them. NOTHING stands for no entry and is below every other.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**63))


@triton.jit
def ordered(score, index, NEWEST: tl.constexpr):
    """fp32 scores and indices 0 <= index < 2^31 -> int64: NaN first, then by falling score, then the lowest index first
    (NEWEST: the highest). The larger number is the better entry; none is NOTHING.
    """
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 ties with 0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    bits = tl.where(score != score, 0x7FFFFFFF, bits)
    place = index if NEWEST else 0x7FFFFFFF - index
    return (bits.to(tl.int64) << 32) | place.to(tl.int64)


@triton.jit
def index_of(entry, NEWEST: tl.constexpr):
    """The index, int64, in an entry of `ordered`."""
    place = entry & 0x7FFFFFFF
    return place if NEWEST else 0x7FFFFFFF - place


@triton.jit
def kth_best(entries, K):
    """int64 [R, N], different from each other but for NOTHING -> int64 [R]: the K-th best of a row.

    Where there are no more than K, a number that all of them reach. Halves the range of the numbers until exactly K
    entries reach the middle.
    """
    low = tl.full((entries.shape[0],), -(2**63) + 1, tl.int64)
    there = tl.sum((entries != NOTHING).to(tl.int32), 1)
    high = tl.where(there <= K, low, tl.max(entries, 1))
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up; a sum could overflow
        above = tl.sum((entries >= middle[:, None]).to(tl.int32), 1)
        open = low < high
        low = tl.where(open & (above >= K), middle, low)
        high = tl.where(open & (above <= K), tl.where(above == K, middle, middle - 1), high)
    return low


@triton.jit
def places(keep):
    """bool [R, N] -> int32 [R, N]: the how-manieth kept entry of its row each is."""
    return tl.cumsum(keep.to(tl.int32), 1) - 1


@triton.jit
def best_kept(buffer, row, count, K, CAPACITY: tl.constexpr):
    """The entries of int64 buffers at buffer + row [R] that are among the K best of their first `count` [R].

    -> (entries [R, CAPACITY], bool which to keep, the K-th best [R]). All of the program's stores are done before.
    """
    slot = tl.arange(0, CAPACITY)
    tl.debug_barrier()
    entries = tl.load(buffer + row[:, None] + slot[None, :], mask=slot[None, :] < count[:, None], other=NOTHING)
    tl.debug_barrier()
    worst = kth_best(entries, K)
    return entries, (entries >= worst[:, None]) & (entries != NOTHING), worst


@triton.jit
def add_best(buffer, row, count, bar, entries, K, CAPACITY: tl.constexpr):
    """Append `entries` [R, N] that are above `bar` [R] to the buffers at buffer + row; -> (count, bar), both [R].

    A full buffer is cut down to its K best, and its K-th best becomes the bar: what is below cannot be chosen any more.
    Entries keep their order. K + N <= CAPACITY.
    """
    fresh = entries > bar[:, None]
    more = tl.sum(fresh.to(tl.int32), 1)
    if tl.max(count + more, 0) > CAPACITY:
        held, keep, worst = best_kept(buffer, row, count, K, CAPACITY)
        tl.store(buffer + row[:, None] + places(keep), held, mask=keep)
        tl.debug_barrier()
        bar = tl.where(count >= K, worst, bar)
        count = tl.sum(keep.to(tl.int32), 1)
        fresh = entries > bar[:, None]
        more = tl.sum(fresh.to(tl.int32), 1)
    tl.store(buffer + row[:, None] + count[:, None] + places(fresh), entries, mask=fresh)
    return count + more, bar
