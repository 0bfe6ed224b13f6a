"""Token-expert pairs in the order of their experts, on the device and with static sizes.

A pair is one entry of indices [N, k], numbered n * k + j. Its index may be -1 or anything outside [0, E): then it has
no expert, gets no slot, and no tile covers it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import config

# Up to so many pairs, comparing each with all others is one launch of a few microseconds.
FEW = 2048
BLOCK = 16
_MANY_BLOCK, _MANY_CHUNK = 256, 16
# Of its own: what suits the products says nothing about sorting.
CONFIG = config(8, 2)


@triton.jit
def expert_of(indices, pair, PAIRS, EXPERTS: tl.constexpr):
    """int32: the expert of each pair; EXPERTS where there is none. Compared in 64 bits."""
    index = tl.load(indices + pair, mask=pair < PAIRS, other=-1).to(tl.int64)
    return tl.where((index >= 0) & (index < EXPERTS), index, EXPERTS).to(tl.int32)


@triton.jit
def pairs_before(
    indices, pair, expert, start, stop, PAIRS,
    SAME: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK]: how many pairs of [start, stop) come before each: same expert and lower number; not SAME: also
    those of lower experts."""
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(start, stop, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = expert_of(indices, other, PAIRS, EXPERTS)
        earlier = (theirs[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
        if not SAME:
            earlier |= theirs[None, :] < expert[:, None]
        count += tl.sum(earlier.to(tl.int32), 1)
    return count


@triton.jit
def write_tiles(
    tiles, counts, TILES, TILE: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):
    """tiles int32 [3, TILES]: expert, first slot and end of tiles of at most TILE pairs; expert -1 behind the last."""
    expert = tl.arange(0, BINS)
    counts = tl.where(expert < EXPERTS, counts, 0)
    end = tl.cumsum(counts, 0)
    number = (counts + TILE - 1) // TILE
    behind = tl.cumsum(number, 0)
    for i in range(0, tl.max(number, 0)):
        at = behind - number + i
        begin = end - counts + i * TILE
        has = i < number
        tl.store(tiles + at, expert, mask=has)
        tl.store(tiles + TILES + at, begin, mask=has)
        tl.store(tiles + 2 * TILES + at, tl.minimum(begin + TILE, end), mask=has)
    used = tl.sum(number, 0)
    for start in range(0, TILES, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(tiles + at, tl.full((CHUNK,), -1, tl.int32), mask=(at >= used) & (at < TILES))


@triton.jit
def sort_few(
    program, indices, rows, tiles, PAIRS, TILES,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program 0 writes the tiles; each other one finds the slots of BLOCK pairs. rows int32 [PAIRS]: slot -> pair."""
    if program == 0:
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, PAIRS, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            counts += tl.histogram(expert_of(indices, pair, PAIRS, EXPERTS), BINS)
        write_tiles(tiles, counts, TILES, TILE, EXPERTS, BINS, 256)
    else:
        pair = (program - 1) * BLOCK + tl.arange(0, BLOCK)
        expert = expert_of(indices, pair, PAIRS, EXPERTS)
        slot = pairs_before(indices, pair, expert, 0, PAIRS, PAIRS, False, EXPERTS, BLOCK, CHUNK)
        tl.store(rows + slot, pair, mask=expert < EXPERTS)


@triton.jit
def sort_few_kernel(
    indices, rows, tiles, PAIRS, TILES,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """See `sort_few`."""
    sort_few(tl.program_id(0), indices, rows, tiles, PAIRS, TILES, EXPERTS, BINS, TILE, BLOCK, CHUNK)


@triton.jit
def count_kernel(indices, counts, PAIRS, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts int32 [programs, BINS]: pairs of each expert among the BLOCK pairs of a program."""
    program = tl.program_id(0)
    pair = program * BLOCK + tl.arange(0, BLOCK)
    expert = expert_of(indices, pair, PAIRS, EXPERTS)
    tl.store(counts + program * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit
def place_kernel(
    indices, counts, bases, rows, tiles, PAIRS, BLOCKS, TILES,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The slots of BLOCK pairs, from the counts of all blocks; program 0 also writes the tiles.

    bases int32 [programs, BINS] is scratch: the slot of each expert's first pair in this block.
    """
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, BLOCKS, 8):
        block = start + tl.arange(0, 8)
        inside = (block < BLOCKS)[:, None]
        found = tl.load(counts + block[:, None] * BINS + bins[None, :], mask=inside, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((block < program)[:, None], found, 0), 0)
    tl.store(bases + program * BINS + bins, tl.cumsum(total, 0) - total + before)
    if program == 0:
        write_tiles(tiles, total, TILES, TILE, EXPERTS, BINS, 256)
    tl.debug_barrier()
    first = program * BLOCK
    pair = first + tl.arange(0, BLOCK)
    expert = expert_of(indices, pair, PAIRS, EXPERTS)
    base = tl.load(bases + program * BINS + expert)
    slot = base + pairs_before(indices, pair, expert, first, first + BLOCK, PAIRS, True, EXPERTS, BLOCK, CHUNK)
    tl.store(rows + slot, pair, mask=expert < EXPERTS)


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """No choice of experts makes more tiles than that."""
    return min(pairs, pairs // tile + min(pairs, experts))


def chunk(pairs: int) -> int:
    """All pairs in a few loads: a program waits for memory as many times."""
    return max(16, min(512, triton.next_power_of_2(pairs)))


def few_programs(pairs: int) -> int:
    """How many programs `sort_few` takes."""
    return 1 + triton.cdiv(pairs, BLOCK) if pairs else 0


def sorted_buffers(indices: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """rows and tiles, not yet written."""
    pairs = indices.numel()
    return _ints(indices, pairs), _ints(indices, 3, most_tiles(pairs, experts, tile))


def sort_pairs(indices: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """indices [N, k] -> rows int32 [N k]: slot -> pair, sorted by expert, stable; tiles int32 [3, most_tiles].

    Slots behind the last pair that has an expert are not written.
    """
    indices = indices.contiguous()
    pairs, bins = indices.numel(), triton.next_power_of_2(experts + 1)
    rows, table = sorted_buffers(indices, experts, tile)
    tiles = table.shape[1]
    sizes = {"EXPERTS": experts, "BINS": bins}
    if pairs <= FEW:
        launch(
            sort_few_kernel, (few_programs(pairs),), indices, rows, table, pairs, tiles,
            config=CONFIG, **sizes, TILE=tile, BLOCK=BLOCK, CHUNK=chunk(pairs),
        )  # fmt: skip
        return rows, table
    blocks = triton.cdiv(pairs, _MANY_BLOCK)
    counts, bases = _ints(indices, blocks, bins), _ints(indices, blocks, bins)
    launch(count_kernel, (blocks,), indices, counts, pairs, config=CONFIG, **sizes, BLOCK=_MANY_BLOCK)
    launch(
        place_kernel, (blocks,), indices, counts, bases, rows, table, pairs, blocks, tiles,
        config=CONFIG, **sizes, TILE=tile, BLOCK=_MANY_BLOCK, CHUNK=_MANY_CHUNK,
    )  # fmt: skip
    return rows, table


def _ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)
