"""Engram (model_v41 2.8): n-gram rows from a large table, gated into every residual stream."""

import torch
from torch import Tensor, nn

from dscompile.formats.numeric import e4m3_to_float, ue8m0_to_float
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.engram_hash import engram_multipliers, engram_primes, engram_rows
from dscompile.models.deepseek_v41.linear import Linear, frozen

TABLE_GROUP = 32  # values of a table row that share a scale


def gather_table(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """table [S, d] float, or uint8 E4M3 codes with scales uint8 [S, d / 32]; rows [..., R] -> [..., R * d]."""
    values = table[rows]
    if scales is not None:
        grouped = e4m3_to_float(values).unflatten(-1, (-1, TABLE_GROUP))
        values = (grouped * ue8m0_to_float(scales[rows]).unsqueeze(-1)).flatten(-2)
    return values.flatten(-2).to(dtype)


def engram_gate(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor, eps: float
) -> Tensor:
    """streams and key [B, T, n, D], value [B, T, D], weights [n, D], mask bool [B, T] (False: gate 0) -> new streams.

    Per stream, the gate is the sigmoid of the signed square root of the normalised, scaled product of stream and key.
    """
    x, k = streams.float(), key.float()
    norm = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    dot = (x * q_weight * k_weight * k).sum(-1) * norm * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp(min=1e-6).sqrt())
    gate = torch.where(mask.unsqueeze(-1), gate, 0.0)
    return (x + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).to(streams.dtype)


class EngramTable(nn.Module):
    """The table, as FP8 codes with UE8M0 scales (`packed`, the release's form) or plain values of `dtype`."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        self.weight = frozen(rows, dim, dtype=torch.uint8 if packed else dtype)
        self.scale = frozen(rows, dim // TABLE_GROUP, dtype=torch.uint8) if packed else None


class Engram(nn.Module):
    """One Engram layer; `place` is its place in `engram_layer_ids`."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(
        self, config: DeepseekV41Config, place: int, dtype: torch.dtype, packed: bool, packed_table: bool
    ) -> None:
        super().__init__()
        layer, streams, hidden = config.engram_layer_ids[place], config.hc_mult, config.hidden_size
        grams, heads, dim = config.engram_max_ngram_size, config.engram_n_heads, config.engram_head_dim
        self.embed = EngramTable(config.engram_num_embeddings[place], dim, dtype, packed_table)
        self.wkv = Linear((grams - 1) * heads * dim, (streams + 1) * hidden, dtype, packed)
        self.q_weight = frozen(streams, hidden, dtype=torch.float32)
        self.k_weight = frozen(streams, hidden, dtype=torch.float32)
        self.streams, self.hidden, self.dtype, self.eps = streams, hidden, dtype, config.rms_norm_eps
        sizes = engram_primes(len(config.engram_layer_ids), grams, heads, config.engram_vocab_size)[place]
        primes = torch.tensor(sizes, dtype=torch.int64)
        factors = engram_multipliers(layer, grams, config.engram_compressed_vocab_size)
        self.register_buffer("multipliers", torch.tensor(factors, dtype=torch.int64), persistent=False)
        self.register_buffer("primes", primes, persistent=False)
        offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
        self.register_buffer("offsets", offsets, persistent=False)

    @torch.compiler.nested_compile_region
    def forward(self, streams: Tensor, back: Tensor, mask: Tensor) -> Tensor:
        """streams [B, T, n, D], back int64 [B, T, max_ngram] from `lookback`, mask bool [B, T] -> new streams."""
        rows = engram_rows(back, self.multipliers, self.primes, self.offsets)
        looked_up = gather_table(self.embed.weight, self.embed.scale, rows, self.dtype)
        key, value = self.wkv(looked_up).split((self.streams * self.hidden, self.hidden), -1)
        key = key.unflatten(-1, (self.streams, self.hidden))
        return engram_gate(streams, key, value, self.q_weight, self.k_weight, mask, self.eps)
