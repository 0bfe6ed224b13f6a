"""Shared memory between two processes that both run all the time, and its edges."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from dscompile.kv.cache import PagedCache
from dscompile.kv.memory_transport import SharedMemoryTransport
from dscompile.kv.transfer import TransferError
from support.paged import tiny_layout
from support.ranks import PRELOADED
from support.transfers import numbered, send_many, send_numbered

SECONDS = 15.0  # for what should go well


def started(work: Callable[..., None], *args: Any) -> Any:
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(target=work, args=args, daemon=True)
    process.start()
    return process


@pytest.mark.parametrize("capacity", [1024, 4096, 65536])
def test_every_message_arrives_as_it_was_sent(capacity: int, count: int = 15_000) -> None:
    """Both sides change their counters all the time, over many carries from byte to byte."""
    here = SharedMemoryTransport.create(capacity)
    sender = started(send_numbered, here.name, count)
    try:
        for index in range(count):
            assert here.read(SECONDS) == numbered(index), index
        here.write(b"all of them", SECONDS)
        sender.join(SECONDS)
        assert sender.exitcode == 0
    finally:
        here.close()
        sender.kill()


@pytest.mark.parametrize("capacity", [1 << 14, 1 << 20])
def test_bundles_of_4096_tokens(capacity: int, count: int = 30) -> None:
    here = SharedMemoryTransport.create(capacity)
    mine = PagedCache(tiny_layout(), requests=1, token_pages=1024)
    sender = started(send_many, here.name, 4096, count)
    try:
        for _ in range(count):
            number = here.receive(mine, SECONDS)
            assert mine.request(number).length == 4096
            mine.close(number)
        sender.join(SECONDS)
        assert sender.exitcode == 0
    finally:
        here.close()
        sender.kill()


@pytest.fixture
def ends() -> Any:
    here = SharedMemoryTransport.create(1024)
    there = SharedMemoryTransport.attach(here.name)
    yield here, there
    there.close()
    here.close()


@pytest.mark.parametrize("which", ["written", "read"])
@pytest.mark.parametrize("by", [-1024, 4096])
def test_counters_that_do_not_belong_together_are_looked_at_again(ends: Any, which: str, by: int) -> None:
    """For as long as the timeout, by the reader and by the writer; then nothing was taken or overwritten."""
    here, there = ends
    for _ in range(2):
        there.write(bytes(600), 1)
        here.read(1)
    there.write(b"next", 1)
    at = here._in + (0 if which == "written" else 8)
    right = here._get(at)
    here._put(at, right + by)
    with pytest.raises(TransferError, match="sent nothing for 0.05 s"):
        here.read(0.05)
    if which == "read":
        with pytest.raises(TransferError, match="took nothing for 0.05 s"):
            there.write(b"third", 0.05)
    timer = threading.Timer(0.1, lambda: here._put(at, right))
    timer.start()
    assert here.read(SECONDS) == b"next"
    timer.join()
    there.write(b"third", 1)
    assert here.read(1) == b"third"


def test_a_length_that_is_not_there_yet(ends: Any) -> None:
    """A length without its checksum, as one that is read too early: of the message that lay there before."""
    here, there = ends
    there.write(bytes(1024 - 16), 1)
    here.read(1)
    there.write(bytes(8), 1)
    place = slice(here._in + 64 + 1016, here._in + 64 + 1024)
    right = bytes(here._bytes[place])
    here._bytes[place] = bytes(here._bytes[here._in + 64 : here._in + 72])
    with pytest.raises(TransferError, match="sent no length of a message"):
        here.read(0.05)
    here._broken = ""
    timer = threading.Timer(0.1, lambda: here._bytes.__setitem__(place, right))
    timer.start()
    assert here.read(SECONDS) == bytes(8)
    timer.join()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1015, 1016, 1017, 5000])
def test_lengths_of_messages(ends: Any, length: int) -> None:
    here, there = ends
    for index in range(3):
        message = bytes([index + 1]) * length
        sender = threading.Thread(target=there.write, args=(message, SECONDS))
        sender.start()
        assert here.read(SECONDS) == message
        sender.join(SECONDS)
    assert not here.ready() and not there.ready()


def test_a_capacity_that_is_none_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(TypeError, match="capacity: 2048.0, a float, allowed: int"):
        SharedMemoryTransport.create(2048.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity: 1023 bytes, allowed: >= 1024"):
        SharedMemoryTransport.create(1023)
    assert set(os.listdir("/dev/shm")) <= before


def test_memory_that_is_somebody_elses() -> None:
    memory = SharedMemory(create=True, size=1000)
    try:
        with pytest.raises(ValueError, match=f"{memory.name}: 1000 bytes, allowed: what `create` made"):
            SharedMemoryTransport.attach(memory.name)
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize("which", [0, 1])
def test_after_close(ends: Any, which: int) -> None:
    end = ends[which]
    end.close()
    end.close()
    for call in (end.ready, lambda: end.read(0.05), lambda: end.write(b"1", 0.05)):
        with pytest.raises(TransferError, match=f"{end.name} is closed, allowed: before `close`"):
            call()
