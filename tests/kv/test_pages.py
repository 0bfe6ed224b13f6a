"""Pages against a model that keeps everything: nothing lost, nothing shared that should not be, nothing half taken."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dscompile.kv.pages import OutOfPages, PageAllocator, PagePool
from support.paged import Ids, tiny_layout

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # few different tokens: beginnings often coincide


class Pages(RuleBasedStateMachine):
    """Every request's tokens are kept; a page must belong to requests whose tokens up to its end are the same."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(tiny_layout(), requests=4, token_pages=9)
        self.tokens: dict[int, Ids] = {}
        self.content: dict[int, Ids] = {}  # page -> all tokens up to its end, for pages that were published

    def snapshot(self) -> object:
        requests = {n: (r.state_page, list(r.pages), r.length, r.shared) for n, r in self.pages.requests.items()}
        pools = [(pool.available, list(pool._users)) for pool in (self.pages.state, self.pages.tokens)]
        return requests, pools

    @rule(target=requests, prompt=PROMPTS, room=st.integers(0, 12))
    def open(self, prompt: Ids, room: int) -> int:
        before = self.snapshot()
        try:
            request = self.pages.open(len(prompt) + room, prompt)
        except OutOfPages:
            assert self.snapshot() == before
            return -1
        assert request.shared < len(prompt) and request.shared % 4 == 0
        for i, page in enumerate(request.pages[: request.shared // 4]):
            assert self.content[page] == prompt[: 4 * i + 4]
        for page in request.pages[request.shared // 4 :]:
            assert self.pages.tokens.users(page) == 1
            self.content.pop(page, None)
        assert len(request.pages) == self.pages.layout.pages_for(len(prompt) + room)
        request.length = len(prompt)
        self.tokens[request.number] = list(prompt)
        return request.number

    @rule(number=requests, more=st.integers(1, 9))
    def extend(self, number: int, more: int) -> None:
        if number not in self.tokens:
            return
        before = self.snapshot()
        request = self.pages.get(number)
        try:
            fresh = self.pages.extend(number, request.length + more)
        except OutOfPages:
            assert self.snapshot() == before
            return
        for page in fresh:
            self.content.pop(page, None)
        self.tokens[number] += [2] * more
        request.length += more

    @rule(number=requests)
    def publish(self, number: int) -> None:
        if number not in self.tokens:
            return
        tokens, request = self.tokens[number], self.pages.get(number)
        for i in range(self.pages.publish(number, tokens)):
            self.content.setdefault(request.pages[i], tokens[: 4 * i + 4])

    @rule(number=requests)
    def shrink(self, number: int) -> None:
        if number in self.tokens:
            self.pages.shrink(number)
            assert len(self.pages.get(number).pages) == self.pages.layout.pages_for(len(self.tokens[number]))

    @rule(number=consumes(requests))
    def free(self, number: int) -> None:
        if self.tokens.pop(number, None) is not None:
            self.pages.free(number)
            with pytest.raises(KeyError):
                self.pages.get(number)

    @invariant()
    def counts_are_right(self) -> None:
        users = [0] * 9
        for request in self.pages.requests.values():
            for page in request.pages:
                users[page] += 1
        assert users == self.pages.tokens._users
        assert self.pages.tokens.used == sum(count > 0 for count in users)
        states = [request.state_page for request in self.pages.requests.values()]
        assert len(set(states)) == len(states) == self.pages.state.used
        layout = self.pages.layout
        used = self.pages.state.used * layout.state_page_bytes + self.pages.tokens.used * layout.token_page_bytes
        assert self.pages.used_bytes == used


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30)


def test_nothing_leaks_over_a_thousand_requests() -> None:
    pages, rng = PageAllocator(tiny_layout(), requests=7, token_pages=40), random.Random(0)
    live: Ids = []
    refused = 0
    for _ in range(1000):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        while True:
            try:
                request = pages.open(len(prompt) + rng.randrange(8), prompt)
                break
            except OutOfPages:
                refused += 1
                pages.free(live.pop(rng.randrange(len(live))))
        request.length = len(prompt)
        if rng.random() < 0.5:
            pages.publish(request.number, prompt)
        live.append(request.number)
    assert refused and pages.requests.keys() == set(live)
    for number in live:
        pages.free(number)
    assert (pages.state.used, pages.tokens.used, pages.used_bytes) == (0, 0, 0)
    assert pages.state.available == 7 and pages.tokens.available == 40
    pages.tokens.forget()
    assert sorted(pages.tokens.take(40)) == list(range(40))


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    pages = PageAllocator(tiny_layout(), requests=2, token_pages=3)
    first = pages.open(5)
    assert not pages.fits(5) and pages.fits(4)
    with pytest.raises(OutOfPages, match="2 token pages needed, 1 of 3 available"):
        pages.open(5)
    with pytest.raises(OutOfPages, match="2 token pages needed"):
        pages.extend(first.number, 13)
    assert (pages.state.used, pages.tokens.used, len(first.pages)) == (1, 2, 2)
    pages.open(1)
    with pytest.raises(OutOfPages, match="1 state pages needed, 0 of 2 available"):
        pages.open(1)
    assert pages.tokens.used == 3


def test_kept_pages_do_not_count_twice() -> None:
    """What a request shares cannot also be what makes room for the rest of it."""
    pages = PageAllocator(tiny_layout(), requests=2, token_pages=3)
    first = pages.open(12)
    first.length = 12
    prompt = list(range(12))
    pages.publish(first.number, prompt)
    pages.free(first.number)
    assert pages.tokens.available == 3
    with pytest.raises(OutOfPages):
        pages.open(16, [*prompt, 1])
    assert pages.open(12, prompt).shared == 8, "never the page of the last token"


def test_beginnings_that_differ_are_not_shared() -> None:
    pages = PageAllocator(tiny_layout(), requests=4, token_pages=20)
    first = pages.open(9)
    first.length = 9
    pages.publish(first.number, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pages.open(9, [1, 2, 3, 4, 5, 6, 7, 8, 0]).shared == 8
    assert pages.open(9, [0, 2, 3, 4, 5, 6, 7, 8, 9]).shared == 0, "the second page depends on the first"
    assert pages.open(9, [1, 2, 3, 4, 5, 6, 7, 8, 9], salt=b"another image").shared == 0


def test_refusals() -> None:
    pages = PageAllocator(tiny_layout(), requests=1, token_pages=4)
    with pytest.raises(ValueError, match="tokens: 0, allowed: >= 1"):
        pages.open(0)
    with pytest.raises(ValueError, match="prompt of 3 tokens, allowed: <= 2"):
        pages.open(2, [1, 2, 3])
    with pytest.raises(KeyError, match="request 5"):
        pages.free(5)
    request = pages.open(4)
    with pytest.raises(ValueError, match="4 tokens, allowed: <= 0"):
        pages.publish(request.number, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="token page 3, allowed: a page in use"):
        pages.tokens.give_back([3])
    with pytest.raises(ValueError, match="state pages: 0"):
        PagePool("state", 0, 1)
