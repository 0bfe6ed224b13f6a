"""Hand-overs that go well and hand-overs that do not: pools end up as they should either way."""

import multiprocessing
import random
import uuid
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dscompile.kv.bundle import BundleRefused, export_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.file_transport import FileTransport, load_bundle, save_bundle
from dscompile.kv.memory_transport import SharedMemoryTransport
from dscompile.kv.pages import OutOfPages
from dscompile.kv.transfer import Frame, TransferError, TransferRefused
from support.paged import tiny_layout
from support.transfers import both, gloo_rank, queue_pair, received, send_and_die, stored_request

SECONDS = 20.0  # for what should go well


def empty(**changes: object) -> PagedCache:
    return PagedCache(tiny_layout(**changes), requests=2, token_pages=40)


def assert_same(mine: PagedCache, number: int, theirs: PagedCache, other: int) -> None:
    for (name, got), want in zip(mine.state_bytes(number).items(), theirs.state_bytes(other).values()):
        assert got.equal(want), name


def shuffled(messages: list[bytes]) -> list[bytes]:
    return random.Random(0).sample(messages, len(messages))


def twice(messages: list[bytes]) -> list[bytes]:
    return [message for message in messages for _ in range(2)]


@pytest.mark.parametrize("spoil", [None, shuffled, twice, lambda m: shuffled(twice(m))])
def test_messages_in_another_order_and_twice(spoil: object) -> None:
    cache, number = stored_request()
    mine, (out, back) = empty(), queue_pair(spoil)
    sent, got = both(lambda: out.send(export_kv(cache, number), SECONDS), lambda: back.receive(mine, SECONDS))
    assert sent is None
    assert_same(mine, got, cache, number)


def flipped(at: int):
    def spoil(messages: list[bytes]) -> list[bytes]:
        bad = bytearray(messages[2])
        bad[at] ^= 1
        return [*messages[:2], bytes(bad), *messages[3:]]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (flipped(-1), "damaged"),
        (flipped(30), "damaged"),  # the part number
        (flipped(0), "damaged"),
        (lambda m: [m[0][:9], *m[1:]], "truncated"),
        (lambda m: [m[0][:-5], *m[1:]], "damaged"),
    ],
)
def test_spoilt_messages_are_refused_with_the_reason(spoil: object, reason: str) -> None:
    cache, number = stored_request()
    mine, (out, back) = empty(), queue_pair(spoil)
    bundle = export_kv(cache, number)
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(mine, SECONDS))
    assert isinstance(got, BundleRefused) and got.reason == reason
    assert isinstance(sent, TransferRefused) and sent.reason == reason
    assert mine.pages.used_bytes == 0 and not mine.imported
    out._spoil = None  # the same bundle once more, behind what is left of the first try
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(mine, SECONDS))
    assert sent is None
    assert_same(mine, got, cache, number)


def test_a_lost_message_ends_in_a_timeout() -> None:
    cache, number = stored_request()
    mine, (out, back) = empty(), queue_pair(lambda messages: messages[:-1])
    sent, got = both(lambda: out.send(export_kv(cache, number), 0.5), lambda: back.receive(mine, 0.5))
    assert isinstance(got, TransferError) and isinstance(sent, TransferError)
    assert mine.pages.used_bytes == 0 and not mine.imported


def test_other_model_and_second_import_are_told_to_the_sender() -> None:
    cache, number = stored_request()
    bundle, (out, back) = export_kv(cache, number), queue_pair()
    other = empty(model="other")
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(other, SECONDS))
    assert sent.reason == got.reason == "model" and other.pages.used_bytes == 0
    mine = empty()
    both(lambda: out.send(bundle, SECONDS), lambda: back.receive(mine, SECONDS))
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(mine, SECONDS))
    assert sent.reason == got.reason == "duplicate" and len(mine.pages.requests) == 1


def test_back_pressure_before_any_row_is_sent() -> None:
    cache, number = stored_request()
    bundle, (out, back) = export_kv(cache, number), queue_pair()
    small = PagedCache(tiny_layout(), requests=2, token_pages=12)
    held = small.open(20)
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(small, SECONDS))
    assert isinstance(got, OutOfPages) and sent.reason == "pages"
    assert out._out.empty(), "no data was sent"
    small.close(held)
    sent, got = both(lambda: out.send(bundle, SECONDS), lambda: back.receive(small, SECONDS))
    assert sent is None
    assert_same(small, got, cache, number)


def test_a_frame_says_who_it_is() -> None:
    frame = Frame(b"D", (uuid.uuid4().bytes, bytes(range(8))), 3, 1 << 40, b"rows")
    assert Frame.unpack(frame.pack()) == frame


@pytest.mark.parametrize("capacity", [1024, 1 << 20])
def test_shared_memory(capacity: int) -> None:
    """Far less room than a bundle needs, and more than enough."""
    cache, number = stored_request()
    here = SharedMemoryTransport.create(capacity)
    there = SharedMemoryTransport.attach(here.name)
    try:
        mine = empty()
        for _ in range(3):
            sent, got = both(lambda: there.send(export_kv(cache, number), SECONDS), lambda: here.receive(mine, SECONDS))
            assert sent is None
            assert_same(mine, got, cache, number)
            mine.close(got)
        with pytest.raises(TransferError, match="sent nothing for 0.05 s"):
            here.receive(mine, 0.05)
        with pytest.raises(TransferError, match="took nothing for 0.05 s"):
            there.write(bytes(2 * capacity), 0.05)
        with pytest.raises(TransferError, match="in the middle of a message"):
            there.write(b"more", 0.05)
    finally:
        there.close()
        here.close()
    with pytest.raises(FileNotFoundError):
        SharedMemoryTransport.attach(here.name)


def test_a_killed_sender_in_shared_memory() -> None:
    """Killed after the header and two pieces; then another one delivers."""
    spawn = multiprocessing.get_context("spawn")
    mine = empty()
    for after, whole in ((3, False), (-1, True)):
        transport = SharedMemoryTransport.create()
        ready = spawn.Event()
        process = spawn.Process(target=send_and_die, args=(transport.name, after, ready))
        process.start()
        assert ready.wait(120)
        number, error, used = received(transport, mine, timeout=SECONDS if whole else 4)
        process.join(30)
        transport.close()
        if whole:
            cache, other = stored_request()
            assert process.exitcode == 0 and number is not None, error
            assert_same(mine, number, cache, other)
        else:
            assert process.exitcode == -9 and "sent nothing" in error
            assert used == 0 and not mine.pages.requests and not mine.imported


@pytest.mark.parametrize("after", [-1, 0, 4])
def test_gloo(tmp_path: Path, after: int) -> None:
    """Two real processes; with `after`, the sender is killed before that message."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=gloo_rank, args=(rank, str(tmp_path), after)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(90)
    result, error, used = torch.load(tmp_path / "result.pt", weights_only=False)
    if after < 0:
        assert result is True and not error and [rank.exitcode for rank in ranks] == [0, 0]
    else:
        assert result is None and "cannot receive from rank 0" in error and used == 0
        assert ranks[0].exitcode == -9


def test_files(tmp_path: Path) -> None:
    cache, number = stored_request()
    transport, mine = FileTransport(tmp_path), empty()
    with pytest.raises(TransferError, match="no bundle in"):
        transport.receive(mine, 0.05)
    transport.send(export_kv(cache, number, note={"next": 3}))
    (path,) = tmp_path.iterdir()
    with safe_open(path, framework="pt") as file:
        assert "window.0" in file.keys()
    assert load_bundle(path).header.note == {"next": 3}
    small = PagedCache(tiny_layout(), requests=1, token_pages=2)
    with pytest.raises(OutOfPages):
        transport.receive(small, 1)
    assert_same(mine, transport.receive(mine, 1), cache, number)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["cut", "byte", "header", "foreign", "unfinished"])
def test_files_that_are_not_whole(tmp_path: Path, fault: str) -> None:
    cache, number = stored_request()
    path = tmp_path / "1.kv.safetensors"
    save_bundle(export_kv(cache, number), path)
    data = bytearray(path.read_bytes())
    if fault == "cut":
        path.write_bytes(data[:-1])
    elif fault == "byte":
        data[-1] ^= 1
        path.write_bytes(data)
    elif fault == "header":
        at = data.index(b"length")
        data[at] ^= 1
        path.write_bytes(data)
    elif fault == "foreign":
        from safetensors.torch import save_file

        save_file({"window.0": torch.zeros(3)}, path)
    else:
        path.rename(tmp_path / f".{path.name}.1234")
    mine = empty()
    with pytest.raises(TransferError if fault == "unfinished" else BundleRefused):
        FileTransport(tmp_path).receive(mine, 0.05)
    assert mine.pages.used_bytes == 0 and not mine.pages.requests and not mine.imported
    (left,) = tmp_path.iterdir()
    assert fault == "unfinished" or left.name.endswith(".refused")
