"""Both ends of a transfer in one process, ways that spoil messages, and sender processes that die on the way."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dscompile.kv.bundle import export_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.gloo_transport import DistributedTransport
from dscompile.kv.memory_transport import SharedMemoryTransport
from dscompile.kv.transfer import MessageTransport, TransferError, Transport
from support.paged import fill, tiny_layout

Spoil = Callable[[list[bytes]], list[bytes]]


class QueueTransport(MessageTransport):
    """Messages in a queue. What is written passes through `spoil`, which gets the messages since the last answer."""

    frame_bytes = 64

    def __init__(self, out: queue.Queue[bytes], back: queue.Queue[bytes], spoil: Spoil | None = None) -> None:
        self._out, self._in, self._spoil = out, back, spoil
        self._held: list[bytes] = []

    def write(self, message: bytes, timeout: float) -> None:
        self._held.append(message)
        if self._spoil is None or message[4:5] != b"D":
            self.flush()

    def flush(self) -> None:
        held, self._held = self._held, []
        data = bool(held) and held[0][4:5] == b"D"
        for message in self._spoil(held) if self._spoil and data else held:
            self._out.put(message)

    def read(self, timeout: float) -> bytes:
        self.flush()
        try:
            return self._in.get(timeout=timeout)
        except queue.Empty:
            raise TransferError(f"nothing for {timeout} s") from None


def queue_pair(spoil: Spoil | None = None) -> tuple[QueueTransport, QueueTransport]:
    """Sender's and receiver's end."""
    there: queue.Queue[bytes] = queue.Queue()
    back: queue.Queue[bytes] = queue.Queue()
    return QueueTransport(there, back, spoil), QueueTransport(back, there)


def both(send: Callable[[], Any], receive: Callable[[], Any]) -> tuple[Any, Any]:
    """Run both ends; what each returned or raised."""
    out: list[Any] = [None]

    def run() -> None:
        try:
            out[0] = send()
        except Exception as error:
            out[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    try:
        got: Any = receive()
    except Exception as error:
        got = error
    thread.join(30)
    assert not thread.is_alive()
    return out[0], got


def stored_request(length: int = 40) -> tuple[PagedCache, int]:
    """A cache with one request in it."""
    cache = PagedCache(tiny_layout(), requests=2, token_pages=40)
    number = cache.open(length)
    fill(cache, number, list(range(length)))
    return cache, number


class Dying:
    """A transport whose process is killed instead of writing its n-th message."""

    def __init__(self, transport: MessageTransport, after: int) -> None:
        self._write, self._left = transport.write, after
        transport.write = self.write  # type: ignore[method-assign]

    def write(self, message: bytes, timeout: float) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        self._write(message, timeout)


def send_and_die(name: str, after: int, ready: Any) -> None:
    """Process: set `ready`, send over shared memory, and be killed before message `after`; -1: never."""
    torch.set_num_threads(1)
    transport = SharedMemoryTransport.attach(name)
    transport.frame_bytes = 256
    Dying(transport, after)
    cache, number = stored_request()
    bundle = export_kv(cache, number)
    ready.set()
    transport.send(bundle, timeout=30)
    transport.close()


def gloo_rank(rank: int, folder: str, after: int) -> None:
    """Process: rank 0 sends and is killed before message `after`; rank 1 receives and writes down what came of it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    transport = DistributedTransport(1 - rank)
    cache, number = stored_request()
    if rank == 0:
        transport.frame_bytes = 256
        Dying(transport, after)
        transport.send(export_kv(cache, number), timeout=30)
    else:
        mine = PagedCache(tiny_layout(), requests=2, token_pages=40)
        if after == 0:
            time.sleep(1)  # the peer is gone before the first exchange starts
        result = received(transport, mine, timeout=20)
        if isinstance(result[0], int):
            want = cache.state_bytes(number)
            result = (all(got.equal(want[name]) for name, got in mine.state_bytes(result[0]).items()), *result[1:])
        torch.save(result, Path(folder) / "result.pt")
    if after < 0:
        dist.destroy_process_group()
    os._exit(0)  # a group whose other rank is dead cannot be taken down in order


def received(transport: Transport, cache: PagedCache, timeout: float) -> tuple[Any, str, int]:
    """(number or None, the error, bytes in use)"""
    try:
        number: int | None = transport.receive(cache, timeout)
        error = ""
    except TransferError as failure:
        number, error = None, str(failure)
    return number, error, cache.pages.used_bytes


def numbered(index: int) -> bytes:
    """A message that tells which one it is."""
    return index.to_bytes(8, "little") * (1 + index % 60)


def send_numbered(name: str, count: int) -> None:
    """Process: messages 0 to `count` through shared memory, then one for the other direction."""
    torch.set_num_threads(1)
    transport = SharedMemoryTransport.attach(name)
    for index in range(count):
        transport.write(numbered(index), 30)
    assert transport.read(30) == b"all of them"
    transport.close()


def send_many(name: str, length: int, count: int) -> None:
    """Process: a request of `length` tokens, `count` times through shared memory."""
    torch.set_num_threads(1)
    transport = SharedMemoryTransport.attach(name)
    cache = PagedCache(tiny_layout(), requests=1, token_pages=length)
    number = cache.open(length)
    for spec in cache.layout.pools:
        rows = cache.pools[spec.name].view(torch.uint8)
        rows.copy_(torch.arange(rows.numel()).view_as(rows) % 251)
    cache.commit(number, length)
    for _ in range(count):
        transport.send(export_kv(cache, number), 30)
    transport.close()
