"""The layers (model_v41 2.2), one class per kind of layer.

Each `forward` is a compile region of its own that takes and returns tensors only, so that all layers of a kind share
one graph. What an earlier layer owns (rows, index keys, the index list, the candidate mask) comes in as a tensor.

    kind            owns                     reads
    WindowBlock     window rows              -
    FullBlock       + compressor, indexer    its own rows
    ReindexBlock    + indexer                its source's rows and index keys, the candidates
    ReuseBlock      window rows              its source's rows, the latest index list
"""

import torch
from torch import Tensor, nn

from dscompile.models.deepseek_v41.attention import COMPRESSED_FORMAT, Attention, attend_sparse, attend_window
from dscompile.models.deepseek_v41.compressor import Compressor, TokenCompressor
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.hyper import HyperMix, hc_collapse, hc_expand
from dscompile.models.deepseek_v41.indexer import (
    Indexer,
    candidate_rows,
    decode_keys,
    mask_invisible,
    select_rows,
    visible_rows,
)
from dscompile.models.deepseek_v41.moe import MoE
from dscompile.models.deepseek_v41.norm import RMSNorm
from dscompile.models.deepseek_v41.paged import selected_rows, sequence_rows
from dscompile.models.deepseek_v41.plan import store_rows
from dscompile.models.deepseek_v41.rope import apply_rope


class Block(nn.Module):
    """What all kinds share: two hyper-connected sublayers, attention and experts."""

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        self.hc_attn = HyperMix(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, dtype, packed)
        self.hc_ffn = HyperMix(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, dtype, packed)

    def finish(self, y: Tensor, streams: Tensor, mix: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Attention output y [B, T, hidden], the streams and mix that it came from -> the block's streams and pre."""
        pre, post, comb = mix
        streams = hc_expand(y, streams, post, comb)
        next_pre, post, comb = self.hc_ffn(streams)
        y = self.ffn(self.ffn_norm(hc_collapse(streams, pre)))
        return hc_expand(y, streams, post, comb), next_pre


class WindowBlock(Block):
    """A layer that attends to the window alone."""

    @torch.compiler.nested_compile_region
    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        positions: Tensor,
        window_pool: Tensor,
        window_read: Tensor,
        window_write: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """streams [B, T, n, hidden] and pre [B, T, n] -> the same after this layer."""
        mix = self.hc_attn(streams)
        x = self.attn_norm(hc_collapse(streams, pre))
        attn = self.attn
        _, q = attn.queries(x, cos, sin)
        rows = attn.window_rows(x, cos, sin, window_pool, window_read, window_write)
        o = attend_window(q, rows, positions, attn.window, attn.attn_sink, attn.scale)
        return self.finish(attn.output(o, cos, sin), streams, mix)


class ReuseBlock(Block):
    """A layer that attends to its source's rows with the index list of the latest index source."""

    @torch.compiler.nested_compile_region
    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        positions: Tensor,
        window_pool: Tensor,
        window_read: Tensor,
        window_write: Tensor,
        cos: Tensor,
        sin: Tensor,
        row_pool: Tensor,
        indices: Tensor,
        row_slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `WindowBlock`, with the source's row pool and int64 indices [B, T, K] (-1 = none).

        `row_slots` int64 [B, capacity]: where the pool holds each row, if not in the order of the batch.
        """
        mix = self.hc_attn(streams)
        x = self.attn_norm(hc_collapse(streams, pre))
        attn = self.attn
        _, q = attn.queries(x, cos, sin)
        window = attn.window_rows(x, cos, sin, window_pool, window_read, window_write)
        rows, picks = selected_rows(row_pool, indices, row_slots)
        o = attend_sparse(q, window, positions, attn.window, rows, picks, attn.attn_sink, attn.scale)
        return self.finish(attn.output(o, cos, sin), streams, mix)


class ReindexBlock(Block):
    """A layer with an index of its own over its source's keys, limited to the candidates where there are any."""

    def __init__(self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool, ratio: int) -> None:
        super().__init__(config, dtype, packed)
        self.indexer = Indexer(config, dtype, owns_keys=False, packed=packed)
        self.ratio = ratio

    @torch.compiler.nested_compile_region
    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        positions: Tensor,
        window_pool: Tensor,
        window_read: Tensor,
        window_write: Tensor,
        cos: Tensor,
        sin: Tensor,
        row_pool: Tensor,
        key_pool: Tensor,
        candidates: Tensor | None = None,
        row_slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `ReuseBlock`, with the source's key pool and bool candidates [B, T, capacity]; returns the indices too."""
        mix = self.hc_attn(streams)
        x = self.attn_norm(hc_collapse(streams, pre))
        attn, indexer = self.attn, self.indexer
        latent, q = attn.queries(x, cos, sin)
        window = attn.window_rows(x, cos, sin, window_pool, window_read, window_write)
        scores = indexer.score(x, latent, sequence_rows(key_pool, x.shape[0], row_slots), cos, sin)
        scores = mask_invisible(scores, visible_rows(positions, self.ratio))
        if candidates is not None:
            scores = scores.masked_fill(~candidates, -torch.inf)
        indices = select_rows(scores, indexer.top_k)
        rows, picks = selected_rows(row_pool, indices, row_slots)
        o = attend_sparse(q, window, positions, attn.window, rows, picks, attn.attn_sink, attn.scale)
        return (*self.finish(attn.output(o, cos, sin), streams, mix), indices)


class FullBlock(Block):
    """A KV source: compresses its input into rows and index keys, then selects among them.

    The candidate source (`publishes_candidates`) also returns the mask that later indexers score within.
    """

    def __init__(
        self, config: DeepseekV41Config, dtype: torch.dtype, packed: bool, ratio: int, publishes_candidates: bool
    ) -> None:
        super().__init__(config, dtype, packed)
        self.compressor = Compressor(config) if ratio > 1 else TokenCompressor(config, dtype)
        self.indexer = Indexer(config, dtype, owns_keys=True, packed=packed)
        self.ratio, self.publishes_candidates = ratio, publishes_candidates

    @torch.compiler.nested_compile_region
    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        positions: Tensor,
        window_pool: Tensor,
        window_read: Tensor,
        window_write: Tensor,
        cos: Tensor,
        sin: Tensor,
        row_pool: Tensor,
        key_pool: Tensor,
        group_write: Tensor,
        group_cos: Tensor,
        group_sin: Tensor,
        last_key_pool: Tensor | None = None,
        *open_group: Tensor,
        row_slots: Tensor | None = None,
        last_key_slots: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """As `WindowBlock`, with the layer's own pools and where the chunk's groups go in them.

        For ratio > 1 only: the key pool of the model's last KV source (`decode_keys`; None to score own keys always),
        and `open_group`: the pool of the open groups, its read and write rows, and the groups' members.
        `row_slots` int64 [B, capacity]: where the pools hold each row, if not in the order of the batch, and
        `last_key_slots` the same for as many rows of the last source's keys.
        Returns streams, pre, indices and, from the candidate source, candidates.
        """
        mix = self.hc_attn(streams)
        x = self.attn_norm(hc_collapse(streams, pre))
        attn, indexer = self.attn, self.indexer
        latent, q = attn.queries(x, cos, sin)
        window = attn.window_rows(x, cos, sin, window_pool, window_read, window_write)

        compressed = self.compressor(x, *open_group)
        store_rows(key_pool, group_write, indexer.pack_keys(compressed, group_cos, group_sin))
        store_rows(row_pool, group_write, COMPRESSED_FORMAT.pack(apply_rope(compressed, group_cos, group_sin)))

        n_visible = visible_rows(positions, self.ratio)
        keys = sequence_rows(key_pool, x.shape[0], row_slots)
        if last_key_pool is not None and x.shape[1] == 1:
            last_keys = sequence_rows(last_key_pool, x.shape[0], last_key_slots)
            keys = decode_keys(keys, last_keys, positions, self.ratio)
        scores = mask_invisible(indexer.score(x, latent, keys, cos, sin), n_visible)
        indices = select_rows(scores, indexer.top_k)
        rows, picks = selected_rows(row_pool, indices, row_slots)
        o = attend_sparse(q, window, positions, attn.window, rows, picks, attn.attn_sink, attn.scale)
        streams, pre = self.finish(attn.output(o, cos, sin), streams, mix)
        if not self.publishes_candidates:
            return streams, pre, indices
        return streams, pre, indices, candidate_rows(scores, n_visible, indexer.blocks, indexer.block_size)
