"""Grouped matrix product for every dtype. torch's own captures in bfloat16 only, so the others go through an operation.

`torch.nn.functional.grouped_mm` runs in float32 and float16 on a CPU, but its shape function (up to torch 2.15) refuses
them, and with it `torch.compile`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [M, K], weights [E, K, N], ends int32 [E] -> [M, N]: rows ends[e - 1] .. ends[e] of x times weights[e].

    Every row belongs to a group: ends[E - 1] is M.
    """
    if x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weights, offs=ends)
    return torch.ops.deepseek_v41.grouped_mm(x, weights, ends)


@torch.library.custom_op("deepseek_v41::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return F.grouped_mm(x, weights, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ weight for part, weight in zip(x.split(sizes), weights)])


@_grouped_mm.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])
