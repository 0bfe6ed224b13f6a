"""Where scale factors and FP4 codes lie for block-scaled tensor cores, as functions on a host.

The tensor core reads scales in blocks of 512 bytes: of 128 rows and 4 groups along K, row r and group g at byte
16 * (r % 32) + 4 * (r // 32) + g. Blocks follow each other along K, then along rows, then from matrix to matrix.
"""

from __future__ import annotations

from torch import Tensor

GROUP = 32  # values of K that share a scale
ROWS = 128  # of a block
GROUPS = 4  # of a block
BLOCK_BYTES = ROWS * GROUPS


def scale_place(row: int, group: int) -> int:
    """The byte of a scale within its block; row < 128, group < 4."""
    return 16 * (row % 32) + 4 * (row // 32) + group


def scale_offset(row: int, group: int, groups: int) -> int:
    """The byte of a scale in a matrix with `groups` groups a row."""
    block = row // ROWS * (groups // GROUPS) + group // GROUPS
    return block * BLOCK_BYTES + scale_place(row % ROWS, group % GROUPS)


def arranged_scales(scales: Tensor) -> Tensor:
    """Scales [..., R, G] of a checkpoint -> [..., R / 128, G / 4, 32, 4, 4], dense, as tensor cores read them.

    Weights are arranged once, when they are loaded. R must be a multiple of 128, G of 4.
    """
    rows, groups = scales.shape[-2:]
    if rows % ROWS or groups % GROUPS:
        raise ValueError(f"scales of {rows} rows and {groups} groups, allowed: multiples of {ROWS} and {GROUPS}")
    blocks = scales.unflatten(-1, (-1, GROUPS)).unflatten(
        -3, (-1, GROUPS, 32)
    )  # block, row // 32, row % 32, block, group
    last = blocks.dim() - 1
    order = (*range(last - 4), last - 4, last - 1, last - 2, last - 3, last)
    return blocks.permute(order).contiguous()


def restored_scales(arranged: Tensor) -> Tensor:
    """The opposite of `arranged_scales`."""
    last = arranged.dim() - 1
    order = (*range(last - 4), last - 4, last - 1, last - 2, last - 3, last)
    blocks = arranged.permute(order)  # block, row // 32, row % 32, block, group
    return blocks.flatten(-2).flatten(-4, -2).contiguous()


def unpacked_place(column: int) -> tuple[int, int]:
    """(byte, lowest bit) of an FP4 code in a row of shared memory.

    Copies to shared memory widen 16 codes, 8 bytes, to 16 bytes: the codes, then 8 bytes that nothing reads.
    """
    return 16 * (column // 16) + column % 16 // 2, 4 * (column % 2)


def tensor_memory_columns(used: int) -> int:
    """What must be allocated to have `used` columns: a power of two, at least 32. ValueError above 512."""
    if used > 512:
        raise ValueError(f"{used} columns of tensor memory, allowed: 512")
    return max(32, 1 << (used - 1).bit_length())
