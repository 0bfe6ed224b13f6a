"""A decode rank among senders that are slow, dead or wrong: requests of the others go on, with a word about each."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dscompile.kv.bundle import _digest, export_kv
from dscompile.kv.transfer import MessageTransport, TransferError, TransferRefused
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.rank import serve_decode
from dscompile.serving.requests import Finished, Request
from dscompile.serving.senders import Refused, SenderGone
from support.serving import SECONDS, Bytes, Cut, Slow, Way, until, way


def send(way: MessageTransport, request: Request, note: dict[str, Any] | None = None) -> threading.Thread:
    """Another thread runs the prompt and sends it; what the receiver says to that is in the thread's `error`."""
    loop = PrefillLoop(Bytes(1, 1, 10), 40)
    loop.submit(request)
    (each,) = loop.step()
    return sent(way, export_kv(loop.paged.cache, each.number, each.note if note is None else note))


def send_header(way: MessageTransport, text: Any) -> None:
    """A frame with its own checksum, and in it a header of any text."""
    sent(way, SimpleNamespace(header=SimpleNamespace(id="00" * 16, to_json=lambda: text), payload=()))


def sent(way: MessageTransport, bundle: Any) -> threading.Thread:
    def work() -> None:
        try:
            way.send(bundle, SECONDS)
        except TransferError as error:
            thread.error = error  # type: ignore[attr-defined]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Rank:
    """`serve_decode` in a thread."""

    def __init__(self, ways: list[MessageTransport], timeout: float = SECONDS, rows: int = 3, **options: Any) -> None:
        self.loop, self.orders = DecodeLoop(Bytes(rows, rows, 9)), queue.Queue[Any]()
        self.told: queue.Queue[Any] = queue.Queue()
        self.failure: BaseException | None = None
        args = (self.loop, ways, self.orders, self.told.put, timeout)
        self.thread = threading.Thread(target=self._run, args=args, kwargs=options, daemon=True)
        self.thread.start()

    def _run(self, *args: Any, **options: Any) -> None:
        try:
            serve_decode(*args, **options)
        except BaseException as error:
            self.failure = error

    def word(self, kind: type) -> Any:
        word = self.told.get(timeout=SECONDS)
        assert isinstance(word, kind), word
        return word

    def end(self) -> None:
        self.orders.put(None)
        self.thread.join(SECONDS)
        assert not self.thread.is_alive() and self.failure is None and self.told.empty()
        assert self.loop.paged.cache.pages.used_bytes == 0 and not self.loop.paged.cache.pages.requests


def tokens(request: Request) -> Finished:
    return Finished(request.name, Bytes.alone(request))


def test_steps_go_on_while_a_sender_is_slow_and_it_is_heard_when_it_comes() -> None:
    slow, good, more = Request(0, (1, 2, 3), 4), Request(1, (4, 5), 6), Request(2, (6,), 5)
    (s, s_end), (g, g_end) = way(Slow), way()
    s.go = threading.Event()
    rank = Rank([s_end, g_end])
    first = send(s, slow)
    until(lambda: rank.loop.paged.cache.pages.used_bytes > 0)
    for request in (good, more):  # with the slow one's pages reserved
        send(g, request).join(SECONDS)
        assert rank.word(Finished) == tokens(request)
    assert first.is_alive()
    s.go.set()
    assert rank.word(Finished) == tokens(slow)
    rank.end()


def test_a_silent_sender_is_gone_after_the_timeout_and_the_others_are_not() -> None:
    lost, good = Request(0, (1, 2, 3), 4), Request(1, (4, 5), 6)
    (s, s_end), (g, g_end) = way(Slow), way()
    s.go = threading.Event()
    rank = Rank([s_end, g_end], timeout=0.3)
    thread = send(s, lost)
    gone = rank.word(SenderGone)
    assert gone.sender == 0 and "nothing from the sender for 0.3 s" in gone.text
    s.go.set()
    thread.join(SECONDS)
    assert isinstance(thread.error, TransferRefused) and thread.error.reason == "aborted"  # type: ignore[attr-defined]
    send(g, good).join(SECONDS)
    assert rank.word(Finished) == tokens(good)
    rank.end()


def test_the_rest_of_a_message_is_waited_for_no_longer_than_stall() -> None:
    (_, cut), (g, g_end) = way(other=Cut), way()
    rank, good = Rank([cut, g_end], stall=0.1), Request(1, (4, 5), 6)
    send(g, good).join(SECONDS)
    assert rank.word(SenderGone).sender == 0 and cut.waited == 0.1
    assert rank.word(Finished) == tokens(good)
    rank.end()


def test_a_request_that_decodes_outlives_its_sender() -> None:
    s, s_end = way()
    begun, waits, step = threading.Event(), threading.Event(), Bytes.step
    rank, request = Rank([s_end]), Request(1, (4, 5), 6)

    def slow_step(*args: Any) -> Any:
        begun.set()
        assert waits.wait(SECONDS)
        return step(rank.loop.paged, *args)

    rank.loop.paged.step = slow_step  # type: ignore[method-assign]
    send(s, request).join(SECONDS)
    assert begun.wait(SECONDS)
    s.write(b"no frame but longer than the head of one, which has a checksum", SECONDS)
    send_header(s, SimpleNamespace(encode=lambda: b"\xff"))
    until(lambda: s_end._in.qsize() == 2)
    waits.set()
    words = [rank.told.get(timeout=SECONDS) for _ in range(3)]
    assert [type(word) for word in words] == [Refused, SenderGone, Finished]
    assert words[0].reason == "damaged" and "UnicodeDecodeError" in words[1].text and words[2] == tokens(request)
    rank.end()


@pytest.mark.parametrize("change", [{"parts": [{}]}, {"more": 1}, {"length": "a"}])
def test_a_header_of_another_kind(change: dict[str, Any]) -> None:
    """With its own digest, so that nobody takes it for damage."""
    (s, s_end), (g, g_end) = way(), way()
    loop, good = PrefillLoop(Bytes(1, 1, 10), 40), Request(1, (4, 5), 6)
    loop.submit(Request(0, (1,), 2))
    (each,) = loop.step()
    data = json.loads(export_kv(loop.paged.cache, each.number, each.note).header.to_json()) | change
    del data["digest"]
    send_header(s, json.dumps({**data, "digest": _digest(data)}))
    rank = Rank([s_end, g_end])
    rank.word((SenderGone, Refused))  # type: ignore[arg-type]
    send(g, good).join(SECONDS)
    assert rank.word(Finished) == tokens(good)
    rank.end()


def test_a_bad_note_and_a_request_too_long_are_refused_and_the_sender_is_heard_again() -> None:
    s, s_end = way()
    rank, good = Rank([s_end]), Request(1, (4, 5), 6)
    for note, reason in (({"next": 1}, "format"), ({"name": 0, "next": 1, "tokens": 40}, "length")):
        thread = send(s, Request(0, (1, 2), 2), note)
        thread.join(SECONDS)
        assert thread.error.reason == reason  # type: ignore[attr-defined]
        word = rank.word(Refused)
        assert (word.sender, word.reason) == (0, reason) and "allowed" in word.text
    send(s, good).join(SECONDS)
    assert rank.word(Finished) == tokens(good)
    rank.end()


def test_what_is_left_of_a_bundle_that_was_refused_is_not_waited_for() -> None:
    """Its rows were on their way: they are passed over, and no header has to follow."""
    spoilt = [True]

    class Spoils(Way):
        def write(self, message: bytes, timeout: float) -> None:
            if message[4:5] == b"D" and spoilt:
                spoilt.clear()
                message = message[:-1]
            super().write(message, timeout)

    s, s_end = way(Spoils)
    rank, good = Rank([s_end], timeout=0.2), Request(1, (4, 5), 6)
    thread = send(s, good)
    assert rank.word(Refused).reason == "damaged"
    thread.join(SECONDS)
    assert thread.error.reason == "damaged"  # type: ignore[attr-defined]
    time.sleep(0.4)
    send(s, good).join(SECONDS)
    assert rank.word(Finished) == tokens(good)
    rank.end()


def test_a_step_that_fails_during_a_hand_over_is_no_fault_of_the_sender() -> None:
    (s, s_end), (g, g_end) = way(Slow), way()
    s.go = threading.Event()
    rank = Rank([s_end, g_end])

    def step(*_: Any) -> Any:
        raise KeyError("the model's own")

    rank.loop.paged.step = step  # type: ignore[method-assign]
    send(s, Request(0, (1, 2, 3), 4))
    until(lambda: rank.loop.paged.cache.pages.used_bytes > 0)
    send(g, Request(1, (4, 5), 6))
    rank.thread.join(SECONDS)
    assert isinstance(rank.failure, KeyError) and rank.told.empty()
    s.go.set()


def test_ranks_of_an_instance_step_together_while_one_waits_for_a_sender() -> None:
    both, said = threading.Barrier(2), {}

    def together(which: int) -> Callable[[bool, bool], tuple[bool, bool]]:
        def ask(busy: bool, going: bool) -> tuple[bool, bool]:
            said[which] = (busy, going)
            both.wait(SECONDS)
            out = any(each[0] for each in said.values()), any(each[1] for each in said.values())
            both.wait(SECONDS)
            return out

        return ask

    (s, s_end), (g, g_end) = way(Slow), way()
    s.go = threading.Event()
    ranks = [Rank([end], together=together(which)) for which, end in enumerate((s_end, g_end))]
    slow, good = Request(0, (1, 2, 3), 4), Request(1, (4, 5), 6)
    send(s, slow)
    until(lambda: ranks[0].loop.paged.cache.pages.used_bytes > 0)
    send(g, good)
    assert ranks[1].word(Finished) == tokens(good)
    for rank in ranks:  # which does not end the one that has a bundle under way
        rank.orders.put(None)
    time.sleep(0.05)
    assert all(rank.thread.is_alive() for rank in ranks)
    s.go.set()
    assert ranks[0].word(Finished) == tokens(slow)
    for rank in ranks:
        rank.end()


@pytest.mark.parametrize("options", [{"timeout": 0}, {"stall": 0}])
def test_no_time_at_all(options: dict[str, float]) -> None:
    rank = Rank([], **options)
    rank.thread.join(SECONDS)
    with pytest.raises(ValueError, match=r"timeout: .* s and stall: .* s, allowed: > 0"):
        raise rank.failure or AssertionError("nothing was raised")
