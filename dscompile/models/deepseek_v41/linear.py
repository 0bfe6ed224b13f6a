"""Linear layers whose weight is plain or kept as the release stores it: E4M3 codes with one UE8M0 scale per block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscompile.formats import FORMATS
from dscompile.formats.numeric import ue8m0_to_float

ACTIVATION_FORMAT = FORMATS["fp8_g32_ue8m0"]  # of what enters a product with quantised weights (model_v41 3.1)
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
    """x @ weight^T without a bias.

    `packed` keeps an FP8 weight in its bytes and dequantises it in every forward; None is for a weight that the release
    does not quantise. `round_activations` rounds x to E4M3 with a scale per 32 values first, as the release does in
    front of quantised weights.
    """

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, packed: bool | None = None) -> None:
        super().__init__()
        self.dtype, self.quantised, self.round_activations = dtype, packed is not None, False
        self.weight = frozen(outputs, inputs, dtype=torch.float8_e4m3fn if packed else dtype)
        self.scale = None
        if packed:
            self.scale = frozen(-(-outputs // WEIGHT_BLOCK), -(-inputs // WEIGHT_BLOCK), dtype=torch.uint8)

    def dense_weight(self) -> Tensor:
        """The weight [outputs, inputs] in the activation dtype."""
        return self.weight if self.scale is None else dequantise_blocks(self.weight, self.scale, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.round_activations:
            x = ACTIVATION_FORMAT.fake_quant(x)
        return F.linear(x, self.dense_weight())
