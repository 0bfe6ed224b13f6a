"""DeepSeek-V4.1 on a `PagedCache`: prefill, decoding and verification of requests by number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dscompile.kv.cache import PagedCache
from dscompile.kv.deepseek_v41_layout import MOST_TOKENS, batch_view, cache_layout, model_fingerprint, paged_cache
from dscompile.kv.rollback import restore, save
from dscompile.kv.rows import Rows, one_each, several_each, token_ids
from dscompile.models.deepseek_v41.engram_hash import BLOCKED
from dscompile.models.deepseek_v41.generate import Forward, chunk_bounds, mark_length_dynamic
from dscompile.models.deepseek_v41.model import DeepseekV41ForCausalLM

__all__ = ["MOST_TOKENS", "PagedModel", "batch_view", "cache_layout", "model_fingerprint", "paged_cache"]


class PagedModel:
    """A model and the cache that its requests are in. Requests come and go between calls.

    Every call runs a batch of `rows` rows over block tables of the same width, so that a compiled `forward` has one
    graph for decoding, one for everything longer, and one for packed batches; rows without a request are idle.
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

        A request that shares its beginning runs only the tokens that its rings need (`PageAllocator.replay_from`); its
        prompt has to begin as the one that it was opened with. Nothing may be stored in a request before.
        """
        self._check_requests(numbers)
        if not numbers:
            raise ValueError("requests [], allowed: at least one (`step` and `feed` run idle rows)")
        ids = self._token_ids(numbers, prompts)
        starts = []
        for number, prompt in zip(numbers, ids):
            request = self.cache.request(number)
            if request.length:
                raise ValueError(
                    f"request {number}: {request.length} tokens are stored, allowed: none before a prefill"
                )
            self.cache.pages.check_beginning(request, prompt)
            self._check_room(number, len(prompt))
            starts.append(self.cache.pages.replay_from(request))
        if any(starts) and all(len(prompt) - start == 1 for prompt, start in zip(ids, starts)):
            starts = [max(start - 1, 0) for start in starts]  # a call of one token is a decode step
        bounds = chunk_bounds(max(len(p) - s for p, s in zip(ids, starts)), chunk_size)
        for number, prompt, start in zip(numbers, ids, starts):
            self._seed_tail(number, prompt, start)
        last = torch.zeros(0)
        for begin, end in bounds:
            parts = [p[s + begin : min(s + end, len(p))] for p, s in zip(ids, starts)]
            logits = self._run(one_each(numbers, parts, [s + begin for s in starts]), end - begin)
            if not last.numel():
                last = logits.new_zeros(len(parts), logits.shape[-1])
            for row, part in enumerate(parts):
                if part:
                    last[row] = logits[row, len(part) - 1]
        for number, prompt in zip(numbers, ids):
            self.cache.commit(number, len(prompt))
        return last

    @torch.no_grad()
    def step(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The next tokens of requests, 1 to `MOST_TOKENS` each -> logits float32 [n, T, vocab], and they count.

        Pages are added as needed; what is refused (`OutOfPages`, ValueError) changes nothing. Without requests every
        row is idle and T is 1: what a rank without work runs where others exchange tokens with it.
        """
        self._check_requests(numbers)
        ids = self._token_ids(numbers, tokens)
        counts = [len(part) for part in ids]
        if max(counts, default=1) > MOST_TOKENS:
            raise ValueError(f"tokens per request: {counts}, allowed: 1 to {MOST_TOKENS}")
        starts = self._lengths(numbers)
        ends = [start + count for start, count in zip(starts, counts)]
        for number, end in zip(numbers, ends):
            self._check_limit(number, end)
        self.cache.extend(numbers, ends)
        width = max(counts, default=1)
        logits = self._run(one_each(numbers, ids, starts), width)
        for number, start, end in zip(numbers, starts, ends):
            self.cache.commit(number, end)
            if width == 1 and self.model.config.release_decode_keys:  # other rows than the token in a prompt has
                self.cache.pages.keep_private(number, start)
        return logits

    @torch.no_grad()
    def feed(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int) -> Tensor:
        """The next tokens of prompts, up to `width` each -> logits float32 [n, vocab] after the last of each part.

        Every call is exactly `width` tokens wide, padded: a compiled model has one graph of fixed sizes for it. Parts
        of one prompt give what `prefill` of all of it gives. Without requests every row is idle, as in `step`.
        """
        ids = self._parts(numbers, parts, width)
        for number, part in zip(numbers, ids):
            if len(part) > width:
                raise ValueError(f"request {number}: {len(part)} tokens, allowed: 1 to {width}")
        return self._feed(one_each(numbers, ids, self._lengths(numbers)), width)

    @torch.no_grad()
    def pack(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int) -> Tensor:
        """`feed` with parts of any lengths in one flat batch: `rows * width` tokens, whoever they belong to.

        A request takes as many rows as its part needs, one behind the other; only its last row is padded. ValueError
        if the parts need more rows than there are (`rows_for`).
        """
        ids = self._parts(numbers, parts, width)
        needed = sum(self.rows_for(len(part), width) for part in ids)
        if needed > self.rows:
            lengths = [len(part) for part in ids]
            raise ValueError(f"parts of {lengths} tokens, {needed} rows of {width}, allowed: {self.rows} rows")
        return self._feed(several_each(numbers, ids, self._lengths(numbers), width, self.rows), width)

    @staticmethod
    def rows_for(tokens: int, width: int) -> int:
        """Rows of `width` tokens that `pack` takes for a part."""
        return -(-tokens // width)

    def verify(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Greedy verification: each request's next token and its drafts -> the tokens that follow, one or more each.

        A draft counts if it is what the model would have chosen; the cache then holds the given token and the accepted
        drafts, as if the others had never been run.
        """
        self._check_requests(numbers)
        ids = self._token_ids(numbers, tokens)
        saved = save(self.cache, numbers, [len(part) for part in ids])
        best = self.step(numbers, ids).argmax(-1).tolist()
        out, kept = [], []
        for part, follows in zip(ids, best):
            right = 0
            while right + 1 < len(part) and part[right + 1] == follows[right]:
                right += 1
            kept.append(right + 1)
            out.append(follows[: right + 1])
        restore(self.cache, saved, kept)
        return out

    def _feed(self, rows: Rows, width: int) -> Tensor:
        logits = self._run(rows, width, dynamic=False)
        ends = {number: start + len(part) for number, part, start in zip(rows.numbers, rows.parts, rows.starts)}
        for number, end in ends.items():
            self.cache.commit(number, end)
        last = {number: row for row, number in enumerate(rows.numbers)}
        return logits[list(last.values()), [len(rows.parts[row]) - 1 for row in last.values()]]

    def _run(self, rows: Rows, width: int, dynamic: bool = True) -> Tensor:
        """A batch of `width` tokens a row -> logits [rows that are not idle, width, vocab]."""
        ids, positions = (t.to(self.cache.device) for t in rows.tensors(self.rows, width))
        if dynamic:
            mark_length_dynamic(ids, positions)
        count = len(rows.numbers)
        numbers = [*rows.numbers, *[None] * (self.rows - count)]
        return self.forward(ids, positions, batch_view(self.cache, numbers, self.columns, rows.first_rows))[:count]

    # What is refused is refused before anything is changed.

    def _check_requests(self, numbers: Sequence[int]) -> None:
        if len(numbers) > self.rows or len(set(numbers)) != len(numbers):
            raise ValueError(f"requests {list(numbers)}, allowed: up to {self.rows}, no number twice")
        for number in numbers:
            pages = len(self.cache.request(number).pages)
            if pages > self.columns:
                raise ValueError(f"request {number}: {pages} token pages, allowed: {self.columns} columns")

    def _token_ids(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        if len(numbers) != len(tokens):
            raise ValueError(f"tokens of {len(tokens)} requests, allowed: {len(numbers)}, one list for each")
        return [token_ids(n, part, self.model.config.vocab_size) for n, part in zip(numbers, tokens)]

    def _parts(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int) -> list[list[int]]:
        most = self.columns * self.cache.layout.page_tokens
        if not 2 <= width <= most:
            raise ValueError(f"width: {width}, allowed: 2 (a call of one token is a decode step) to {most}, max_tokens")
        self._check_requests(numbers)
        ids = self._token_ids(numbers, parts)
        for number, part, start in zip(numbers, ids, self._lengths(numbers)):
            self._check_room(number, start + len(part))
        return ids

    def _lengths(self, numbers: Sequence[int]) -> list[int]:
        requests = [self.cache.request(number) for number in numbers]
        for request in requests:
            if request.length < request.shared:
                raise ValueError(
                    f"request {request.number}: a shared beginning, allowed: `prefill` before anything else"
                )
        return [request.length for request in requests]

    def _check_room(self, number: int, tokens: int) -> None:
        most = min(self.cache.room(number), self.limit)
        if tokens > most:
            raise ValueError(f"request {number}: {tokens} tokens, allowed: <= {most}")

    def _check_limit(self, number: int, tokens: int) -> None:
        if tokens > self.limit:
            raise ValueError(f"request {number}: {tokens} tokens, allowed: <= {self.limit}")

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
