"""The routed experts as V4.1 is released: FP4 or FP8 weights, FP8 activations, block scales on both."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.formats.numeric import bytes_to_e2m1, e4m3_to_float, ue8m0_to_float
from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.experts import _cost, clamped_silu
from dscompile.ops.registry import define

GROUP = 32
# values to a byte, rows that share a scale
WEIGHT_FORMATS = {"e2m1_1x32": (2, 1), "e4m3_32x32": (1, 32)}
ACTIVATIONS = FORMATS["fp8_g32_ue8m0"]
_CHECK = Check("experts_packed")


def _validate(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    weight_format: str, out_dtype: torch.dtype,
) -> None:  # fmt: skip
    _CHECK.choice("weight_format", weight_format, tuple(WEIGHT_FORMATS))
    _CHECK.rank("x", x, 2, "[N, D]")
    _CHECK.dtype("x", x, FLOATS)
    _CHECK.rank("indices", indices, 2, "[N, k]")
    _CHECK.dtype("indices", indices, INTEGERS)
    _CHECK.shape("indices", indices, (x.shape[0], indices.shape[1]))
    _CHECK.dtype("weights", weights, FLOATS)
    _CHECK.shape("weights", weights, indices.shape)
    _CHECK.rank("w13", w13, 3, "[E, 2 I, bytes of D values]")
    packed, rows = WEIGHT_FORMATS[weight_format]
    experts, double, size = w13.shape[0], w13.shape[1], x.shape[1]
    inner = double // 2
    _CHECK.that(size % GROUP == 0, "last axis of x", size, f"a multiple of {GROUP}")
    _CHECK.that(double % (2 * GROUP) == 0, "middle axis of w13", double, f"a multiple of {2 * GROUP}")
    stored = (torch.uint8,) if packed == 2 else (torch.uint8, torch.float8_e4m3fn)
    for name, tensor, scale, out, width in (("w13", w13, w13_scale, double, size), ("w2", w2, w2_scale, size, inner)):
        _CHECK.dtype(name, tensor, stored)
        _CHECK.shape(name, tensor, (experts, out, width // packed))
        _CHECK.dtype(f"{name}_scale", scale, (torch.uint8,))
        _CHECK.shape(f"{name}_scale", scale, (experts, out // rows, width // GROUP))
    if out_dtype not in FLOATS:
        raise TypeError(_CHECK.message("out_dtype", out_dtype, ", ".join(map(str, FLOATS))))


def dense(payload: Tensor, scale: Tensor, weight_format: str) -> Tensor:
    """Stored weights of one expert -> fp32 [rows, columns], exact."""
    packed, rows = WEIGHT_FORMATS[weight_format]
    codes = payload.contiguous().view(torch.uint8)
    values = bytes_to_e2m1(codes) if packed == 2 else e4m3_to_float(codes)
    factors = ue8m0_to_float(scale).repeat_interleave(rows, 0).repeat_interleave(GROUP, 1)
    return values * factors


def experts_packed(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    limit: float, weight_format: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`experts` on weights as they are stored: x [N, D], indices and weights [N, k] -> [N, D]. D and I divide by 32.

    weight_format "e2m1_1x32": w13 uint8 [E, 2I, D / 2], the even column in the low nibble, UE8M0 scales uint8
    [E, 2I, D / 32]; w2 [E, D, I / 2], scales [E, D, I / 32]. "e4m3_32x32": w13 [E, 2I, D] (E4M3, or its bytes), scales
    [E, 2I / 32, D / 32], w2 alike. w13 holds the rows of w1, then those of w3.

    What enters a product is first rounded to E4M3 with a UE8M0 scale per 32 (format "fp8_g32_ue8m0"). Products are
    summed in fp32 and rounded to x.dtype. In between: clamped_silu and the routing weight in fp32, rounded to x.dtype.
    The k results of a token are summed in fp32. Index -1 is skipped; another one outside [0, E) raises IndexError.
    """
    _validate(x, indices, weights, w13, w13_scale, w2, w2_scale, weight_format, out_dtype)
    _CHECK.index_range("indices", indices, -1, w13.shape[0], "number of experts; -1 is skipped")
    tokens, k = indices.shape
    flat_indices, flat_weights = indices.reshape(-1), weights.reshape(-1, 1).float()
    results = x.new_zeros((tokens * k, x.shape[1]), dtype=torch.float32)
    rounded = ACTIVATIONS.fake_quant(x.float())
    for expert in torch.unique(flat_indices).tolist():
        if expert < 0:
            continue
        chosen = (flat_indices == expert).nonzero().squeeze(1)
        up_down = F.linear(rounded[chosen // k], dense(w13[expert], w13_scale[expert], weight_format)).to(x.dtype)
        gate, up = up_down.float().chunk(2, -1)
        act = (clamped_silu(gate, up, limit) * flat_weights[chosen]).to(x.dtype)
        down = dense(w2[expert], w2_scale[expert], weight_format)
        results[chosen] = F.linear(ACTIVATIONS.fake_quant(act.float()), down).to(x.dtype).float()
    return results.view(tokens, k, x.shape[1]).sum(1).to(out_dtype)


def _fake(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    limit: float, weight_format: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    _validate(x, indices, weights, w13, w13_scale, w2, w2_scale, weight_format, out_dtype)
    return x.new_empty(x.shape, dtype=out_dtype)


def _sizes(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    limit: float, weight_format: str, out_dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    packed, rows = WEIGHT_FORMATS[weight_format]
    return {
        "N": x.shape[0], "k": indices.shape[1], "E": w13.shape[0], "D": x.shape[1], "I": w13.shape[1] // 2,
        "x_bytes": x.element_size(), "out_bytes": out_dtype.itemsize,
        "weight_bytes": 1 / packed + 1 / (GROUP * rows),  # exact
    }  # fmt: skip


define(
    "experts_packed(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w13_scale, Tensor w2, "
    "Tensor w2_scale, float limit, str weight_format, ScalarType out_dtype) -> Tensor",
    family="experts", reference=experts_packed, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
