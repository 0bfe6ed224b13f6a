"""The indexer on the CPU: scores of a query stay in the cache, and the k best are picked there.

Scores are never written out: `cxx/index_topk.cpp.jinja` scores one query against its visible keys (only those that a
candidate mask allows, and not at all where every visible row is chosen anyway), finds the k-th largest value by
counting, and emits indices in rising order; among equal scores the lowest index wins (or the highest), as in the
reference. bf16 products run on AMX tiles with fp32 sums, everything else in fp32.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.layout import PLAIN, format_pointer, known, row_bytes
from dscompile.templates.cpu.native import ELEMENT, plain
from dscompile.templates.cpu.record import CpuTemplate
from dscompile.templates.cpu.rows import unpack_rows

_PROBLEM = struct.Struct("=23qd")
_MAX = 1 << 31


def _fits(q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, key_format: str) -> bool:
    if q.dim() != 4 or keys.dim() != 3 or q.dtype not in ELEMENT or q.shape[3] == 0 or top_k <= 0:
        return False
    dim = q.shape[3]
    if not known(key_format, dim) or keys.shape[0] != q.shape[0] or not 0 < keys.shape[1] < _MAX:
        return False
    if keys.dtype not in (ELEMENT if key_format == PLAIN else (torch.uint8,)):
        return False
    width = keys.shape[2] * keys.element_size()
    return (
        width == row_bytes(key_format, dim, keys.dtype)
        and head_weights.shape == q.shape[:3]
        and n_visible.shape == q.shape[:2]
    )


def _exact_in_bf16(keys: Tensor, key_format: str) -> bool:
    """Whether a decoded key is the same in bf16 as in fp32: then tiles read what the reference reads."""
    if key_format == PLAIN:
        return keys.dtype == torch.bfloat16
    fmt = FORMATS[key_format]
    return fmt.payload == "bf16" or (fmt.payload in ("e4m3", "e2m1") and (fmt.scale != "fp32" or fmt.pow2))


def _run(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, allowed: Tensor | None, top_k: int, scale: float,
    key_format: str, ascending: bool, newest: bool, candidate_blocks: int, block_size: int, candidates: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Run the kernel, which also marks `candidates` if given; None without a compiler."""
    kernel = native.function("index_topk", "index_topk", "pii", q.dtype)
    if kernel is None:
        return None
    batch, tokens, heads, dim = q.shape
    rows = keys.shape[1]
    out = q.new_empty((batch, tokens, min(top_k, rows)), dtype=torch.int64)
    if q.stride(3) != 1:
        q = q.contiguous()
    tiles = q.dtype == torch.bfloat16 and _exact_in_bf16(keys, key_format)
    width = torch.bfloat16 if tiles else torch.float32
    if key_format != PLAIN and tiles and tokens > 4:
        decoded = unpack_rows(keys, key_format, dim, width)
        if decoded is not None:
            keys, key_format = decoded, PLAIN
    if key_format == PLAIN:  # the kernel has to know what the bytes are, whatever the dtype of q
        keys, key_format = keys.to(width), "bf16" if tiles else "fp32"
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    size = keys.element_size()
    head_weights, n_visible = plain(head_weights, torch.float32), plain(n_visible, torch.int64)
    allowed = None if allowed is None else allowed.contiguous()
    problem = _PROBLEM.pack(
        q.data_ptr(), *q.stride()[:3], keys.data_ptr(), keys.stride(0) * size, keys.stride(1) * size,
        format_pointer(key_format, dim, keys.dtype), batch, tokens, heads, dim, rows, out.shape[2], int(ascending),
        int(newest), candidate_blocks, block_size, head_weights.data_ptr(), n_visible.data_ptr(),
        0 if allowed is None else allowed.data_ptr(), out.data_ptr(),
        0 if candidates is None else candidates.data_ptr(), scale,
    )  # fmt: skip
    kernel(problem, int(tiles), native.threads())
    return out


def index_topk(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor | None, top_k: int,
    scale: float, key_format: str, ascending: bool, newest: bool = False,
) -> Tensor:  # fmt: skip
    """`dsv4::index_topk`: indices int64 [B, T, min(top_k, S)], -1 where there are fewer."""
    fits = _fits(q, keys, head_weights, n_visible, top_k, key_format) and (
        candidates is None or (candidates.shape == (*q.shape[:2], keys.shape[1]) and candidates.dtype == torch.bool)
    )
    out = None
    if fits:
        out = _run(
            q, keys, head_weights, n_visible, candidates, top_k, scale, key_format, ascending, newest, 0, 1, None
        )
    if out is None:
        out = OPS["index_topk"].reference(
            q, keys, head_weights, n_visible, candidates, top_k, scale, key_format, ascending, newest
        )
    assert out is not None
    return out


def index_topk_candidates(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, scale: float, key_format: str,
    ascending: bool, candidate_blocks: int, block_size: int, newest: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`dsv4::index_topk_candidates`: indices [B, T, min(top_k, S)] and the candidate rows bool [B, T, S]."""
    out = None
    if _fits(q, keys, head_weights, n_visible, top_k, key_format) and candidate_blocks > 0 and block_size > 0:
        marks = q.new_zeros((*q.shape[:2], keys.shape[1]), dtype=torch.bool)
        out = _run(q, keys, head_weights, n_visible, None, top_k, scale, key_format, ascending, newest,
                   candidate_blocks, block_size, marks)  # fmt: skip
    if out is not None:
        return out, marks
    reference: tuple[Tensor, Tensor] = OPS["index_topk_candidates"].reference(
        q, keys, head_weights, n_visible, top_k, scale, key_format, ascending, candidate_blocks, block_size, newest
    )
    return reference


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("index_topk", "dsv4::index_topk", "opaque", index_topk),
    CpuTemplate("index_topk_candidates", "dsv4::index_topk_candidates", "opaque", index_topk_candidates),
)
