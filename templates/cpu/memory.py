"""Keeping large freed blocks in the process.

glibc gives every freed block of more than 32 MB (and often smaller ones) back to the kernel, and the next one is mapped
and zeroed page by page again. For a prompt of a few thousand tokens nearly every intermediate result is that large, and
the page faults cost more than the arithmetic of most element-wise operations.
"""

from __future__ import annotations

import ctypes
import functools
import sys

from torch import Tensor

# Numbers of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK_BYTES = 1 << 30
_KEPT_BYTES = (1 << 31) - 1


@functools.cache
def keep_freed_blocks() -> bool:
    """From now on the C library keeps freed blocks of up to 1 GB for the next request; True if it could be told.

    The process then stays as large as it once was (up to 2 GB of free memory is kept). Only for glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_settled: set[int] = set()


def settle(weight: Tensor) -> None:
    """Ask Linux, once per weight, to put it on huge pages: a decoding step does little else than read weights.

    The hardware fetches ahead only within a page, so pages of 4 KB halve the rate at which a matrix can be read. A
    refusal (other systems, files mapped from disk, no free huge page) changes nothing.
    """
    address = weight.data_ptr()
    if address in _settled:
        return
    _settled.add(address)
    if not sys.platform.startswith("linux") or weight.numel() * weight.element_size() < 1 << 16:
        return
    size = weight.untyped_storage().nbytes()
    start = weight.untyped_storage().data_ptr()
    low, high = start // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES, -(-(start + size) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    mapped = _mapping_of(start)
    if mapped is None:
        return
    low, high = max(low, mapped[0]), min(high, mapped[1])
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(low, high - low, _MADV_HUGEPAGE) == 0:
        madvise(low, high - low, _MADV_COLLAPSE)


def _mapping_of(address: int) -> tuple[int, int] | None:
    """The private anonymous mapping that holds `address`; None if there is none."""
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                low, high = (int(bound, 16) for bound in line.split(" ", 1)[0].split("-"))
                if low <= address < high:
                    fields = line.split()
                    return (low, high) if fields[1].startswith("rw-p") and fields[4] == "0" else None
    except OSError:
        pass
    return None
