"""DeepSeek-V4.1 as one plain PyTorch module (model_v41 section 2.0).

    config = DeepseekV41Config.miniature()
    model = DeepseekV41ForCausalLM(config)
    cache = model.new_cache(batch_size=1, max_tokens=64)
    logits = model(input_ids, positions, cache)

There is no Python state between calls and no host branch on data: positions are tensors, the cache is tensors that are
handed in and updated in place, and every layer is a function of tensors. One forward serves a whole prompt, a chunk of
one at any boundary, and a decode step, with the rows of a batch at different positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscompile.models.deepseek_v41.block import Block, FullBlock, ReindexBlock, ReuseBlock, WindowBlock
from dscompile.models.deepseek_v41.cache import DeepseekV41Cache
from dscompile.models.deepseek_v41.checks import check_inputs
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.engram import Engram
from dscompile.models.deepseek_v41.engram_hash import BLOCKED, lookback, with_history
from dscompile.models.deepseek_v41.hyper import hc_collapse
from dscompile.models.deepseek_v41.init import initialise
from dscompile.models.deepseek_v41.linear import Linear, frozen
from dscompile.models.deepseek_v41.moe import Experts
from dscompile.models.deepseek_v41.norm import RMSNorm
from dscompile.models.deepseek_v41.paged import (
    AnyCache,
    PagedDeepseekV41Cache,
    group_rows,
    ring_pages,
    stored_positions,
)
from dscompile.models.deepseek_v41.plan import plan_groups, plan_window, plan_window_rows
from dscompile.models.deepseek_v41.rope import compressed_frequencies, rope_table, window_frequencies

if TYPE_CHECKING:
    from dscompile.distributed.placement import Placement

Weights = Literal["dequantised", "packed"]
Activations = Literal["plain", "fp8"]


class RatioPlan(NamedTuple):
    """The arguments of a `FullBlock` that follow from its ratio."""

    store: tuple[Tensor, Tensor, Tensor]  # group_write, group_cos, group_sin
    open_group: tuple[Tensor, ...]  # read, write, members; empty for ratio 1


class Embedding(nn.Module):
    """Token id -> row."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = frozen(rows, dim, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class DeepseekV41ForCausalLM(nn.Module):
    """The text model. Parameters take no gradient: this is a model for inference.

    `dtype` is that of activations and of most weights; norms, mixes, the router, pooled compressors and the head stay
    float32. `weights="packed"` keeps the release's FP8 and FP4 weights in their bytes and dequantises them in every
    forward, and `packed_tables` (by default the same) does so for the Engram tables. `activations="fp8"` rounds what
    enters a product with a weight that the release quantises, as the release does: `weights="packed"` with it is the
    release's arithmetic, up to the order of sums. Parameters start random
    (reproducible from torch's generator) unless `random` is False; `from_pretrained` reads a checkpoint.
    """

    token_map: Tensor
    window_frequencies: Tensor
    compressed_frequencies: Tensor

    def __init__(
        self,
        config: DeepseekV41Config,
        dtype: torch.dtype = torch.float32,
        weights: Weights = "dequantised",
        packed_tables: bool | None = None,
        random: bool = True,
        activations: Activations = "plain",
    ) -> None:
        super().__init__()
        if activations not in ("plain", "fp8"):
            raise ValueError(f"activations: {activations!r}, allowed: 'plain' or 'fp8'")
        if weights not in ("dequantised", "packed"):
            raise ValueError(f"weights: {weights!r}, allowed: 'dequantised' or 'packed'")
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype: {dtype}, allowed: torch.float32, torch.bfloat16 or torch.float16")
        packed = weights == "packed"
        tables = packed if packed_tables is None else packed_tables
        self.config, self.dtype, self.weights = config, dtype, weights
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(_block(config, i, dtype, packed) for i in range(config.num_hidden_layers))
        self.engrams = nn.ModuleDict(
            {str(i): Engram(config, place, dtype, packed, tables) for place, i in enumerate(config.engram_layer_ids)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, dtype=torch.float32)
        self.register_buffer("window_frequencies", window_frequencies(config), persistent=False)
        self.register_buffer("compressed_frequencies", compressed_frequencies(config), persistent=False)
        if config.engram_layer_ids:
            ids = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
            self.register_buffer("token_map", ids, persistent=False)
        self.kinds = tuple(config.kind(layer) for layer in range(config.num_hidden_layers))
        for module in self.modules():
            if isinstance(module, Experts) or (isinstance(module, Linear) and module.quantised):
                module.round_activations = activations == "fp8"
        self.requires_grad_(False)
        self.eval()
        if random:
            initialise(self)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.bfloat16,
        weights: Weights = "dequantised",
        token_map: Tensor | None = None,
        progress: bool = True,
        activations: Activations = "plain",
        expert_mesh: Any = None,
        expert_parallel: str | None = None,
        placement: Placement | None = None,
    ) -> DeepseekV41ForCausalLM:
        """Read a checkpoint folder; see `checkpoint.load`."""
        from dscompile.models.deepseek_v41.checkpoint import load

        return load(
            folder, dtype=dtype, weights=weights, token_map=token_map, progress=progress, activations=activations,
            expert_mesh=expert_mesh, expert_parallel=expert_parallel, placement=placement,
        )  # fmt: skip

    def new_cache(self, batch_size: int, max_tokens: int) -> DeepseekV41Cache:
        """An empty cache for `batch_size` sequences of up to `max_tokens` tokens, where the model's weights are."""
        return DeepseekV41Cache.empty(self.config, batch_size, max_tokens, self.embed.weight.device)

    def forward(self, input_ids: Tensor, positions: Tensor, cache: AnyCache) -> Tensor:
        """input_ids [B, T] and positions int64 [B, T] -> logits float32 [B, T, vocab]; `cache` is updated in place.

        Positions of a row rise by one from its first; -1 is padding, at the end of a row or in all of it. A position
        that breaks this, or that is not below `cache.max_tokens` (in a paged cache: for which the row has no page), is
        treated as padding with all that follows it: nothing is stored for it and its logits mean nothing
        (`check_positions` raises for it, outside compiled code). In a paged cache a request may have several rows, each
        going on where the one in front of it ends (`first_row`); a row that does not is padding too.
        """
        check_inputs(self.config, input_ids, positions, cache)
        positions = stored_positions(positions, cache)
        window = plan_window_rows(positions, self.config.sliding_window, ring_pages(cache, cache.window[0]))
        near = rope_table(positions, self.window_frequencies)
        far = rope_table(positions, self.compressed_frequencies)
        slots = {ratio: group_rows(cache, ratio) for ratio in sorted(set(cache.ratios.values()))}
        groups = {ratio: self.plan_ratio(positions, ratio, cache, rows) for ratio, rows in slots.items()}
        back, text = self.ngrams(input_ids, positions, cache)

        batch, length = input_ids.shape
        n = self.config.hc_mult
        streams = self.embed(input_ids).unsqueeze(2).repeat(1, 1, n, 1)
        pre = torch.eye(n, device=streams.device)[0].repeat(batch, length, 1)
        indices: Tensor | None = None  # the latest index list
        candidates: tuple[Tensor, ...] = ()  # the candidate mask, once published
        for i, layer in enumerate(self.layers):
            if i in self.config.engram_layer_ids:
                streams = self.engrams[str(i)](streams, back, text)
            common = (streams, pre, positions, cache.window[i], *window)
            if self.kinds[i] == "window":
                streams, pre = layer(*common, *near)
                continue
            source = self.config.kv_source(i)
            rows, keys, row_slots = cache.compressed[source], cache.index_keys[source], slots[cache.ratios[source]]
            if self.kinds[i] == "full":
                ratio = cache.ratios[i]
                plan = groups[ratio]
                last, last_slots = self.last_keys(i, cache, slots)
                open_group = (last, cache.open_groups[i], *plan.open_group) if ratio > 1 else ()
                where = {} if row_slots is None else {"row_slots": row_slots, "last_key_slots": last_slots}
                streams, pre, indices, *published = layer(*common, *far, rows, keys, *plan.store, *open_group, **where)
                candidates = tuple(published) or candidates
            elif self.kinds[i] == "reindex":
                streams, pre, indices = layer(*common, *far, rows, keys, *(candidates or (None,)), row_slots)
            else:
                streams, pre = layer(*common, *far, rows, indices, row_slots)
        return self.head(self.norm(hc_collapse(streams, pre)).float())

    def plan_ratio(self, positions: Tensor, ratio: int, cache: AnyCache, rows: Tensor | None = None) -> RatioPlan:
        """Where the chunk's groups of `ratio` tokens go, and their rotary table (that of their first token)."""
        capacity = cache.max_tokens // ratio
        if isinstance(cache, PagedDeepseekV41Cache):
            scratch = cache.token_pages * (cache.page_tokens // ratio)
            plan = plan_groups(positions, ratio, capacity, rows, scratch, cache.write_from)
        else:
            plan = plan_groups(positions, ratio, capacity)
        store = (plan.write, *rope_table(plan.start, self.compressed_frequencies))
        if ratio == 1:
            return RatioPlan(store, ())
        pool = next(pool for layer, pool in cache.open_groups.items() if cache.ratios[layer] == ratio)
        return RatioPlan(store, (*plan_window(positions, ratio - 1, ring_pages(cache, pool)), plan.members))

    def last_keys(
        self, layer: int, cache: AnyCache, slots: dict[int, Tensor | None]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The index keys that KV source `layer` scores while its group is open (`decode_keys`), and their slots.

        None: its own. They are its own too where the last source has fewer rows than the layer.
        """
        last = self.config.kv_source_layer_ids[-1]
        ratio = self.config.ratio(layer)
        if ratio == 1 or not self.config.release_decode_keys or last == layer or self.config.ratio(last) > ratio:
            return None, None
        rows = slots[self.config.ratio(last)]
        return cache.index_keys[last], None if rows is None else rows[:, : cache.max_tokens // ratio]

    def ngrams(self, input_ids: Tensor, positions: Tensor, cache: AnyCache) -> tuple[Tensor, Tensor]:
        """What the Engram layers hash, int64 [B, T, max_ngram], and which tokens are text, bool [B, T]."""
        ids = input_ids.long()
        image = self.config.image_token_id
        text = torch.ones_like(ids, dtype=torch.bool) if image is None else ids != image
        if cache.tokens is None:
            return ids, text
        size = self.config.engram_max_ngram_size
        compressed = torch.where(text, self.token_map[ids], BLOCKED)
        pad = self.token_map[self.config.engram_pad_token_id]
        pages = ring_pages(cache, cache.tokens)
        return lookback(with_history(compressed, positions, cache.tokens, size, pages), size, pad), text


def _block(config: DeepseekV41Config, layer: int, dtype: torch.dtype, packed: bool) -> Block:
    kind, ratio = config.kind(layer), config.ratio(layer)
    if kind == "window":
        return WindowBlock(config, dtype, packed)
    if kind == "full":
        return FullBlock(config, dtype, packed, ratio, layer == config.candidate_source_layer_id)
    return ReindexBlock(config, dtype, packed, ratio) if kind == "reindex" else ReuseBlock(config, dtype, packed)
