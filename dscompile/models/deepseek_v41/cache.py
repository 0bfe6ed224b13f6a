"""The cache of a batch: packed rows in flat pools, handed to the model as tensors and updated in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dscompile.models.deepseek_v41.attention import COMPRESSED_FORMAT, WINDOW_FORMAT
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.engram_hash import BLOCKED
from dscompile.models.deepseek_v41.indexer import INDEX_FORMAT


@dataclass(frozen=True)
class CachePart:
    """One line of `DeepseekV41Cache.byte_report`."""

    name: str
    layers: tuple[int, ...]
    row_bytes: int
    bytes_per_token: float  # what grows with every token of a sequence; 0 for a part of fixed size
    bytes_per_sequence: int  # what a sequence takes whatever its length; 0 for a part that grows
    total_bytes: int  # of the pools as allocated, scratch rows left out
    scratch_bytes: int


@dataclass(frozen=True)
class CacheReport:
    """The bytes of a cache, part by part."""

    parts: tuple[CachePart, ...]

    @property
    def global_bytes_per_token(self) -> float:
        """Bytes that one more token adds: compressed KV rows and index keys (890 for the release)."""
        return sum(part.bytes_per_token for part in self.parts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools, scratch rows included."""
        return sum(part.total_bytes + part.scratch_bytes for part in self.parts)

    def __str__(self) -> str:
        head = f"{'part':<16}{'layers':>8}{'row B':>8}{'B/token':>10}{'B/sequence':>12}{'total B':>14}{'scratch B':>11}"
        lines = [
            f"{p.name:<16}{len(p.layers):>8}{p.row_bytes:>8}{p.bytes_per_token:>10g}{p.bytes_per_sequence:>12}"
            f"{p.total_bytes:>14}{p.scratch_bytes:>11}"
            for p in self.parts
        ]
        return "\n".join([head, *lines, f"{self.global_bytes_per_token:g} bytes per token, {self.total_bytes} in all"])


class DeepseekV41Cache(NamedTuple):
    """Pools by layer, each [rows of sequence 0, rows of sequence 1, ..., one scratch row].

    Attributes:
        window: every layer's ring of the last `sliding_window` rows, uint8 [B * W + 1, row_bytes].
        compressed: every KV source's rows, uint8 [B * capacity + 1, row_bytes].
        index_keys: every KV source's index keys, uint8 [B * capacity + 1, row_bytes].
        open_groups: every KV source's last ratio - 1 tokens (kv, then gate), float32 [B * (ratio - 1) + 1, 2 * D];
            sources with ratio 1 have none.
        tokens: the last n-gram - 1 compressed token ids, int64 [B * (n - 1) + 1, 1]; None without Engram.
        ratios: tokens per row of every KV source.
        batch_size: sequences.
        max_tokens: positions 0 .. max_tokens - 1 can be stored.
    """

    window: dict[int, Tensor]
    compressed: dict[int, Tensor]
    index_keys: dict[int, Tensor]
    open_groups: dict[int, Tensor]
    tokens: Tensor | None
    ratios: dict[int, int]
    batch_size: int
    max_tokens: int

    @staticmethod
    def empty(
        config: DeepseekV41Config, batch_size: int, max_tokens: int, device: torch.device | str = "cpu"
    ) -> DeepseekV41Cache:
        """A zeroed cache for `batch_size` sequences of up to `max_tokens` tokens."""
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r}, allowed: an int >= 1")
        limit = config.max_position_embeddings
        if max_tokens > limit:
            raise ValueError(f"max_tokens: {max_tokens}, allowed: <= max_position_embeddings {limit}")

        def pool(rows: int, width: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(batch_size * rows + 1, width, dtype=dtype, device=device)

        ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
        window_bytes = WINDOW_FORMAT.row_bytes(config.head_dim)
        row_bytes = COMPRESSED_FORMAT.row_bytes(config.head_dim)
        key_bytes = INDEX_FORMAT.row_bytes(config.index_head_dim)
        tokens = None
        if config.engram_layer_ids:
            tokens = pool(config.engram_max_ngram_size - 1, 1, torch.int64).fill_(BLOCKED)
        return DeepseekV41Cache(
            window={layer: pool(config.sliding_window, window_bytes) for layer in range(config.num_hidden_layers)},
            compressed={layer: pool(max_tokens // ratio, row_bytes) for layer, ratio in ratios.items()},
            index_keys={layer: pool(max_tokens // ratio, key_bytes) for layer, ratio in ratios.items()},
            open_groups={
                layer: pool(ratio - 1, 2 * config.head_dim, torch.float32)
                for layer, ratio in ratios.items()
                if ratio > 1
            },
            tokens=tokens,
            ratios=ratios,
            batch_size=batch_size,
            max_tokens=max_tokens,
        )

    def clear(self) -> None:
        """Zero every pool: only needed after non-finite values were stored."""
        for pools in (self.window, self.compressed, self.index_keys, self.open_groups):
            for pool in pools.values():
                pool.zero_()
        if self.tokens is not None:
            self.tokens.fill_(BLOCKED)

    def byte_report(self) -> CacheReport:
        """Bytes per part: per token of a sequence, per sequence, in all, and of the scratch rows."""
        parts = [
            self._part("window", self.window, growing=False),
            self._part("compressed KV", self.compressed, growing=True),
            self._part("index keys", self.index_keys, growing=True),
            self._part("open groups", self.open_groups, growing=False),
            self._part("n-gram tokens", {} if self.tokens is None else {0: self.tokens}, growing=False),
        ]
        return CacheReport(tuple(part for part in parts if part.layers))

    def _part(self, name: str, pools: dict[int, Tensor], growing: bool) -> CachePart:
        widths = {layer: pool.shape[1] * pool.element_size() for layer, pool in pools.items()}
        total = sum((pool.shape[0] - 1) * widths[layer] for layer, pool in pools.items())
        return CachePart(
            name=name,
            layers=tuple(pools),
            row_bytes=max(widths.values(), default=0),
            bytes_per_token=sum(widths[layer] / self.ratios[layer] for layer in pools) if growing else 0.0,
            bytes_per_sequence=0 if growing else total // self.batch_size,
            total_bytes=total,
            scratch_bytes=sum(widths.values()),
        )
