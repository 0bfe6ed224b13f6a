"""The compressor (model_v41 2.5): `ratio` tokens become one latent, the source of KV rows and index keys."""

import torch
from torch import Tensor, nn

from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.linear import Linear
from dscompile.models.deepseek_v41.norm import RMSNorm
from dscompile.models.deepseek_v41.plan import gather_rows, read_history, store_rows


def pool_groups(kv: Tensor, gate: Tensor) -> Tensor:
    """kv and gate [B, G, ratio, D] float32 -> [B, G, D]: per channel, a softmax-weighted sum over the tokens."""
    return (kv * gate.softmax(2)).sum(2)


class Compressor(nn.Module):
    """Latents of a KV source with ratio > 1. Weights float32: pooling is done in float32."""

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.wkv = Linear(config.hidden_size, config.head_dim, dtype=torch.float32)
        self.wgate = Linear(config.hidden_size, config.head_dim, dtype=torch.float32)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, open_rows: Tensor, read: Tensor, write: Tensor, members: Tensor) -> Tensor:
        """x [B, T, hidden] -> latents [B, G, head_dim], those of incomplete groups meaningless.

        `open_rows` [B * (ratio - 1) + 1, 2 * head_dim] float32 holds (kv, gate) of the last ratio - 1 tokens of each
        sequence and is updated in place; `read`, `write` and `members` are from `plan_window` and `plan_groups`.
        """
        xf = x.float()
        state = torch.cat((self.wkv(xf), self.wgate(xf)), -1)
        extended = torch.cat((read_history(open_rows, read, state), state), 1)
        store_rows(open_rows, write, state)
        kv, gate = gather_rows(extended, members).chunk(2, -1)
        return self.norm(pool_groups(kv, gate).to(x.dtype))


class TokenCompressor(nn.Module):
    """Latents of a KV source with ratio 1: a plain projection, one row per token."""

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.wkv = Linear(config.hidden_size, config.head_dim, dtype=dtype)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, hidden] -> latents [B, T, head_dim]."""
        return self.norm(self.wkv(x))
