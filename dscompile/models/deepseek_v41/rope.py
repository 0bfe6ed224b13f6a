"""Rotary positions (model_v41 2.3): adjacent pairs of the last dimensions, float32 arithmetic, optionally YaRN."""

import math

import torch
from torch import Tensor

from dscompile.models.deepseek_v41.config import DeepseekV41Config


def window_frequencies(config: DeepseekV41Config) -> Tensor:
    """float32 [rd / 2]: radians per position of layers without compressed rows (plain, base `rope_theta`)."""
    return _plain(config.qk_rope_head_dim, config.rope_theta)


def compressed_frequencies(config: DeepseekV41Config) -> Tensor:
    """float32 [rd / 2]: radians per position of layers with compressed rows (base `compress_rope_theta`, YaRN)."""
    dim, theta = config.qk_rope_head_dim, config.compress_rope_theta
    plain, original = _plain(dim, theta), config.rope_scaling_original_max_position_embeddings
    if config.rope_scaling_type == "none" or original <= 0:
        return plain

    def pair_that_turns(turns: float) -> float:
        """The pair index whose angle makes `turns` full turns over the original context."""
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(config.rope_scaling_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(config.rope_scaling_beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return plain / config.rope_scaling_factor * ramp + plain * (1 - ramp)


def _plain(dim: int, theta: float) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def rope_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [B, N] int64 (negative counts as 0), frequencies [rd / 2] -> cos and sin, float32 [B, N, rd / 2]."""
    angles = positions.clamp(min=0).float().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x[2i], x[2i+1]) of the last 2 * cos.shape[-1] dimensions by the angle of (cos, sin)[i].

    x [..., D] of any float dtype; cos and sin broadcast to [..., rd / 2]. float32 arithmetic, result in x's dtype.
    """
    split = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., split:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :split], rotated.to(x.dtype)), -1)


def undo_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse rotation of `apply_rope`."""
    return apply_rope(x, cos, -sin)
