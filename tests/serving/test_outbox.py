"""What receivers refuse, for now and for good, and the way of such a request out of its prefill rank."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from dscompile.kv.bundle import KVBundle, export_kv
from dscompile.kv.memory_transport import SharedMemoryTransport
from dscompile.kv.transfer import TransferError, TransferRefused
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.outbox import Outbox
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.rank import Left, serve_decode, serve_prefill
from dscompile.serving.requests import Failed, Finished, Request
from dscompile.serving.senders import Refused
from support.serving import SECONDS, Bytes, until


class Says:
    """A receiver's answers to one bundle after the other: None takes it, "" is no answer. Then it takes all."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.got: list[int] = []

    def send(self, bundle: KVBundle, timeout: float) -> None:
        answer = self.answers.pop(0) if self.answers else None
        if answer == "":
            raise TransferError("no answer from the receiver in 2 s")
        if answer is not None:
            raise TransferRefused(answer, f"{answer}: 7, allowed: 6")
        self.got.append(bundle.header.note["name"])

    def receive(self, *_: Any) -> int:
        raise NotImplementedError

    close = receive


def bundles(count: int) -> list[KVBundle]:
    cache = Bytes(1, 1, 2).cache
    number = cache.open(1)
    cache.commit(number, 1)
    return [export_kv(cache, number, {"name": name, "next": 1, "tokens": 2}) for name in range(count)]


def through(receivers: Sequence[Says], count: int) -> tuple[list[int], list[Failed], Outbox]:
    """That many bundles -> names that arrived, those that failed."""
    outbox, arrived, failed = Outbox(receivers, SECONDS, pause=0.001), list[int](), list[Failed]()
    for bundle in bundles(count):
        outbox.put(bundle)
    try:
        until(lambda: arrived.extend(outbox.arrived()) or failed.extend(outbox.failed()) or outbox.pending == 0)
    finally:
        outbox.close()
    return arrived + outbox.arrived(), failed + outbox.failed(), outbox


def test_what_all_refuse_for_good_is_given_up_and_the_rest_arrives() -> None:
    few, other = Says("length"), Says("pages", "format")
    arrived, failed, outbox = through([few, other], 3)
    assert arrived == [1, 2] and sorted(few.got + other.got) == [1, 2]
    assert (outbox.sent.bundles, outbox.sent.refused, outbox.sent.failed) == (2, 1, 1)
    (lost,) = failed
    assert (lost.name, lost.reason) == (0, "format, length")
    said = ["receiver 0: the receiver refused: length", "receiver 1: the receiver refused: format"]
    assert lost.text == "; ".join(f"{each}: 7, allowed: 6" for each in said)


def test_what_one_refuses_for_good_waits_for_the_other() -> None:
    few, many = Says("length"), Says("pages", "pages", "pages")
    arrived, failed, _ = through([few, many], 2)
    assert arrived == [0, 1] and not failed and many.got[0] == 0 and not few.answers


def test_a_bundle_that_was_spoilt_on_its_way_is_tried_again_but_not_for_ever() -> None:
    assert through([Says("damaged", "truncated")], 1)[:2] == ([0], [])
    arrived, failed, _ = through([Says("damaged", "damaged", "damaged")], 2)
    assert arrived == [1] and [(each.name, each.reason) for each in failed] == [(0, "damaged")]


@pytest.mark.parametrize("answer", ["aborted", ""])
def test_a_receiver_that_gave_up_or_does_not_answer_is_not_asked_again(answer: str) -> None:
    gone, other = Says(answer), Says("pages")
    arrived, failed, _ = through([gone, other], 3)
    assert arrived == other.got == [0, 1, 2] and not failed and not gone.got
    with pytest.raises(RuntimeError, match="a hand-over failed") as error:
        through([Says(answer)], 1)
    assert "none of 1 receivers listens any more: receiver 0: " in str(error.value.__cause__)


def test_a_name_that_was_aborted_may_come_again() -> None:
    first, again = bundles(1) + bundles(1)
    receiver = Says(*["pages"] * 20)
    outbox, arrived = Outbox([receiver], SECONDS, pause=0.01), list[int]()
    outbox.put(first)
    outbox.abort(0)
    until(lambda: arrived.extend(outbox.arrived()) or arrived == [0])
    assert not receiver.got
    receiver.answers.clear()
    outbox.put(again)
    until(lambda: arrived.extend(outbox.arrived()) or arrived == [0, 0])
    assert receiver.got == [0]
    outbox.close()


def test_ranks_with_unlike_limits() -> None:
    """One prefill rank; of two decode ranks one holds 12 tokens, one 36. Requests that cannot be run or held end."""
    prefill, decodes = PrefillLoop(Bytes(2, 4, 16), chunk=4), [DecodeLoop(Bytes(2, 2, pages)) for pages in (3, 9)]
    orders: list[queue.Queue[Any]] = [queue.Queue() for _ in range(3)]
    told: queue.Queue[Any] = queue.Queue()
    ends = [SharedMemoryTransport.create(1 << 14) for _ in decodes]
    ways = [SharedMemoryTransport.attach(each.name) for each in ends]
    outbox = Outbox(ways, SECONDS, pause=0.002)
    threads = [threading.Thread(target=serve_prefill, args=(prefill, outbox, orders[0], told.put), daemon=True)]
    threads += [
        threading.Thread(target=serve_decode, args=(loop, [end], order, told.put, SECONDS), daemon=True)
        for loop, end, order in zip(decodes, ends, orders[1:])
    ]
    # 11 tokens to store, too many for both, too many for one, a prompt too long, and short ones behind them
    asked = [Request(0, (1,) * 8, 4), Request(1, (2,) * 8, 40), Request(2, (3,) * 8, 20), Request(3, (4,) * 65, 2)]
    asked += [Request(name, (name, 5), 4) for name in range(4, 8)]
    for request in (*asked, Request(0, (1,) * 8, 4)):
        orders[0].put(request)
    for thread in threads:  # only now, so that the last one comes while the one of its name is there
        thread.start()
    words: list[Any] = []
    while sum(isinstance(word, Finished | Failed) for word in words) < 9:
        words.append(told.get(timeout=SECONDS))
    for each in orders:
        each.put(None)
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    while not told.empty():  # a request may be finished before its prefill rank says that it has left
        words.append(told.get())
    outbox.close()
    for end in (*ways, *ends):
        end.close()
    failed = [(word.name, word.reason) for word in words if isinstance(word, Failed)]
    assert sorted(failed) == [(0, "duplicate"), (1, "length"), (3, "length")]
    (one,) = [word for word in words if isinstance(word, Failed) and word.name == 1]
    assert "are 47 to store, allowed: <= 12" in one.text and "allowed: <= 36" in one.text
    assert {word.name: word.tokens for word in words if isinstance(word, Finished)} == {
        each.name: Bytes.alone(each) for each in asked if each.name not in (1, 3)
    }
    assert sorted(word.name for word in words if isinstance(word, Left)) == list(range(8))
    assert {word.reason for word in words if isinstance(word, Refused)} == {"length"}
    for loop in (prefill, *decodes):
        assert loop.paged.cache.pages.used_bytes == 0
