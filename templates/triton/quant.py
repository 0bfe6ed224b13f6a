"""Values to rows and back, and what storing them does to them. Every record of `dscompile.formats` is data here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.formats.record import PLAIN_DTYPES
from dscompile.ops.layout import PLAIN
from dscompile.targets import Target
from dscompile.templates.triton import row_layout
from dscompile.templates.triton.device.rows import quantised
from dscompile.templates.triton.gather import applies as _readable
from dscompile.templates.triton.gather import decode, dense, read_configs
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, TritonTemplate
from dscompile.templates.triton.store import check, make_rows, row_configs


def quant_pack(x: Tensor, format: str, *, config: Config, target: Target) -> Tensor:
    """`dsv4::quant_pack`: x [..., D] -> rows uint8 [..., row bytes]; "none" copies x."""
    rows = make_rows(x, format, config, target)
    return rows.view(*x.shape[:-1], rows.shape[1])


@triton.jit
def fake_quant_kernel(
    x, stored, out, count, x_stride, D: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PAYLOAD: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, POW2: tl.constexpr, FLOOR: tl.constexpr, HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """out[i] = x[i] as a reader of stored rows sees it. `stored` is never accessed: it has the type of plain values."""
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < D)
    given = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if PAYLOAD == "plain":
        values = given.to(stored.dtype.element_ty).to(out.dtype.element_ty)
    else:
        wide = given.to(tl.float32)
        values = quantised(wide, N, BLOCK, PAYLOAD, GROUP, SCALE, POW2, FLOOR)
        if TAIL > 0:
            values = tl.where(column < HEAD, values, wide.to(tl.bfloat16).to(tl.float32))
    tl.store(out + row * D + column, values.to(out.dtype.element_ty), mask=inside)


def fake_quant(x: Tensor, format: str, *, config: Config, target: Target) -> Tensor:
    """`dsv4::fake_quant`: x [..., D] -> [..., D] in x.dtype."""
    rows, dim = row_layout.as_rows(x), x.shape[-1]
    out = x.new_empty(x.shape)
    plain = format != PLAIN and row_layout.is_plain(format)
    stored = x.new_empty(0, dtype=PLAIN_DTYPES[FORMATS[format].payload]) if plain else out
    constants = {k: v for k, v in row_layout.constants(format, dim).items() if k != "PAD"}
    launch(
        fake_quant_kernel, (triton.cdiv(rows.shape[0], config["N"]),), rows, stored, out, rows.shape[0], rows.stride(0),
        config=config, D=dim, BLOCK=row_layout.block(format, dim), N=config["N"], **constants,
    )  # fmt: skip
    return out


def unpack(
    rows: Tensor, format: str, dim: int, dtype: torch.dtype, *, config: Config, target: Target
) -> Tensor:  # fmt: skip
    """`dsv4::unpack`: rows [..., row width] -> values [..., dim] in `dtype`."""
    flat = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
    return decode(dense(flat).unsqueeze(0), None, None, format, dim, dtype, config, target).view(*rows.shape[:-1], dim)


def _packable(meta: Meta) -> str | None:
    return row_layout.refusal(meta["format"], meta["x"].shape[-1])


TEMPLATES = (
    TritonTemplate("quant_pack", "dsv4::quant_pack", quant_pack, row_configs, check, _packable),
    TritonTemplate("fake_quant", "dsv4::fake_quant", fake_quant, row_configs, check, _packable),
    TritonTemplate("unpack", "dsv4::unpack", unpack, read_configs, check, _readable),
)
