"""Which request has which pages: numbers only, no tensors.

A request has one state page and a list of token pages. Everything is checked before anything is taken, so that a
request that does not fit changes nothing (`OutOfPages`): the caller waits and asks again.

Token pages that are full can be shared by requests with the same beginning, found by a hash of all tokens up to the end
of the page: a compressed row depends on every token before it. They are counted, and given back when the last request
that has them goes; then they stay findable until their place is needed. State pages are never shared: a ring is
overwritten by every token that its request decodes, and its rows go out of date 128 tokens later. After a prefix was
found, the last tokens before its end are run again instead (`replay_from`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dscompile.kv.layout import CacheLayout


class OutOfPages(RuntimeError):
    """There are not enough free pages now; nothing was taken. Free a request, or wait until another one is done."""


class PagePool:
    """Numbered pages with a count of users each.

    A page is free, used (by one or more requests), or kept: used by nobody, but findable by its key until it is needed.
    """

    def __init__(self, name: str, pages: int, page_bytes: int) -> None:
        if pages < 1:
            raise ValueError(f"{name} pages: {pages}, allowed: >= 1")
        self.name, self.pages, self.page_bytes = name, pages, page_bytes
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def available(self) -> int:
        """Pages that can be taken: free and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """Pages that some request has."""
        return self.pages - self.available

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that some request has, shared ones once."""
        return self.used * self.page_bytes

    def users(self, page: int) -> int:
        """How many requests have `page`."""
        return self._users[page]

    def require(self, count: int, sharing: Sequence[int] = ()) -> None:
        """OutOfPages unless `count` pages can be taken while the pages `sharing` are kept from it."""
        available = self.available - sum(page in self._kept for page in sharing)
        if count > available:
            raise OutOfPages(f"{count} {self.name} pages needed, {available} of {self.pages} available")

    def take(self, count: int) -> list[int]:
        """`count` pages for one user. OutOfPages takes none."""
        self.require(count)
        taken = []
        for _ in range(count):
            if not self._free:
                page, _ = self._kept.popitem(last=False)
                self._page_of.pop(self._key_of.pop(page))
                self._free.append(page)
            page = self._free.pop()
            self._users[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more user for each of `pages`, which `find` returned."""
        for page in pages:
            self._kept.pop(page, None)
            self._users[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One user less for each of `pages`. ValueError for a page that nobody has."""
        for page in pages:
            if not 0 <= page < self.pages or self._users[page] < 1:
                raise ValueError(f"{self.name} page {page}, allowed: a page in use")
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Make `page` findable by `key`; the first page with a key stays the one that is found."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning of `keys` that is there."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def forget(self) -> None:
        """No page is findable any more; kept ones are free."""
        self._free += self._kept
        self._kept.clear()
        self._page_of.clear()
        self._key_of.clear()


@dataclass
class Request:
    """The pages of one request. `length` is how many tokens are stored; `shared` of them lie in shared pages.

    `note` is what its bundle said, of a request that was handed over. `beginning` are the keys of its shared pages, and
    `salt` is what they were made with.
    Tokens from `private` on are not published: their rows are not those that a prompt would give.
    """

    number: int
    state_page: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    shared: int = 0
    note: dict[str, Any] = field(default_factory=dict)
    salt: bytes = b""
    beginning: tuple[bytes, ...] = ()
    private: int | None = None


class PageAllocator:
    """State pages and token pages of a cache, and the requests that have them."""

    def __init__(self, layout: CacheLayout, requests: int, token_pages: int) -> None:
        self.layout = layout
        self.state = PagePool("state", requests, layout.state_page_bytes)
        self.tokens = PagePool("token", token_pages, layout.token_page_bytes)
        self.requests: dict[int, Request] = {}
        self._next = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages that some request has."""
        return self.state.used_bytes + self.tokens.used_bytes

    def fits(self, tokens: int) -> bool:
        """Whether a new request of `tokens` tokens would get its pages now, without help of a shared beginning."""
        return self.state.available >= 1 and self.tokens.available >= self.layout.pages_for(tokens)

    def open(self, tokens: int, prompt: Sequence[int] | None = None, salt: bytes = b"") -> Request:
        """`reserve` and `adopt` in one."""
        return self.adopt(self.reserve(tokens, prompt, salt))

    def reserve(self, tokens: int, prompt: Sequence[int] | None = None, salt: bytes = b"") -> Request:
        """Pages with room for `tokens` tokens, not yet a request: `adopt` or `cancel` it. OutOfPages changes nothing.

        `prompt`: its first tokens; whole pages of them that are there already are shared, but never the last token,
        whose logits somebody will want. `salt` sets apart what token ids do not tell, such as images.
        """
        pages = self.layout.pages_for(tokens)
        if tokens < 1:
            raise ValueError(f"tokens: {tokens}, allowed: >= 1")
        found: list[int] = []
        keys: list[bytes] = []
        if prompt is not None:
            if len(prompt) > tokens:
                raise ValueError(f"prompt of {len(prompt)} tokens, allowed: <= {tokens}, the room asked for")
            keys = self.keys(prompt[:-1], salt)
            found = self.tokens.find(keys)
        fresh = pages - len(found)
        self.state.require(1)
        self.tokens.require(fresh, found)
        self.tokens.share(found)
        request = Request(self._next, self.state.take(1)[0], found + self.tokens.take(fresh))
        request.shared, request.salt = len(found) * self.layout.page_tokens, salt
        request.beginning = tuple(keys[: len(found)])
        self._next += 1
        return request

    def adopt(self, request: Request) -> Request:
        """What `reserve` returned is a request from now on."""
        self.requests[request.number] = request
        return request

    def cancel(self, request: Request) -> None:
        """Give back what `reserve` took."""
        self.state.give_back([request.state_page])
        self.tokens.give_back(request.pages)

    def extend(self, number: int, tokens: int) -> list[int]:
        """Room for `tokens` tokens in all; returns the pages that are new. OutOfPages changes nothing."""
        request = self.get(number)
        fresh = self.tokens.take(max(self.layout.pages_for(tokens) - len(request.pages), 0))
        request.pages += fresh
        return fresh

    def shrink(self, number: int) -> None:
        """Give back pages beyond the request's length."""
        request = self.get(number)
        keep = max(self.layout.pages_for(request.length), request.shared // self.layout.page_tokens)
        self.tokens.give_back(request.pages[keep:])
        del request.pages[keep:]

    def free(self, number: int) -> None:
        """Give back all pages of a request; its number is never used again."""
        request = self.get(number)
        del self.requests[number]
        self.cancel(request)

    def get(self, number: int) -> Request:
        """The request. KeyError for one that is not there."""
        if number not in self.requests:
            raise KeyError(f"request {number}, allowed: one of {sorted(self.requests)}")
        return self.requests[number]

    def publish(self, number: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Make the full pages of a request findable by its first `tokens`, all stored; returns how many there are.

        Pages with tokens from `keep_private` on are left out.
        """
        request = self.get(number)
        if len(tokens) > request.length:
            raise ValueError(f"request {number}: {len(tokens)} tokens, allowed: <= {request.length}, what is stored")
        keys = self.keys(tokens[: request.private], salt)
        for page, key in zip(request.pages, keys):
            self.tokens.publish(page, key)
        return len(keys)

    def keep_private(self, number: int, start: int) -> None:
        """Rows of tokens from `start` on are not those that the same tokens in a prompt would give."""
        request = self.get(number)
        request.private = start if request.private is None else min(request.private, start)

    def check_beginning(self, request: Request, prompt: Sequence[int]) -> None:
        """ValueError unless `prompt` goes beyond the pages that the request shares, and begins as they do."""
        if request.shared and len(prompt) <= request.shared:
            raise ValueError(
                f"request {request.number}: prompt of {len(prompt)} tokens, allowed: > {request.shared}, what it shares"
            )
        if tuple(self.keys(prompt[: request.shared], request.salt)) != request.beginning:
            raise ValueError(
                f"request {request.number}: another prompt than it was opened with, allowed: the same "
                f"first {request.shared} tokens, whose pages it shares"
            )

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """One key per full page of `tokens`: a hash of all tokens up to its end."""
        size = self.layout.page_tokens
        key, out = hashlib.blake2b(self.layout.model.encode() + salt, digest_size=16).digest(), []
        for start in range(0, len(tokens) - size + 1, size):
            page = array("q", tokens[start : start + size]).tobytes()
            key = hashlib.blake2b(key + page, digest_size=16).digest()
            out.append(key)
        return out

    def replay_from(self, request: Request) -> int:
        """Where a prefill starts that finds `request.shared` tokens in pages, so that every ring ends up exact.

        A window row of the last layer depends on `window - 1` tokens before it in every layer below.
        """
        return max(0, request.shared - self.layout.layers * max(self.layout.window - 1, 0))
