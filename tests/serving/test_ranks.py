"""Whole ranks, each a thread of this process: orders in, bundles through shared memory, words out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dscompile.kv.bundle import export_kv
from dscompile.kv.memory_transport import SharedMemoryTransport
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.outbox import Outbox
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.rank import Abort, Left, in_step, serve_decode, serve_prefill
from dscompile.serving.requests import Finished, Request
from dscompile.serving.router import Router
from support.ranks import run_ranks
from support.serving import VOCAB, Bytes, draw_requests

SECONDS = 60.0


@contextmanager
def ways(senders: int, receivers: int) -> Iterator[tuple[list[list[Any]], list[list[Any]]]]:
    """Ends of a piece of shared memory for each pair: by sender, and by receiver."""
    theirs = [[SharedMemoryTransport.create(1 << 16) for _ in range(senders)] for _ in range(receivers)]
    ours = [[SharedMemoryTransport.attach(theirs[d][p].name) for d in range(receivers)] for p in range(senders)]
    try:
        yield ours, theirs
    finally:
        for way in [way for row in (*ours, *theirs) for way in row]:
            way.close()


def started(work: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def test_two_and_two_ranks() -> None:
    """60 requests, some aborted at once; every row and page is wanted by several."""
    requests, told = draw_requests(60, 20, 6, VOCAB, seed=3), queue.Queue()
    with ways(2, 2) as (ours, theirs):
        prefills = [PrefillLoop(Bytes(2, 3, 14), chunk=4) for _ in range(2)]
        decodes = [DecodeLoop(Bytes(2, 2, 9)) for _ in range(2)]
        outboxes = [Outbox(each, SECONDS, pause=0.002) for each in ours]
        orders = [queue.Queue() for _ in range(4)]
        threads = [started(serve_prefill, prefills[p], outboxes[p], orders[p], told.put) for p in range(2)]
        for d in range(2):
            threads.append(started(serve_decode, decodes[d], theirs[d], orders[2 + d], told.put, SECONDS))
        router, done, left = Router(2), {}, set()
        for request in requests:
            rank = router.choose(request)
            orders[rank].put(request)
            if request.name % 10 == 9:
                for each in orders:
                    each.put(Abort(request.name))
        wanted = {each.name for each in requests if each.name % 10 != 9}
        while not wanted <= done.keys() or len(left) < len(requests):
            word = told.get(timeout=SECONDS)
            if isinstance(word, Left):
                assert word.name not in left
                left.add(word.name)
                router.left(word.name)
            else:
                done[word.name] = word.tokens
        for each in orders:
            each.put(None)
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        for outbox in outboxes:
            outbox.close()
    for request in requests:
        if request.name in done:
            assert done[request.name] == Bytes.alone(request)
    assert router.tokens == [0, 0]
    assert all(loop.paged.cache.pages.used_bytes == 0 for loop in (*prefills, *decodes))
    assert all(each.work.requests for each in (*prefills, *decodes)), "every rank had some"


def test_a_lost_receiver_stops_the_outbox_and_no_request_counts_as_arrived() -> None:
    prefill = PrefillLoop(Bytes(1, 2, 8), chunk=8)
    prefill.submit(Request(0, (1, 2, 3), 4))
    (each,) = prefill.step()
    with ways(1, 1) as (((way,),), _):
        outbox = Outbox([way], timeout=0.2)
        outbox.put(export_kv(prefill.paged.cache, each.number, each.note))
        with pytest.raises(RuntimeError, match="a hand-over failed"):
            for _ in range(1000):
                assert not outbox.arrived()
                outbox._thread.join(0.05)
        assert outbox.pending == 1 and prefill.stored == {0: each.number}
        outbox.close()


def test_no_receivers() -> None:
    with pytest.raises(ValueError, match="no receivers"):
        Outbox([], 1)


def unequal_work(rank: int) -> tuple[int, int]:
    """Two ranks of one instance, of which one has no prompts -> steps with work, and all steps."""
    model, calls = Bytes(1, 3, 8), 0
    loop, feed = PrefillLoop(model, chunk=4), model.feed

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return feed(*args)

    model.feed = counted  # type: ignore[method-assign]
    orders: queue.Queue[Any] = queue.Queue()
    told: list[Any] = []
    for order in (*([Request(n, tuple(range(7)), 1) for n in range(3)] if rank == 0 else ()), None):
        orders.put(order)
    with ways(1, 1) as (((way,),), _):
        outbox = Outbox([way], SECONDS)
        assert dist.group.WORLD is not None
        serve_prefill(loop, outbox, orders, told.append, in_step(dist.group.WORLD))
        outbox.close()
    assert sum(isinstance(word, Finished) for word in told) == (3 if rank == 0 else 0)
    return loop.work.steps, calls


def test_ranks_of_an_instance_run_every_step_together(tmp_path: Path) -> None:
    assert run_ranks(unequal_work, 2, tmp_path) == [(6, 6), (0, 6)]
