"""`PagedCache`: the pools of a layout as tensors, the requests in them, and where each of their rows is."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dscompile.kv.layout import CacheLayout, PoolSpec, RequestBytes
from dscompile.kv.pages import PageAllocator, Request


class BatchPages(NamedTuple):
    """The pages of the rows of a batch, as tensors on the cache's device; -1 for idle rows and beyond a request's own.

    state_page: int64 [B]. table: int64 [B, columns], token pages in order of position. write_from: int64 [B], the
    first position whose rows the request may write.
    """

    state_page: Tensor
    table: Tensor
    write_from: Tensor


class PagedCache:
    """Pools [pages * rows of a page + 1, row] and the requests that share them.

    The last row of every pool is scratch: what must not be stored may be written there. Requests are numbers, never
    used twice. A page is blanked when a request gets it, so that what its last owner left, NaN included, is not seen.
    """

    def __init__(
        self, layout: CacheLayout, requests: int, token_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.pages = PageAllocator(layout, requests, token_pages)
        self.pools: dict[str, Tensor] = {}
        for spec in layout.pools:
            count = (requests if spec.in_state else token_pages) * spec.rows
            width = spec.row_bytes // spec.dtype.itemsize
            self.pools[spec.name] = torch.full((count + 1, width), spec.blank, dtype=spec.dtype, device=self.device)
        self._published: dict[int, int] = {}
        self._tables: dict[int, Tensor] = {}
        self.imported: OrderedDict[str, None] = OrderedDict()  # ids of bundles that came in or are coming in

    # Requests

    def open(self, tokens: int, prompt: Sequence[int] | None = None, salt: bytes = b"") -> int:
        """A new request with room for `tokens` tokens -> its number. `OutOfPages` changes nothing.

        With `prompt`, pages of an equal beginning are shared (`PageAllocator.open`); `request(number).shared` says how
        many tokens are there already.
        """
        return self.adopt(self.pages.reserve(tokens, prompt, salt))

    def adopt(self, reserved: Request) -> int:
        """A request of `PageAllocator.reserve` becomes visible -> its number."""
        self._blank([reserved.state_page], in_state=True)
        self._blank(reserved.pages[reserved.shared // self.layout.page_tokens :], in_state=False)
        self._tables[reserved.number] = torch.tensor(reserved.pages, dtype=torch.int64)
        return self.pages.adopt(reserved).number

    def extend(self, numbers: Sequence[int], tokens: Sequence[int]) -> None:
        """Room for `tokens` tokens in all in each request. `OutOfPages` changes nothing in any of them."""
        missing = [
            max(self.layout.pages_for(count) - len(self.request(number).pages), 0)
            for number, count in zip(numbers, tokens, strict=True)
        ]
        self.pages.tokens.require(sum(missing))
        for number, count in zip(numbers, tokens):
            fresh = self.pages.extend(number, count)
            if fresh:
                self._blank(fresh, in_state=False)
                self._tables[number] = torch.cat((self._tables[number], torch.tensor(fresh, dtype=torch.int64)))

    def shrink(self, number: int) -> None:
        """Give back pages beyond what is stored."""
        self.pages.shrink(number)
        self._tables[number] = self._tables[number][: len(self.request(number).pages)]

    def close(self, number: int) -> None:
        """Give back everything that a request has."""
        self.pages.free(number)
        self._published.pop(number, None)
        del self._tables[number]

    def request(self, number: int) -> Request:
        """Pages and length. KeyError for a number that is not open."""
        return self.pages.get(number)

    def room(self, number: int) -> int:
        """How many tokens the request has pages for."""
        return len(self.request(number).pages) * self.layout.page_tokens

    def commit(self, number: int, length: int) -> None:
        """The first `length` tokens of a request are stored and count. ValueError if they cannot be."""
        request = self.request(number)
        length = operator.index(length)
        least = max(request.shared, self._published.get(number, 0))
        if not least <= length <= self.room(number):
            raise ValueError(f"request {number}: length {length}, allowed: {least} to {self.room(number)}")
        request.length = length

    def publish(self, number: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Let later requests that begin with `tokens` share this one's full pages; returns how many pages."""
        count = self.pages.publish(number, tokens, salt)
        self._published[number] = max(self._published.get(number, 0), count * self.layout.page_tokens)
        return count

    def bytes_of(self, number: int) -> RequestBytes:
        """What a request costs now."""
        return self.layout.bytes_for(self.request(number).length)

    # Rows

    def batch(self, numbers: Sequence[int | None], columns: int) -> BatchPages:
        """The pages of requests, None for an idle row, with room for `columns` token pages each."""
        table = torch.full((len(numbers), columns), -1, dtype=torch.int64)
        state, start = [-1] * len(numbers), [0] * len(numbers)
        for row, number in enumerate(numbers):
            if number is None:
                continue
            request = self.request(number)
            if len(request.pages) > columns:
                raise ValueError(f"request {number}: {len(request.pages)} token pages, allowed: {columns} columns")
            table[row, : len(request.pages)] = self._tables[number]
            state[row], start[row] = request.state_page, request.shared
        to = self.device
        return BatchPages(torch.tensor(state).to(to), table.to(to), torch.tensor(start).to(to))

    def slots(self, number: int, spec: PoolSpec, places: range) -> Tensor:
        """int64 [n] on the CPU: rows of a pool that hold `places`: positions of a ring, or compressed rows."""
        request = self.request(number)
        place = torch.arange(places.start, places.stop)
        if spec.in_state:
            return request.state_page * spec.rows + place % spec.rows
        return self._tables[number][place // spec.rows] * spec.rows + place % spec.rows

    def read(self, spec: PoolSpec, slots: Tensor) -> Tensor:
        """Rows int64 [n] of a pool -> bytes uint8 [n, row_bytes]."""
        pool = self.pools[spec.name]
        return pool[slots.to(pool.device)].contiguous().view(torch.uint8)

    def store(self, spec: PoolSpec, slots: Tensor, rows: Tensor) -> None:
        """Write bytes uint8 [n, row_bytes] to the rows int64 [n] of a pool; -1 stores nothing.

        IndexError for another number outside the pages, TypeError or ValueError for another shape: nothing is written.
        """
        pool = self.pools[spec.name]
        last = pool.shape[0] - 1  # the scratch row is nobody's
        if slots.dtype != torch.int64 or rows.dtype != torch.uint8:
            raise TypeError(
                f"{spec.name}: slots {slots.dtype} and rows {rows.dtype}, allowed: torch.int64, torch.uint8"
            )
        if slots.dim() != 1 or rows.shape != (len(slots), spec.row_bytes):
            given = f"slots {list(slots.shape)} and rows {list(rows.shape)}"
            raise ValueError(f"{spec.name}: {given}, allowed: [n] and [n, {spec.row_bytes}]")
        wrong = (slots < -1) | (slots >= last)
        if bool(wrong.any()):
            raise IndexError(f"{spec.name}: slot {int(slots[wrong][0])}, allowed: 0 to {last - 1}, -1 stores nothing")
        keep = slots >= 0
        pool[slots[keep].to(pool.device)] = rows[keep].contiguous().view(spec.dtype).to(pool.device)

    def state_bytes(self, number: int) -> dict[str, Tensor]:
        """Everything that decoding of a request reads, by pool, uint8 [rows, row_bytes] in order of position."""
        length = self.request(number).length
        return {s.name: self.read(s, self.slots(number, s, s.held(length))) for s in self.layout.pools}

    def _blank(self, pages: Sequence[int], in_state: bool) -> None:
        if not pages:
            return
        index = torch.tensor(pages, device=self.device)
        for spec in self.layout.pools:
            if spec.in_state == in_state:
                self.pools[spec.name][:-1].unflatten(0, (-1, spec.rows)).index_fill_(0, index, spec.blank)
