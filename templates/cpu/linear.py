"""Linear maps of a few rows: the weight matrix is read once, in place, and nothing is repacked.

PyTorch's bf16 product prepares the weight for the tensor unit at every call, which for a few rows costs more than the
product. `cxx/skinny.hpp.jinja` feeds rows of the weight to the tiles as they lie in memory (the few rows are the side
that gets packed), or takes plain dot products below four rows.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.memory import settle
from dscompile.templates.cpu.native import ELEMENT
from dscompile.templates.cpu.record import CpuTemplate, Meta, fits_cpu

MAX_ROWS = {torch.bfloat16: 192, torch.float16: 4}
"""Rows up to which reading the weight in place is faster than PyTorch's product, by dtype; none for fp32."""


def few_rows(x: Tensor, w: Tensor) -> Tensor | None:
    """x [m, K], w [n, K] -> x @ w^T [m, n], rounded once; None where PyTorch should do it."""
    if x.shape[0] > MAX_ROWS.get(x.dtype, 0) or x.dtype != w.dtype or x.stride(1) != 1 or w.stride(1) != 1:
        return None
    kernel = native.function("linear", "linear_rows", "pqqpqqqqqqpqqi", x.dtype)
    if kernel is None:
        return None
    settle(w)
    m, n = x.shape[0], w.shape[0]
    out = x.new_empty((m, n))
    kernel(
        x.data_ptr(), 0, x.stride(0), w.data_ptr(), 0, w.stride(0), 1, m, x.shape[1], n,
        out.data_ptr(), 0, n, native.threads(),
    )  # fmt: skip
    return out


def mm_many(self: Tensor, mat2: list[Tensor]) -> list[Tensor]:
    """self [m, K] times each of the transposed weights [K, n_i], in one call: [m, n_i]."""
    fits = (
        self.dim() == 2
        and self.shape[0] <= MAX_ROWS.get(self.dtype, 0)
        and self.stride(1) == 1
        and all(
            w.dim() == 2 and w.shape[0] == self.shape[1] and w.dtype == self.dtype and w.stride(0) == 1 for w in mat2
        )
    )
    kernel = native.function("linear", "linear_many", "pqqqqpi", self.dtype) if fits else None
    if kernel is None:
        return [mm(self, w) for w in mat2]
    rows = self.shape[0]
    out = [self.new_empty((rows, w.shape[1])) for w in mat2]
    factors: list[int] = []
    for w, y in zip(mat2, out, strict=True):
        settle(w)
        factors += (w.data_ptr(), w.stride(1), w.shape[1], y.data_ptr())
    table = struct.pack(f"={len(factors)}q", *factors)
    kernel(self.data_ptr(), self.stride(0), rows, self.shape[1], len(mat2), table, native.threads())
    return out


def mm(self: Tensor, mat2: Tensor) -> Tensor:
    """`aten::mm` for a mat2 that is a transposed weight."""
    out = None
    if self.dim() == 2 and mat2.dim() == 2 and self.shape[1] == mat2.shape[0]:
        out = few_rows(self, mat2.t())
    return torch.mm(self, mat2) if out is None else out


def _mm_applies(meta: Meta) -> str | None:
    x, w = meta["self"], meta["mat2"]
    if x.dtype not in MAX_ROWS or w.dtype != x.dtype:
        return f"{x.dtype} by {w.dtype}: PyTorch's product is as fast"
    rows = x.shape[0]
    if isinstance(rows, int) and rows > MAX_ROWS[x.dtype]:
        return f"{rows} rows: PyTorch's product is faster from {MAX_ROWS[x.dtype] + 1} rows on"
    if not isinstance(rows, int):
        return "the number of rows is not fixed"
    if w.stride()[0] != 1:
        return "mat2 is not the transpose of a dense matrix"
    return fits_cpu(meta)


def grouped_output(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    """`dsv4::grouped_output`: o [..., G, Din], wo_a [G, R, Din], wo_b [Dout, G R] -> [..., Dout]."""
    fits = (
        o.dim() >= 2
        and wo_a.dim() == 3
        and wo_b.dim() == 2
        and o.dtype == wo_a.dtype == wo_b.dtype
        and o.dtype in ELEMENT
        and wo_a.shape == (o.shape[-2], wo_a.shape[1], o.shape[-1])
        and wo_b.shape[1] == wo_a.shape[0] * wo_a.shape[1]
    )
    if not fits:
        reference: Tensor = OPS["grouped_output"].reference(o, wo_a, wo_b)
        return reference
    groups, rank, width = wo_a.shape
    rows = o.reshape(-1, groups, width)
    low = rows.new_empty((rows.shape[0], groups * rank))
    kernel = None
    if rows.shape[0] <= MAX_ROWS.get(o.dtype, 0) and rows.stride(2) == 1 and wo_a.stride(2) == 1:
        kernel = native.function("linear", "linear_rows", "pqqpqqqqqqpqqi", o.dtype)
    if kernel is None:
        # Straight into the columns of the concatenated result: a batched product would need a copy to get there.
        for group in range(groups):
            torch.mm(rows[:, group], wo_a[group].t(), out=low[:, group * rank : (group + 1) * rank])
        out = torch.mm(low, wo_b.t())
    else:
        settle(wo_a)
        kernel(
            rows.data_ptr(), rows.stride(1), rows.stride(0), wo_a.data_ptr(), wo_a.stride(0),
            wo_a.stride(1), groups, rows.shape[0], width, rank, low.data_ptr(), rank, groups * rank, native.threads(),
        )  # fmt: skip
        out = mm(low, wo_b.t())
    return out.view(*o.shape[:-2], wo_b.shape[0])


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("mm", "aten::mm", "opaque", mm, _mm_applies),
    CpuTemplate("grouped_output", "dsv4::grouped_output", "opaque", grouped_output),
)
