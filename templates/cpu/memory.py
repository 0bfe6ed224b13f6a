"""Keeping large freed blocks in the process.

glibc gives every freed block of more than 32 MB (and often smaller ones) back to the kernel, and the next one is mapped
and zeroed page by page again. For a prompt of a few thousand tokens nearly every intermediate result is that large, and
the page faults cost more than the arithmetic of most element-wise operations.
"""

from __future__ import annotations

import ctypes
import functools
import sys

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
