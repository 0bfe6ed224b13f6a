"""A small stack of V4.1's own expert layers, without attention: what expert parallelism rewrites, quick to compile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.models.deepseek_v41.init import initialise
from dscompile.models.deepseek_v41.moe import MoE
from dscompile.models.deepseek_v41.norm import RMSNorm


class Layer(nn.Module):
    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, dtype, packed)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Blocks(nn.Module):
    """x [B, T, hidden] -> the same shape, through a few layers, the first of which no region is made of."""

    def __init__(
        self, layers: int = 3, dtype: torch.dtype = torch.float32, packed: bool = False, **changes: int
    ) -> None:
        super().__init__()
        config = DeepseekV41Config.miniature(**changes)
        self.config = config
        self.layers = nn.ModuleList(Layer(config, dtype, packed) for _ in range(layers))
        self.requires_grad_(False)
        self.eval()
        for module in self.modules():
            if hasattr(module, "round_activations"):
                module.round_activations = packed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(config: DeepseekV41Config, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Inputs [*shape, hidden] of a rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(*shape, config.hidden_size, generator=generator).to(dtype)
