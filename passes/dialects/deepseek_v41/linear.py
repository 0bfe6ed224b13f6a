"""A linear map with a stored FP8 weight, activations rounded to FP8 (model_v41 3.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.formats.numeric import ue8m0_to_float
from dscompile.passes.engine import Pattern

BLOCK = 32


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = weight.shape
    grid = ue8m0_to_float(scale).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * grid).to(dtype)


def _stored(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(torch.ops.dsv4.fake_quant(x, "fp8_g32_ue8m0"), dequantised(weight, scale, x.dtype))


def _stored_op(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.ops.dsv4.linear_packed(x, weight, scale)  # type: ignore[no-any-return]


PATTERNS = (
    Pattern(
        "linear.stored", "linear", "deepseek_v41", _stored, _stored_op,
        inputs={"x": f"act[*B {BLOCK}*k]", "weight": f"e4m3[{BLOCK}*n {BLOCK}*k]", "scale": "u8[n k]"},
        shared=frozenset({torch.ops.dsv4.fake_quant.default}), key=torch.ops.dsv4.fake_quant.default,
    ),
)  # fmt: skip
