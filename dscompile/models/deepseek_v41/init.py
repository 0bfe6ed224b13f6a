"""Random weights, scaled so that a miniature behaves like a model: every layer kind, gate and selection takes part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41.attention import Attention
from dscompile.models.deepseek_v41.engram import Engram, EngramTable
from dscompile.models.deepseek_v41.hyper import HyperMix
from dscompile.models.deepseek_v41.linear import Linear
from dscompile.models.deepseek_v41.moe import EXPERT_FORMAT, Experts, Gate

_SCALE_EXPONENT = -8  # of packed random weights: small values use E4M3's normal range


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Fill every parameter of `model` in place; norms are one already."""

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=like.device) * std

    for module in model.modules():
        if isinstance(module, Linear):
            std = module.weight.shape[1] ** -0.5
            if module.scale is None:
                module.weight.copy_(normal(module.weight, std))
            else:
                module.scale.fill_(127 + _SCALE_EXPONENT)
                module.weight.copy_(normal(module.weight, std) * 2.0**-_SCALE_EXPONENT)
        elif isinstance(module, Experts):
            for name, (count, rows, columns) in module.shapes.items():
                weight = torch.randn((count, rows, columns), generator=generator) * columns**-0.5
                if module.packed:
                    payload, scales = EXPERT_FORMAT.encode(weight)
                    getattr(module, name).copy_(payload)
                    getattr(module, f"{name}_scale").copy_(scales)
                else:
                    getattr(module, name).copy_(weight)
        elif isinstance(module, EngramTable):
            values = torch.randn(module.weight.shape, generator=generator)
            if module.scale is None:
                module.weight.copy_(values)
            else:
                payload, scales = FORMATS["fp8_g32_ue8m0"].encode(values)
                module.weight.copy_(payload)
                module.scale.copy_(scales)
        elif isinstance(module, HyperMix):
            module.fn.copy_(normal(module.fn, module.fn.shape[1] ** -0.5))
            module.base.copy_(normal(module.base, 0.5))
            module.scale.fill_(0.5)
        elif isinstance(module, Gate):
            module.weight.copy_(normal(module.weight, module.weight.shape[1] ** -0.5))
            module.bias.copy_(normal(module.bias, 0.1))
        elif isinstance(module, Attention):
            module.attn_sink.copy_(normal(module.attn_sink, 1.0))
        elif isinstance(module, Engram):
            module.q_weight.copy_(1 + normal(module.q_weight, 0.1))
            module.k_weight.copy_(1 + normal(module.k_weight, 0.1))
    embed = getattr(model, "embed", None)
    if embed is not None:
        embed.weight.copy_(normal(embed.weight, 1.0))
