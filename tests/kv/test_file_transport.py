"""Several receivers on one folder: every bundle becomes one request, whoever is slow, full or dead."""

import threading
import time
from pathlib import Path

import pytest

from dscompile.kv import file_transport
from dscompile.kv.bundle import KVBundle, export_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.file_transport import FileTransport
from dscompile.kv.transfer import TransferError
from support.paged import tiny_layout
from support.transfers import stored_request


def empty() -> PagedCache:
    return PagedCache(tiny_layout(), requests=30, token_pages=300)


def send(folder: Path, count: int = 1) -> None:
    cache, number = stored_request()
    for index in range(count):
        FileTransport(folder).send(export_kv(cache, number, note={"name": index}))


def names(cache: PagedCache) -> list[int]:
    return [request.note["name"] for request in cache.pages.requests.values()]


def test_two_receivers_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look, then both take their time to read."""
    send(tmp_path, 12)
    load = file_transport.load_bundle

    def slow(path: Path) -> KVBundle:
        bundle = load(path)
        time.sleep(0.005)
        return bundle

    monkeypatch.setattr(file_transport, "load_bundle", slow)
    caches, failures = [empty(), empty()], []

    def receive(cache: PagedCache) -> None:
        try:
            while True:
                FileTransport(tmp_path).receive(cache, 0.2)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=receive, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in failures] == [TransferError] * 2, "nothing was left, and nothing else failed"
    assert sorted(names(caches[0]) + names(caches[1])) == list(range(12)) and all(map(names, caches))
    assert not list(tmp_path.iterdir())


def test_a_receiver_that_dies_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim is nobody's for a while, then anybody's."""
    send(tmp_path)

    def die(path: Path) -> KVBundle:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(file_transport, "load_bundle", die)
        patch.setattr(Path, "rename", _rename_once())
        with pytest.raises(SystemExit):
            FileTransport(tmp_path).receive(empty(), 1)
    (claim,) = tmp_path.iterdir()
    assert claim.name.startswith(".") and claim.name.endswith(".claimed")
    mine = empty()
    with pytest.raises(TransferError, match="no bundle in"):
        FileTransport(tmp_path).receive(mine, 0.05)
    FileTransport(tmp_path, claim_seconds=0.1).receive(mine, 5)
    assert names(mine) == [0] and not list(tmp_path.iterdir())


def _rename_once() -> object:
    """`Path.rename` of a process that can claim and then do nothing more."""
    rename, calls = Path.rename, []

    def once(path: Path, target: Path) -> Path:
        calls.append(path)
        return rename(path, target) if len(calls) == 1 else path

    return once


@pytest.mark.parametrize("when", ["before it reads", "after it read"])
def test_a_receiver_that_is_too_slow_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    send(tmp_path)
    load, slow, quick = file_transport.load_bundle, empty(), empty()

    def overtaken(path: Path) -> KVBundle:
        monkeypatch.setattr(file_transport, "load_bundle", load)
        if when == "after it read":
            bundle = load(path)
        FileTransport(tmp_path, claim_seconds=0.01).receive(quick, 5)
        return bundle if when == "after it read" else load(path)

    monkeypatch.setattr(file_transport, "load_bundle", overtaken)
    with pytest.raises(TransferError, match="was lost while it was imported .*allowed: 300 s"):
        FileTransport(tmp_path).receive(slow, 1)
    assert names(quick) == [0] and slow.pages.used_bytes == 0 and not slow.imported and not list(tmp_path.iterdir())


def test_what_is_not_a_bundles_fault_leaves_it(tmp_path: Path) -> None:
    send(tmp_path)
    (path,) = tmp_path.iterdir()
    transport, mine = FileTransport(tmp_path), empty()
    for room in (100.0, lambda header: 1.5):
        with pytest.raises(TypeError, match="a float, allowed: int"):
            transport.receive(mine, 1, room=room)  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == [path]
    transport.receive(mine, 1, room=100)
    assert names(mine) == [0] and mine.room(0) >= 100 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_claims_last_some_time(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"claim_seconds: {seconds}, allowed: > 0 and finite"):
        FileTransport(tmp_path, claim_seconds=seconds)
