"""Linear layers whose weight is plain or kept as the release stores it: E4M3 codes with one UE8M0 scale per block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscompile.formats.numeric import ue8m0_to_float

WEIGHT_BLOCK = 32  # rows and columns that share a scale


def dequantise_blocks(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn [N, K] with uint8 scales [ceil(N / 32), ceil(K / 32)] -> [N, K] of `dtype` (exact in float32)."""
    rows, columns = weight.shape
    grid = ue8m0_to_float(scales).repeat_interleave(WEIGHT_BLOCK, 0)[:rows]
    grid = grid.repeat_interleave(WEIGHT_BLOCK, 1)[:, :columns]
    return (weight.float() * grid).to(dtype)


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x @ weight^T without a bias. `packed` keeps an FP8 weight in its bytes and dequantises it in every forward."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, packed: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = frozen(outputs, inputs, dtype=torch.float8_e4m3fn if packed else dtype)
        self.scale = None
        if packed:
            self.scale = frozen(-(-outputs // WEIGHT_BLOCK), -(-inputs // WEIGHT_BLOCK), dtype=torch.uint8)

    def dense_weight(self) -> Tensor:
        """The weight [outputs, inputs] in the activation dtype."""
        return self.weight if self.scale is None else dequantise_blocks(self.weight, self.scale, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense_weight())
