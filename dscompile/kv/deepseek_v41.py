"""DeepSeek-V4.1 on a `PagedCache`: its layout, and prefill, decoding and verification of requests by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from dscompile.kv.cache import PagedCache
from dscompile.kv.layout import INT64, CacheLayout, PoolSpec, fingerprint
from dscompile.kv.rollback import restore, save
from dscompile.models.deepseek_v41.attention import COMPRESSED_FORMAT, WINDOW_FORMAT
from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.engram_hash import BLOCKED
from dscompile.models.deepseek_v41.generate import Forward, chunk_bounds, mark_length_dynamic
from dscompile.models.deepseek_v41.indexer import INDEX_FORMAT
from dscompile.models.deepseek_v41.model import DeepseekV41ForCausalLM
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


class PagedModel:
    """A model and the cache that its requests are in. Requests come and go between calls.

    Every call runs a batch of `rows` rows over block tables of the same width, so that a compiled `forward` has one
    graph for decoding and one for everything longer; rows without a request are idle.
    """

    def __init__(
        self,
        model: DeepseekV41ForCausalLM,
        cache: PagedCache,
        rows: int,
        max_tokens: int,
        forward: Forward | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows: {rows}, allowed: >= 1")
        wanted = model_fingerprint(model.config, cache.layout.revision)
        if cache.layout.model != wanted:
            raise ValueError(f"cache of model {cache.layout.model}, allowed: {wanted}, the model's own")
        self.model, self.cache, self.rows = model, cache, rows
        self.columns = cache.layout.pages_for(max_tokens)
        self.forward: Forward = model if forward is None else forward

    @property
    def limit(self) -> int:
        """Tokens that a request may have, whatever pages are free."""
        pages = min(self.columns, self.cache.pages.tokens.pages)
        return min(pages * self.cache.layout.page_tokens, self.model.config.max_position_embeddings)

    @torch.no_grad()
    def prefill(
        self, numbers: Sequence[int], prompts: Sequence[Sequence[int]], chunk_size: int | None = None
    ) -> Tensor:
        """Run whole prompts of open requests -> logits float32 [n, vocab] after the last token of each.

        A request that shares its beginning runs only the tokens that its rings need (`PageAllocator.replay_from`).
        """
        self._check_requests(numbers)
        starts = []
        for number, prompt in zip(numbers, prompts, strict=True):
            if not prompt:
                raise ValueError(f"request {number}: prompt of 0 tokens, allowed: >= 1")
            self._check_room(number, len(prompt))
            starts.append(self.cache.pages.replay_from(self.cache.request(number)))
            self._seed_tail(number, prompt, starts[-1])
        width = max(len(prompt) - start for prompt, start in zip(prompts, starts))
        last: Tensor | None = None
        for begin, end in chunk_bounds(width, chunk_size):
            parts = [list(p[s + begin : min(s + end, len(p))]) for p, s in zip(prompts, starts)]
            logits = self._run(numbers, parts, [s + begin for s in starts], end - begin)
            for row, part in enumerate(parts):
                if part:
                    last = logits.new_zeros(len(parts), logits.shape[-1]) if last is None else last
                    last[row] = logits[row, len(part) - 1]
        for number, prompt in zip(numbers, prompts, strict=True):
            self.cache.commit(number, len(prompt))
        assert last is not None
        return last

    @torch.no_grad()
    def step(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The next tokens of requests, 1 to `MOST_TOKENS` each -> logits float32 [n, T, vocab], and they count.

        Pages are added as needed; `OutOfPages` changes nothing. Without requests every row is idle and T is 1: what a
        rank without work runs where others exchange tokens with it.
        """
        counts = [len(part) for part in tokens]
        if not all(1 <= count <= MOST_TOKENS for count in counts):
            raise ValueError(f"tokens per request: {counts}, allowed: 1 to {MOST_TOKENS}")
        self._check_requests(numbers)
        starts = [self.cache.request(number).length for number in numbers]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self.cache.extend(numbers, ends)
        for number, end in zip(numbers, ends):
            self._check_room(number, end)
        logits = self._run(numbers, [list(part) for part in tokens], starts, max(counts, default=1))
        for number, end in zip(numbers, ends):
            self.cache.commit(number, end)
        return logits

    @torch.no_grad()
    def feed(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int) -> Tensor:
        """The next tokens of prompts, up to `width` each -> logits float32 [n, vocab] after the last of each part.

        Every call is exactly `width` tokens wide, padded: a compiled model has one graph of fixed sizes for it. Parts
        of one prompt give what `prefill` of all of it gives. Without requests every row is idle, as in `step`.
        """
        for number, part in zip(numbers, parts, strict=True):
            if len(part) > width:
                raise ValueError(f"request {number}: {len(part)} tokens, allowed: 1 to {width}")
        return self._feed(numbers, parts, width, packed=False)

    @torch.no_grad()
    def pack(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int) -> Tensor:
        """`feed` with parts of any lengths in one flat batch: `rows * width` tokens, whoever they belong to.

        A request takes as many rows as its part needs, one behind the other; only its last row is padded. ValueError
        if the parts need more rows than there are (`rows_for`).
        """
        needed = sum(self.rows_for(len(part), width) for part in parts)
        if needed > self.rows:
            lengths = [len(part) for part in parts]
            raise ValueError(f"parts of {lengths} tokens, {needed} rows of {width}, allowed: {self.rows} rows")
        return self._feed(numbers, parts, width, packed=True)

    @staticmethod
    def rows_for(tokens: int, width: int) -> int:
        """Rows of `width` tokens that `pack` takes for a part."""
        return -(-tokens // width)

    def _feed(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int, packed: bool) -> Tensor:
        if width < 2:
            raise ValueError(f"width: {width}, allowed: >= 2 (a call of one token is a decode step)")
        self._check_requests(numbers)
        starts = [self.cache.request(number).length for number in numbers]
        for number, part, start in zip(numbers, parts, starts, strict=True):
            if not part:
                raise ValueError(f"request {number}: 0 tokens, allowed: >= 1")
            if self.cache.request(number).shared:
                raise ValueError(f"request {number}: a shared beginning, allowed: `prefill` for such requests")
            self._check_room(number, start + len(part))
        cut = [range(0, len(part), width) for part in parts]
        owners = [row for row, places in enumerate(cut) for _ in places]
        logits = self._run(
            [numbers[row] for row in owners],
            [list(part[at : at + width]) for part, places in zip(parts, cut) for at in places],
            [start + at for start, places in zip(starts, cut) for at in places],
            width,
            dynamic=False,
            first_rows=[owners.index(row) for row in owners] if packed else None,
        )
        for number, part, start in zip(numbers, parts, starts):
            self.cache.commit(number, start + len(part))
        rows = [len(owners) - 1 - owners[::-1].index(row) for row in range(len(parts))]
        last = [(len(part) - 1) % width for part in parts]
        return logits[rows, last]

    def verify(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Greedy verification: each request's next token and its drafts -> the tokens that follow, one or more each.

        A draft counts if it is what the model would have chosen; the cache then holds the given token and the accepted
        drafts, as if the others had never been run.
        """
        saved = save(self.cache, numbers, [len(part) for part in tokens])
        best = self.step(numbers, tokens).argmax(-1).tolist()
        out, kept = [], []
        for part, follows in zip(tokens, best):
            right = 0
            while right + 1 < len(part) and part[right + 1] == follows[right]:
                right += 1
            kept.append(right + 1)
            out.append(follows[: right + 1])
        restore(self.cache, saved, kept)
        return out

    def _run(
        self,
        numbers: Sequence[int],
        parts: list[list[int]],
        starts: list[int],
        width: int,
        dynamic: bool = True,
        first_rows: list[int] | None = None,
    ) -> Tensor:
        """A batch of `width` tokens a row -> logits [len(numbers), width, vocab]; `first_rows` as in `batch_view`."""
        ids = torch.zeros(self.rows, width, dtype=torch.int64)
        positions = torch.full((self.rows, width), -1, dtype=torch.int64)
        for row, (part, start) in enumerate(zip(parts, starts)):
            if part:
                ids[row, : len(part)] = torch.tensor(part)
                positions[row, : len(part)] = torch.arange(start, start + len(part))
        ids, positions = ids.to(self.cache.device), positions.to(self.cache.device)
        if dynamic:
            mark_length_dynamic(ids, positions)
        idle = range(len(numbers), self.rows)
        if first_rows is not None:
            first_rows = [*first_rows, *idle]
        view = batch_view(self.cache, [*numbers, *(None for _ in idle)], self.columns, first_rows)
        return self.forward(ids, positions, view)[: len(numbers)]

    def _check_requests(self, numbers: Sequence[int]) -> None:
        if len(numbers) > self.rows or len(set(numbers)) != len(numbers):
            raise ValueError(f"requests {list(numbers)}, allowed: up to {self.rows}, no number twice")

    def _check_room(self, number: int, tokens: int) -> None:
        most = min(self.cache.room(number), self.limit)
        if tokens > most:
            raise ValueError(f"request {number}: {tokens} tokens, allowed: <= {most}")

    def _seed_tail(self, number: int, prompt: Sequence[int], start: int) -> None:
        """The token ids before `start`, which a replay does not run."""
        spec = next((spec for spec in self.cache.layout.pools if spec.part == "tokens"), None)
        if spec is None or start == 0:
            return
        places = range(max(start - spec.width, 0), start)
        ids = torch.tensor(prompt[places.start : places.stop], device=self.model.token_map.device)
        compressed = self.model.token_map[ids]
        if self.model.config.image_token_id is not None:
            compressed = torch.where(ids == self.model.config.image_token_id, BLOCKED, compressed)
        rows = compressed.to("cpu").unsqueeze(1).contiguous().view(torch.uint8)
        self.cache.store(spec, self.cache.slots(number, spec, places), rows)
