"""The same bundle is sent again after a try that was given up: what is left of that one changes nothing."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dscompile.kv.bundle import BundleRefused, KVBundle, export_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.memory_transport import SharedMemoryTransport
from dscompile.kv.pages import OutOfPages
from dscompile.kv.transfer import MessageTransport, TransferError, TransferRefused
from support.paged import tiny_layout
from support.transfers import both, queue_pair, stored_request

SECONDS = 10.0  # for what should go well
Ends = tuple[MessageTransport, MessageTransport]


@pytest.fixture(params=["queue", "memory"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "queue":
        yield queue_pair()
        return
    here = SharedMemoryTransport.create(4096)
    there = SharedMemoryTransport.attach(here.name)
    yield there, here
    there.close()
    here.close()


def empty(token_pages: int = 40) -> PagedCache:
    return PagedCache(tiny_layout(), requests=3, token_pages=token_pages)


def bundle_of(length: int = 40) -> KVBundle:
    return export_kv(*stored_request(length))


def outcomes(call: Any, times: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(times):
        try:
            out.append(call())
        except (TransferError, BundleRefused, OutOfPages) as error:
            out.append(error)
    return out


@pytest.mark.parametrize("alone", [0, 1])
def test_nobody_received_the_first_try(ends: Ends, alone: int) -> None:
    """`alone`: the receiver answered that try, and gave it up, before the sender tried again."""
    (out, back), bundle, mine = ends, bundle_of(), empty()
    with pytest.raises(TransferError):
        out.send(bundle, 0.02)
    got = outcomes(lambda: back.receive(mine, 0.05), alone)
    assert all(isinstance(each, TransferError) for each in got)
    sent, got = both(
        lambda: outcomes(lambda: out.send(bundle, SECONDS), 2), lambda: outcomes(lambda: back.receive(mine, SECONDS), 2)
    )
    got += outcomes(lambda: back.receive(mine, 0.02), 1)
    assert sent[0] is None and isinstance(sent[1], TransferRefused) and sent[1].reason == "duplicate"
    assert isinstance(got[0], int) and isinstance(got[1], BundleRefused) and isinstance(got[2], TransferError)
    assert list(mine.pages.requests) == [got[0]] and list(mine.imported) == [bundle.header.id]
    mine.close(got[0])
    assert mine.pages.used_bytes == 0


@pytest.mark.parametrize("tries", [1, 3])
def test_answers_to_earlier_tries_wait_for_the_sender(ends: Ends, tries: int) -> None:
    """Each header was answered, and its bundle given up, when nobody listened any more."""
    (out, back), bundle, mine = ends, bundle_of(), empty()
    for _ in range(tries):
        outcomes(lambda: out.send(bundle, 0.02), 1)
        outcomes(lambda: back.receive(mine, 0.05), 1)
    assert mine.pages.used_bytes == 0 and not mine.imported
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(mine, SECONDS))
    assert sent is None and list(mine.pages.requests) == [got]


def test_another_bundle_after_one_that_was_given_up(ends: Ends) -> None:
    """The pages of the first are free before those of the second are reserved."""
    (out, back), mine = ends, empty(token_pages=12)
    outcomes(lambda: out.send(bundle_of(40), 0.02), 1)
    sent, got = both(lambda: out.send(bundle_of(44), SECONDS), lambda: back.receive(mine, SECONDS))
    assert sent is None and mine.request(got).length == 44 and len(mine.imported) == 1


def test_a_second_try_that_does_not_fit_is_told_so(ends: Ends) -> None:
    (out, back), mine = ends, empty(token_pages=10)
    outcomes(lambda: out.send(bundle_of(40), 0.02), 1)
    sent, got = both(lambda: out.send(bundle_of(44), SECONDS), lambda: back.receive(mine, SECONDS))
    assert sent.reason == "pages" and isinstance(got, OutOfPages)
    assert mine.pages.used_bytes == 0 and not mine.imported


def test_a_refused_header_of_an_earlier_try() -> None:
    """The answer to it is for nobody; the next `receive` gets the bundle."""
    (out, back), bundle, mine = queue_pair(), bundle_of(), empty(token_pages=12)
    held = mine.open(12)
    outcomes(lambda: out.send(bundle, 0.02), 1)
    thread = threading.Thread(target=outcomes, args=(lambda: back.receive(mine, SECONDS), 1))
    thread.start()
    thread.join(SECONDS)
    mine.close(held)
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(mine, SECONDS))
    assert sent is None and list(mine.pages.requests) == [got]


def test_room_that_is_no_number(ends: Ends) -> None:
    """Nothing is read before a number was checked; the sender is told about a function that fails."""
    (out, back), bundle, mine = ends, bundle_of(), empty()
    with pytest.raises(TypeError, match="room: 100.0, a float, allowed: int"):
        back.receive(mine, 0.05, room=100.0)  # type: ignore[arg-type]
    sent, got = outcomes_of_both(out, back, bundle, mine)
    assert isinstance(got, TypeError) and isinstance(sent, TransferRefused) and sent.reason == "aborted"
    assert mine.pages.used_bytes == 0 and not mine.imported


def outcomes_of_both(out: MessageTransport, back: MessageTransport, bundle: KVBundle, mine: PagedCache) -> Any:
    return both(
        lambda: out.send(bundle, SECONDS),
        lambda: back.receive(mine, SECONDS, room=lambda header: header.length / 2),  # type: ignore[arg-type,return-value]
    )
