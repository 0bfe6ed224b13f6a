"""Sparse attention on the CPU: one query at a time over exactly the rows that it sees.

`cxx/sparse_attention.cpp.jinja` holds two kernels with one structure: fp32 multiply-adds for any machine and dtype, and
AMX tiles for bf16. Work follows the visible keys, never the square of the prompt. For a whole prompt packed pools are
decoded once, and plain bf16 rows are also laid out once in the order that the tiles want; for a few queries the rows
are decoded as they are met.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.layout import PLAIN, format_pointer, known, row_bytes
from dscompile.templates.cpu.native import ELEMENT, plain
from dscompile.templates.cpu.record import CpuTemplate
from dscompile.templates.cpu.rows import unpack_rows

_PROBLEM = struct.Struct("=31qd")


def _rows_fit(rows: Tensor, format: str, q: Tensor) -> bool:
    return (
        rows.dim() == 3
        and rows.shape[0] == q.shape[0]
        and known(format, q.shape[3])
        and rows.dtype == (q.dtype if format == PLAIN else torch.uint8)
        and rows.shape[2] * rows.element_size() == row_bytes(format, q.shape[3], q.dtype)
    )


def _fits(
    q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    rope_q: bool, window_format: str, comp_format: str,
) -> bool:  # fmt: skip
    if q.dim() != 4 or q.dtype not in ELEMENT or q.shape[3] == 0 or not 0 < window < 1 << 62:
        return False
    queries = q.shape[:2]
    if q_pos.shape != queries or window_start.shape != queries[:1] or not _rows_fit(window_kv, window_format, q):
        return False
    if comp_kv is None:
        if comp_idx is not None or n_visible is not None:
            return False
    else:
        if not _rows_fit(comp_kv, comp_format, q) or (comp_idx is None) == (n_visible is None):
            return False
        if comp_idx is not None and (comp_idx.dim() != 3 or comp_idx.shape[:2] != queries):
            return False
        if n_visible is not None and n_visible.shape != queries:
            return False
    if sink is not None and sink.shape != q.shape[2:3]:
        return False
    if cos is None or sin is None:
        return cos is None and sin is None and not rope_q
    return cos.dim() == 3 and cos.shape[:2] == queries and sin.shape == cos.shape and 2 * cos.shape[2] <= q.shape[3]


def _ready(rows: Tensor, format: str, dim: int, dtype: torch.dtype, queries: int) -> tuple[Tensor, str]:
    """Rows as the kernel reads them: decoded once if the queries would otherwise decode each row several times."""
    if format != PLAIN and queries > rows.shape[1]:
        decoded = unpack_rows(rows, format, dim, dtype)
        if decoded is not None:
            return decoded, PLAIN
    if rows.stride(2) != 1 or rows.stride(0) < 0:
        rows = rows.contiguous()
    return rows, format


def sparse_attention(
    q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float, cos: Tensor | None,
    sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> Tensor:  # fmt: skip
    """`dsv4::sparse_attention`: q [B, T, H, D] -> [B, T, H, D]."""
    fits = _fits(q, window_kv, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, cos, sin, rope_q,
                 window_format, comp_format)  # fmt: skip
    kernel = native.function("sparse_attention", "sparse_attention", "pii", q.dtype) if fits else None
    out: Tensor | None = None
    if kernel is not None:
        out = _launch(kernel, q, window_kv, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, scale,
                      cos, sin, rope_q, window_format, comp_format)  # fmt: skip
    if out is None:
        out = OPS["sparse_attention"].reference(
            q, window_kv, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, scale, cos, sin, rope_q,
            window_format, comp_format,
        )  # fmt: skip
    assert out is not None
    return out


def _launch(
    kernel: native.Kernel, q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float,
    cos: Tensor | None, sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str,
) -> Tensor | None:  # fmt: skip
    """Run the kernel; None if a compressed index is out of range."""
    batch, tokens, heads, dim = q.shape
    out = q.new_empty((batch, tokens, heads, dim))
    if q.stride(3) != 1:
        q = q.contiguous()
    window_kv, window_format = _ready(window_kv, window_format, dim, q.dtype, tokens * window)
    # Everything that the kernel only sees as an address stays referenced in these locals until it returns.
    q_pos, window_start = plain(q_pos, torch.int64), plain(window_start, torch.int64)
    many = tokens > 4
    layouts = int(many and window_format == PLAIN)
    comp_data = comp_batch = comp_row = comp_count = idx_data = vis_data = picks = 0
    if comp_kv is not None:
        if comp_idx is not None:
            comp_idx = plain(comp_idx, torch.int64)
            idx_data, picks = comp_idx.data_ptr(), comp_idx.shape[2]
        if n_visible is not None:
            n_visible = plain(n_visible, torch.int64)
            vis_data = n_visible.data_ptr()
        per_query = picks if comp_idx is not None else comp_kv.shape[1]
        comp_kv, comp_format = _ready(comp_kv, comp_format, dim, q.dtype, tokens * per_query)
        comp_data, comp_count = comp_kv.data_ptr(), comp_kv.shape[1]
        comp_batch, comp_row = comp_kv.stride(0) * comp_kv.element_size(), comp_kv.stride(1) * comp_kv.element_size()
        layouts |= 2 * int(many and comp_format == PLAIN and comp_count > 0)
    sink = None if sink is None else plain(sink, torch.float32)
    half = cos_data = sin_data = wide = 0
    if cos is not None and sin is not None:
        cos, sin, wide = native.angles(cos, sin, q.dtype)
        half, cos_data, sin_data = cos.shape[2], cos.data_ptr(), sin.data_ptr()
    problem = _PROBLEM.pack(
        q.data_ptr(), *q.stride()[:3], batch, tokens, heads, dim, window, picks, half, int(rope_q),
        window_kv.data_ptr(), window_kv.stride(0) * window_kv.element_size(),
        window_kv.stride(1) * window_kv.element_size(), window_kv.shape[1], format_pointer(window_format, dim, q.dtype),
        comp_data, comp_batch, comp_row, comp_count, format_pointer(comp_format, dim, q.dtype),
        q_pos.data_ptr(), window_start.data_ptr(), idx_data, vis_data, 0 if sink is None else sink.data_ptr(),
        cos_data, sin_data, wide, out.data_ptr(), scale,
    )  # fmt: skip
    return None if kernel(problem, layouts, native.threads()) else out


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("sparse_attention", "dsv4::sparse_attention", "opaque", sparse_attention),
)
