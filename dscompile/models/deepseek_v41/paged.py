"""The cache of a batch in pages: pools that many requests share, and where this batch's rows are in them.

`DeepseekV41Cache` gives sequence b the b-th run of every pool. Here a block table says which pages each row of the
batch has, as a tensor: one graph serves every assignment, and requests join and leave between calls. `dscompile.kv`
allocates the pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dscompile.models.deepseek_v41.cache import DeepseekV41Cache
from dscompile.models.deepseek_v41.plan import (
    Pages,
    clean_positions,
    joined_positions,
    known_rows,
    page_rows,
    read_rows,
)


class PagedDeepseekV41Cache(NamedTuple):
    """Pools by layer, each [pages * rows of a page + one scratch row], and the pages of a batch.

    A state page is what a request has once: its ring of `sliding_window` rows in every layer, its open groups and its
    last token ids. A token page holds the compressed rows and index keys of `page_tokens` tokens, in every KV source.

    Attributes:
        window: every layer's rings, uint8 [state pages * W + 1, row_bytes].
        compressed: every KV source's rows, uint8 [token pages * (page_tokens / ratio) + 1, row_bytes].
        index_keys: every KV source's index keys, the same rows.
        open_groups: every KV source's last tokens (kv, then gate), float32 [state pages * rows + 1, 2 * D], rows >=
            ratio - 1; sources with ratio 1 have none.
        tokens: the last compressed token ids, int64 [state pages * rows + 1, 1], rows >= n-gram - 1; None without
            Engram.
        state_page: int64 [B], -1 = none.
        table: int64 [B, P], the token pages of each row in order of position, -1 = none.
        write_from: int64 [B]; compressed rows and keys of earlier tokens are not written (they may be shared).
        ratios: tokens per row of every KV source.
        state_pages: how many there are.
        token_pages: how many there are.
        page_tokens: a multiple of every ratio.
        first_row: int64 [B], which row of the batch a row's request begins with. A request may have several rows of T
            tokens, one behind the other, all but the last full. None: every row is a request of its own.
    """

    window: dict[int, Tensor]
    compressed: dict[int, Tensor]
    index_keys: dict[int, Tensor]
    open_groups: dict[int, Tensor]
    tokens: Tensor | None
    state_page: Tensor
    table: Tensor
    write_from: Tensor
    ratios: dict[int, int]
    state_pages: int
    token_pages: int
    page_tokens: int
    first_row: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.table.shape[0]

    @property
    def max_tokens(self) -> int:
        """Positions that the block table has room for; a row's own limit is what it has pages for."""
        return self.table.shape[1] * self.page_tokens


AnyCache = DeepseekV41Cache | PagedDeepseekV41Cache


def token_limit(cache: AnyCache) -> int | Tensor:
    """Positions below this can be stored: a number, or int64 [B, 1] where each row has its own pages."""
    if not isinstance(cache, PagedDeepseekV41Cache):
        return cache.max_tokens
    pages = (cache.table >= 0).long().cumprod(1).sum(1, keepdim=True)
    return torch.where(cache.state_page.unsqueeze(1) >= 0, pages * cache.page_tokens, 0)


def stored_positions(positions: Tensor, cache: AnyCache) -> Tensor:
    """int64 [B, T] -> the same with -1 for every token that must not be stored or attended to."""
    limit = token_limit(cache)
    if isinstance(limit, int) or not isinstance(cache, PagedDeepseekV41Cache) or cache.first_row is None:
        return clean_positions(positions, limit)
    return joined_positions(positions, limit, cache.first_row, cache.state_page)


def ring_pages(cache: AnyCache, pool: Tensor) -> Pages | None:
    """Where the rings of the batch are in `pool`; None for the order of the batch."""
    if not isinstance(cache, PagedDeepseekV41Cache):
        return None
    rows = (pool.shape[0] - 1) // cache.state_pages
    first_row = None if cache.first_row is None else known_rows(cache.first_row)
    return Pages(cache.state_page, rows, pool.shape[0] - 1, first_row)


def group_rows(cache: AnyCache, ratio: int) -> Tensor | None:
    """int64 [B, capacity]: the pool's row of every group of `ratio` tokens; None for the order of the batch."""
    if not isinstance(cache, PagedDeepseekV41Cache):
        return None
    rows = cache.page_tokens // ratio
    return page_rows(cache.table, rows, cache.token_pages * rows)


def sequence_rows(pool: Tensor, batch: int, rows: Tensor | None = None) -> Tensor:
    """Pool [S, R] -> [B, capacity, R]: a view without its scratch row, or a gather of `rows` int64 [B, capacity]."""
    return pool[:-1].unflatten(0, (batch, -1)) if rows is None else read_rows(pool, rows)


def selected_rows(pool: Tensor, indices: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pool [S, R], the index list int64 [B, T, K] (-1 = none) -> rows [B, C, R] and the same list into them.

    A single token of a paged cache gathers the K rows of its list and no others; all else reads every row.
    """
    batch, length, picks = indices.shape
    if rows is None or length > 1:
        return sequence_rows(pool, batch, rows), indices
    chosen = indices.squeeze(1)
    picked = read_rows(pool, rows.gather(1, chosen.clamp(min=0)))
    return picked, torch.where(indices >= 0, torch.arange(picks, device=indices.device), -1)
