"""Row formats as the C++ kernels take them: a small block of bytes per format and number of values."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from dscompile.formats import FORMATS

_PAYLOADS = {"plain": 0, "e4m3": 1, "e2m1": 2, "bf16": 3, "fp16": 4, "fp32": 5}
_SCALES = {"none": 0, "ue8m0": 1, "e4m3": 2, "fp32": 3}
_FIELDS = struct.Struct("=7qd")

PLAIN = "none"


@functools.cache
def _record(name: str, dim: int, itemsize: int) -> ctypes.Array[ctypes.c_char]:
    if name == PLAIN:
        packed = _FIELDS.pack(_PAYLOADS["plain"], 0, 0, 0, 0, dim * itemsize, 0, 0.0)
    else:
        fmt = FORMATS[name]
        packed = _FIELDS.pack(
            _PAYLOADS[fmt.payload], fmt.group, _SCALES[fmt.scale], fmt.tail, int(fmt.pow2), fmt.row_bytes(dim),
            fmt.payload_bytes(dim), fmt.amax_floor,
        )  # fmt: skip
    return ctypes.create_string_buffer(packed, len(packed))


@functools.cache
def format_pointer(name: str, dim: int, dtype: torch.dtype) -> int:
    """Address of the C++ `Format` of rows of `dim` values; "none" means values of `dtype`. It lives for ever."""
    return ctypes.addressof(_record(name, dim, dtype.itemsize))


@functools.cache
def row_bytes(name: str, dim: int, dtype: torch.dtype) -> int:
    """Bytes of one stored row."""
    return dim * dtype.itemsize if name == PLAIN else FORMATS[name].row_bytes(dim)


def known(name: str, dim: int) -> bool:
    """Whether `name` is a format and `dim` values are a whole row of it."""
    if name == PLAIN:
        return True
    if name not in FORMATS:
        return False
    try:
        FORMATS[name].check_dim(dim)
    except ValueError:
        return False
    return True
