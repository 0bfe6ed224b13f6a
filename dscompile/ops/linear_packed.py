"""Linear maps whose weight is stored as V4.1 is released: FP8 with a scale per block, activations rounded to FP8."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.experts_packed import ACTIVATIONS, GROUP, dense
from dscompile.ops.registry import define

FORMAT = "e4m3_32x32"
_CHECK, _PAIR, _OUTPUT = Check("linear_packed"), Check("linears_packed"), Check("grouped_output_packed")


def _check_weight(check: Check, name: str, weight: Tensor, scale: Tensor, width: Any) -> None:
    check.rank(name, weight, 2, "[N, K]")
    check.dtype(name, weight, (torch.uint8, torch.float8_e4m3fn))
    check.shape(name, weight, (weight.shape[0], width))
    for axis, size in enumerate(weight.shape):
        check.that(size % GROUP == 0, f"axis {axis} of {name}", size, f"a multiple of {GROUP}")
    check.dtype(f"{name}_scale", scale, (torch.uint8,))
    check.shape(f"{name}_scale", scale, (weight.shape[0] // GROUP, weight.shape[1] // GROUP))


def _validate(x: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    _CHECK.dtype("x", x, FLOATS)
    _CHECK.min_rank("x", x, 2, "[..., K]")
    _check_weight(_CHECK, "weight", weight, weight_scale, x.shape[-1])


def linear_packed(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [..., K], weight E4M3 (or its bytes) [N, K], weight_scale UE8M0 uint8 [N / 32, K / 32] -> [..., N] in x.dtype.

    N and K divide by 32. x is rounded to format "fp8_g32_ue8m0" first; the product is summed in fp32 and rounded to
    x.dtype (model_v41 3.1).
    """
    _validate(x, weight, weight_scale)
    return F.linear(ACTIVATIONS.fake_quant(x.float()), dense(weight, weight_scale, FORMAT)).to(x.dtype)


def _validate_pair(x: Tensor, w0: Tensor, w0_scale: Tensor, w1: Tensor, w1_scale: Tensor) -> None:
    _PAIR.dtype("x", x, FLOATS)
    _PAIR.rank("x", x, 2, "[M, K]")
    _check_weight(_PAIR, "w0", w0, w0_scale, x.shape[1])
    _check_weight(_PAIR, "w1", w1, w1_scale, x.shape[1])


def linears_packed(x: Tensor, w0: Tensor, w0_scale: Tensor, w1: Tensor, w1_scale: Tensor) -> Tensor:
    """`linear_packed` with two weights side by side: x [M, K], w0 [N0, K], w1 [N1, K] -> [M, N0 + N1] in x.dtype."""
    _validate_pair(x, w0, w0_scale, w1, w1_scale)
    return torch.cat((linear_packed(x, w0, w0_scale), linear_packed(x, w1, w1_scale)), 1)


def _validate_output(o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor) -> None:
    _OUTPUT.min_rank("o", o, 2, "[..., G, D in]")
    _OUTPUT.dtype("o", o, FLOATS)
    _OUTPUT.rank("wo_a", wo_a, 3, "[G, R, D in]")
    _OUTPUT.dtype("wo_a", wo_a, (o.dtype,))
    _OUTPUT.shape("wo_a", wo_a, (o.shape[-2], wo_a.shape[1], o.shape[-1]))
    _check_weight(_OUTPUT, "wo_b", wo_b, wo_b_scale, wo_a.shape[0] * wo_a.shape[1])


def grouped_output_packed(o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor) -> Tensor:
    """`grouped_output` with a stored second weight: o [..., G, Din] -> [..., Dout] in o.dtype.

    wo_a [G, R, Din] in o.dtype; wo_b [Dout, G R] and wo_b_scale as the weight of `linear_packed`.
    """
    _validate_output(o, wo_a, wo_b, wo_b_scale)
    groups, _, width = wo_a.shape
    grouped = o.reshape(-1, groups, width).transpose(0, 1)
    low = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1)
    return linear_packed(low.reshape(*o.shape[:-2], wo_b.shape[1]), wo_b, wo_b_scale)


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    _validate(x, weight, weight_scale)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_pair(x: Tensor, w0: Tensor, w0_scale: Tensor, w1: Tensor, w1_scale: Tensor) -> Tensor:
    _validate_pair(x, w0, w0_scale, w1, w1_scale)
    return x.new_empty((x.shape[0], w0.shape[0] + w1.shape[0]))


def _fake_output(o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor) -> Tensor:
    _validate_output(o, wo_a, wo_b, wo_b_scale)
    return o.new_empty((*o.shape[:-2], wo_b.shape[0]))


@costed
def _cost(M: Any, N: Any, K: Any, x_bytes: Any = 2) -> Cost:
    """M rows of x times a stored weight [N, K]."""
    return Cost(M * K * x_bytes + N * K + N * K / GROUP**2, M * N * x_bytes, 2 * M * N * K)


@costed
def _cost_output(N: Any, G: Any, Din: Any, R: Any, Dout: Any, x_bytes: Any = 2, weight_bytes: Any = 2) -> Cost:
    """N tokens: G products Din -> R with weights of weight_bytes, one product G R -> Dout with a stored weight."""
    first, second = G * R * Din, G * R * Dout
    read = N * G * Din * x_bytes + first * weight_bytes + second + second / GROUP**2
    return Cost(read, N * Dout * x_bytes, 2 * N * (first + second))


def _sizes(x: Tensor, weight: Tensor, weight_scale: Tensor) -> dict[str, Any]:
    rows = math.prod(x.shape[:-1])
    return {"M": rows, "N": weight.shape[0], "K": weight.shape[1], "x_bytes": x.element_size()}


def _sizes_pair(x: Tensor, w0: Tensor, w0_scale: Tensor, w1: Tensor, w1_scale: Tensor) -> dict[str, Any]:
    return {"M": x.shape[0], "N": w0.shape[0] + w1.shape[0], "K": x.shape[1], "x_bytes": x.element_size()}


def _sizes_output(o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor) -> dict[str, Any]:
    return {
        "N": math.prod(o.shape[:-2]), "G": o.shape[-2], "Din": o.shape[-1], "R": wo_a.shape[1], "Dout": wo_b.shape[0],
        "x_bytes": o.element_size(), "weight_bytes": wo_a.element_size(),
    }  # fmt: skip


define(
    "linear_packed(Tensor x, Tensor weight, Tensor weight_scale) -> Tensor",
    family="linear", reference=linear_packed, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
define(
    "linears_packed(Tensor x, Tensor w0, Tensor w0_scale, Tensor w1, Tensor w1_scale) -> Tensor",
    family="linear", reference=linears_packed, fake=_fake_pair, cost=_cost, sizes=_sizes_pair,
)  # fmt: skip
define(
    "grouped_output_packed(Tensor o, Tensor wo_a, Tensor wo_b, Tensor wo_b_scale) -> Tensor",
    family="output", reference=grouped_output_packed, fake=_fake_output, cost=_cost_output, sizes=_sizes_output,
)  # fmt: skip
