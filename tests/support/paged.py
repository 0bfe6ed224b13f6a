"""Paged caches for tests: of a miniature with scattered pages, and of no model with rows that tell who they are."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dscompile.kv.cache import PagedCache
from dscompile.kv.deepseek_v41 import PagedModel, paged_cache
from dscompile.kv.layout import CacheLayout, PoolSpec
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM

Ids = list[int]


def scattered(
    model: DeepseekV41ForCausalLM, requests: int, tokens: int, skip: int = 0, page_tokens: int = 8
) -> PagedCache:
    """A cache where the pages of a request do not lie in order; `skip` sets how."""
    cache = paged_cache(model.config, requests, tokens, page_tokens)
    order = torch.Generator().manual_seed(skip)
    for pool in (cache.pages.state, cache.pages.tokens):
        pool._free = torch.randperm(pool.pages, generator=order).tolist()
    return cache


def greedy(paged: PagedModel, numbers: Sequence[int], logits: Tensor, count: int) -> list[Ids]:
    """`count` tokens of every request, the first from `logits`."""
    tokens = [logits.argmax(-1).tolist()]
    for _ in range(count - 1):
        tokens.append(paged.step(numbers, [[token] for token in tokens[-1]])[:, 0].argmax(-1).tolist())
    return [list(row) for row in zip(*tokens)]


def tiny_layout(page_tokens: int = 4, model: str = "tiny", format: str = "fp8_g32_ue8m0") -> CacheLayout:
    """A layout of no model: every kind of pool, small."""
    return CacheLayout(
        (
            PoolSpec("window", 0, "ring", format, 32, 6, width=6),
            PoolSpec("compressed", 0, "rows", "fp4_g16_e4m3", 32, page_tokens // 2, 2),
            PoolSpec("index_keys", 0, "rows", "fp4_g32_ue8m0", 32, page_tokens // 2, 2),
            PoolSpec("open_groups", 0, "open", "fp32", 4, 9, 2, 1),
            PoolSpec("tokens", 0, "ring", "int64", 1, 11, width=3, blank=-1),
        ),
        page_tokens,
        model,
        layers=2,
    )


def fill(cache: PagedCache, number: int, tokens: Sequence[int], start: int = 0) -> None:
    """Store what a model would: every row is a function of all tokens up to its last one. Tokens from `start` on."""
    for position in range(start, len(tokens)):
        for spec in cache.layout.pools:
            if spec.kind == "rows":
                if (position + 1) % spec.ratio:
                    continue
                place = position // spec.ratio
            else:
                place = position
            slots = cache.slots(number, spec, range(place, place + 1))
            cache.store(spec, slots, row_of(spec, tokens[: position + 1]).unsqueeze(0))
    cache.commit(number, len(tokens))


def row_of(spec: PoolSpec, tokens: Sequence[int]) -> Tensor:
    """Some bytes that follow from the tokens and the pool."""
    seed = zlib.crc32(repr((spec.name, list(tokens))).encode())
    return torch.randint(0, 120, (spec.row_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
