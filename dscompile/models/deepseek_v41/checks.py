"""Bad input, told early and plainly: what shapes and metadata show on every call, what data shows only eagerly."""

import torch
from torch import Tensor

from dscompile.models.deepseek_v41.attention import WINDOW_FORMAT
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.paged import AnyCache, PagedDeepseekV41Cache, token_limit


def check_inputs(config: DeepseekV41Config, input_ids: Tensor, positions: Tensor, cache: AnyCache) -> None:
    """TypeError or ValueError for a wrong dtype, shape or cache. Looks at metadata only: free in a graph."""
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids have dtype {input_ids.dtype}, allowed: torch.int64 or torch.int32")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions have dtype {positions.dtype}, allowed: torch.int64")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids have shape {tuple(input_ids.shape)}, allowed: [batch, tokens]")
    if positions.shape != input_ids.shape:
        raise ValueError(f"positions have shape {tuple(positions.shape)}, allowed: {tuple(input_ids.shape)}")
    batch = input_ids.shape[0]
    if input_ids.shape[1] == 0:
        raise ValueError(f"input_ids have shape {tuple(input_ids.shape)}, allowed: at least one token")
    if cache.batch_size != batch:
        raise ValueError(f"the cache is for batch size {cache.batch_size}, the input has {batch} rows")
    if input_ids.shape[1] > cache.max_tokens:
        raise ValueError(f"input_ids have {input_ids.shape[1]} tokens, the cache holds max_tokens {cache.max_tokens}")
    if len(cache.window) != config.num_hidden_layers:
        raise ValueError(f"the cache has {len(cache.window)} layers, the model {config.num_hidden_layers}")
    rings = cache.state_pages if isinstance(cache, PagedDeepseekV41Cache) else batch
    ring = (rings * config.sliding_window + 1, WINDOW_FORMAT.row_bytes(config.head_dim))
    if cache.window[0].shape != ring:
        raise ValueError(f"the cache's window pool has shape {tuple(cache.window[0].shape)}, allowed: {ring}")
    ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
    if cache.ratios != ratios:
        raise ValueError(f"the cache has KV sources and ratios {cache.ratios}, the model {ratios}")
    if bool(config.engram_layer_ids) != (cache.tokens is not None):
        raise ValueError("the cache has n-gram tokens and the model no Engram layers, or the other way round")
    if isinstance(cache, PagedDeepseekV41Cache):
        names = ("state_page", "table", "write_from") + (("first_row",) if cache.first_row is not None else ())
        for name in names:
            tensor = getattr(cache, name)
            if tensor.dtype != torch.int64 or tensor.shape[:1] != (batch,) or tensor.dim() != 1 + (name == "table"):
                shape = f"[{batch}, pages]" if name == "table" else f"[{batch}]"
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, allowed: torch.int64 {shape}")
        if cache.first_row is not None and input_ids.shape[1] < 2:
            raise ValueError("rows of 1 token with first_row, allowed: >= 2 tokens (a row of one is a decode step)")


def check_positions(positions: Tensor, cache: AnyCache) -> None:
    """ValueError for positions [B, T] that the model would treat as padding without having been told to.

    Allowed per row: p, p + 1, ... below `cache.max_tokens` (in a paged cache: that the row has pages for), then any
    number of -1. In a paged cache a request begins in one row; a row that goes on with it (`first_row`) has its pages
    and begins where the row in front of it ends, which is full. Reads data: not for compiled code.
    """
    most = token_limit(cache)
    limits = [most] * len(positions) if isinstance(most, int) else most.flatten().tolist()
    for b, (row, limit) in enumerate(zip(positions.tolist(), limits)):
        for t, position in enumerate(row):
            expected = row[0] + t
            if position == -1:
                if any(later != -1 for later in row[t:]):
                    raise ValueError(f"positions[{b}]: -1 at {t} before a token, allowed: -1 only at the end of a row")
                break
            if position >= limit:
                raise ValueError(f"positions[{b}, {t}]: {position}, allowed: < max_tokens {limit} (cache)")
            if position < 0 or position != expected:
                raise ValueError(f"positions[{b}, {t}]: {position}, allowed: {expected} (one more each token) or -1")
    if isinstance(cache, PagedDeepseekV41Cache):
        _check_rows_of_requests(positions.tolist(), cache)


def _check_rows_of_requests(positions: list[list[int]], cache: PagedDeepseekV41Cache) -> None:
    """Every request begins once, and its other rows go on with it."""
    page, table = cache.state_page.tolist(), cache.table.tolist()
    first_row = list(range(len(page))) if cache.first_row is None else cache.first_row.tolist()
    begins: dict[int, int] = {}
    for b, first in enumerate(first_row):
        if first == b:
            if page[b] >= 0 and begins.setdefault(page[b], b) != b:
                raise ValueError(f"state_page[{b}]: {page[b]}, allowed: another one than row {begins[page[b]]} has")
            continue
        if b == 0 or first != first_row[b - 1] or page[b] != page[b - 1] or table[b] != table[b - 1]:
            raise ValueError(f"first_row[{b}]: {first}, allowed: {b}, or that of row {b - 1} and of its request")
        end = positions[b - 1][-1]
        if positions[b][0] != -1 and (end == -1 or positions[b][0] != end + 1):
            allowed = "-1 (the row in front is not full)" if end == -1 else f"{end + 1} or -1"
            raise ValueError(f"positions[{b}, 0]: {positions[b][0]}, allowed: {allowed}")
