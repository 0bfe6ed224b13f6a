"""Stored FP8 weights on the CPU: decoded in front of the library's product, in the dtype of the activations.

Rounded activations and decoded weights are exact in bf16, so this product differs from the reference's in the order of
the sum alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.experts_packed import ACTIVATIONS, dense
from dscompile.ops.linear_packed import FORMAT
from dscompile.templates.cpu.record import CpuTemplate


def linear_packed(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """`dsv4::linear_packed`: x [..., K] -> [..., N]."""
    return F.linear(ACTIVATIONS.fake_quant(x), dense(weight, weight_scale, FORMAT).to(x.dtype))


def grouped_output_packed(o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor) -> Tensor:
    """`dsv4::grouped_output_packed`: o [..., G, Din] -> [..., Dout]."""
    groups, rank, width = wo_a.shape
    low = torch.bmm(o.reshape(-1, groups, width).transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1)
    return linear_packed(low.reshape(*o.shape[:-2], groups * rank), wo_b, wo_b_scale)


TEMPLATES = (
    CpuTemplate("linear_packed", "dsv4::linear_packed", "inline", linear_packed),
    CpuTemplate("grouped_output_packed", "dsv4::grouped_output_packed", "inline", grouped_output_packed),
)
