"""RMS normalisation, a row a program."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

MODES = {"fp32": 0, "scale_cast": 1, "cast_before_weight": 2}
LARGEST_ROW = 65536


@triton.jit
def rms_norm_kernel(
    x, weight, out, stride, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """out[n] = x[n] / rms(x[n]) * weight; x rows are `stride` apart, out is dense."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    given = tl.load(x + row * stride + column, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    if MODE == 1:
        result = given * scale.to(given.dtype)
    elif MODE == 2:
        result = (wide * scale).to(given.dtype)
    else:
        result = wide * scale
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0)
        if MODE == 0:
            result = result * factor.to(tl.float32)
        else:
            result = result.to(out.dtype.element_ty) * factor.to(out.dtype.element_ty)
    tl.store(out + row * D + column, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, mode: str, *, config: Config, target: Target) -> Tensor:
    """`dsv4::rms_norm`: x [..., D] -> [..., D]."""
    dtype = x.dtype if weight is None or mode == "fp32" else torch.promote_types(x.dtype, weight.dtype)
    size = x.shape[-1]
    rows = x.reshape(-1, size) if x.stride(-1) == 1 else x.contiguous().view(-1, size)
    out = x.new_empty(x.shape, dtype=dtype)
    weight = None if weight is None else weight.contiguous()
    launch(
        rms_norm_kernel, (rows.shape[0],), rows, weight, out, rows.stride(0), eps,
        config=config, D=size, BLOCK_D=triton.next_power_of_2(size), MODE=MODES[mode],
    )  # fmt: skip
    return out


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    usual = 4 if sizes["D"] <= 2048 else 8
    yield config(usual)
    yield from (config(warps) for warps in (1, 2, 4, 8, 16) if warps != usual)


def _applies(meta: Meta) -> str | None:
    size = meta["x"].shape[-1]
    return None if 0 < size <= LARGEST_ROW else f"rows of {size} values, allowed: 1 to {LARGEST_ROW}"


TEMPLATES = (TritonTemplate("rms_norm", "dsv4::rms_norm", rms_norm, _configs, applies=_applies),)
