"""The pools of DeepSeek-V4.1 in pages, and what the model's `forward` takes for a batch of requests in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from dscompile.kv.cache import PagedCache
from dscompile.kv.layout import INT64, CacheLayout, PoolSpec, fingerprint
from dscompile.models.deepseek_v41.attention import COMPRESSED_FORMAT, WINDOW_FORMAT
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.engram_hash import BLOCKED
from dscompile.models.deepseek_v41.indexer import INDEX_FORMAT
from dscompile.models.deepseek_v41.paged import PagedDeepseekV41Cache

MOST_TOKENS = 8  # that one verification may store and take back


def model_fingerprint(config: DeepseekV41Config, revision: str = "") -> str:
    """Of the configuration, and of a name for the weights where two checkpoints share one."""
    return fingerprint(["deepseek_v41", asdict(config), revision])


def cache_layout(config: DeepseekV41Config, page_tokens: int = 64, revision: str = "") -> CacheLayout:
    """The pools of a model: window rings, compressed rows, index keys, open groups and the n-gram tail."""
    ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
    step = math.lcm(*ratios.values())
    if page_tokens < 1 or page_tokens % step:
        raise ValueError(f"page_tokens: {page_tokens}, allowed: a multiple of {step}, the ratios' own")
    dim, window = config.head_dim, config.sliding_window
    pools = [
        PoolSpec("window", layer, "ring", WINDOW_FORMAT.name, dim, window, width=window)
        for layer in range(config.num_hidden_layers)
    ]
    for layer, ratio in ratios.items():
        rows = page_tokens // ratio
        pools.append(PoolSpec("compressed", layer, "rows", COMPRESSED_FORMAT.name, dim, rows, ratio))
        pools.append(PoolSpec("index_keys", layer, "rows", INDEX_FORMAT.name, config.index_head_dim, rows, ratio))
        if ratio > 1:
            held = ratio - 1
            pools.append(PoolSpec("open_groups", layer, "open", "fp32", 2 * dim, held + MOST_TOKENS, ratio, held))
    if config.engram_layer_ids:
        width = config.engram_max_ngram_size - 1
        pools.append(PoolSpec("tokens", 0, "ring", INT64, 1, width + MOST_TOKENS, width=width, blank=BLOCKED))
    model = model_fingerprint(config, revision)
    return CacheLayout(tuple(pools), page_tokens, model, config.num_hidden_layers, revision)


def paged_cache(
    config: DeepseekV41Config,
    requests: int,
    tokens: int,
    page_tokens: int = 64,
    device: torch.device | str = "cpu",
    revision: str = "",
) -> PagedCache:
    """A cache for up to `requests` requests that have `tokens` tokens together, each rounded up to whole pages."""
    layout = cache_layout(config, page_tokens, revision)
    return PagedCache(layout, requests, layout.pages_for(tokens), device)


def batch_view(
    cache: PagedCache, numbers: Sequence[int | None], columns: int, first_rows: Sequence[int] | None = None
) -> PagedDeepseekV41Cache:
    """What the model's `forward` takes for a batch of these requests (None = idle row).

    `first_rows` says with which row each row's request begins, where requests have several rows.
    """
    pools: dict[str, dict[int, Tensor]] = {}
    ratios = {spec.layer: spec.ratio for spec in cache.layout.pools if spec.part == "compressed"}
    for spec in cache.layout.pools:
        pools.setdefault(spec.part, {})[spec.layer] = cache.pools[spec.name]
    tokens = pools.get("tokens")
    return PagedDeepseekV41Cache(
        window=pools["window"],
        compressed=pools.get("compressed", {}),
        index_keys=pools.get("index_keys", {}),
        open_groups=pools.get("open_groups", {}),
        tokens=tokens[0] if tokens else None,
        ratios=ratios,
        state_pages=cache.pages.state.pages,
        token_pages=cache.pages.tokens.pages,
        page_tokens=cache.layout.page_tokens,
        first_row=None if first_rows is None else torch.tensor(first_rows, device=cache.device),
        **cache.batch(numbers, columns)._asdict(),
    )
