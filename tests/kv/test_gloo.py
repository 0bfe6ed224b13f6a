"""Ranks of a group that wait for one another in vain, and go on with the same group."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dscompile.kv.bundle import BundleRefused, export_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.gloo_transport import DistributedTransport
from dscompile.kv.transfer import TransferError, TransferRefused
from support.paged import tiny_layout
from support.ranks import run_ranks
from support.transfers import stored_request

SECONDS = 20.0  # for what should go well
ROOT = Path(__file__).resolve().parents[2]


def failure(call: Any) -> str:
    try:
        call()
    except TransferError as error:
        return str(error)
    return ""


def waiting(rank: int) -> Any:
    """Rank 1 receives when nobody sends, rank 0 sends when nobody receives; each time a collective still works."""
    transport, (cache, number) = DistributedTransport(1 - rank), stored_request()
    bundle, mine = export_kv(cache, number), PagedCache(tiny_layout(), requests=2, token_pages=40)
    errors = []
    for turn in range(5):
        if turn < 2 and rank == 1:
            errors.append(failure(lambda: transport.receive(mine, 0.1)))
            assert not transport.ready()
        if turn >= 2 and rank == 0:
            errors.append(failure(lambda: transport.send(bundle, 0.1)))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2
    if rank == 0:
        transport.send(bundle, SECONDS)
        with pytest.raises(TransferRefused) as refused:
            transport.send(bundle, SECONDS)
        return errors, refused.value.reason
    while not transport.ready():
        time.sleep(0.001)
    arrived = transport.receive(mine, SECONDS)
    same = all(got.equal(cache.state_bytes(number)[name]) for name, got in mine.state_bytes(arrived).items())
    with pytest.raises(BundleRefused) as again:
        transport.receive(mine, SECONDS)
    return errors, same, again.value.reason


def test_a_wait_in_vain_ends_nothing(tmp_path: Path) -> None:
    sent, got = run_ranks(waiting, 2, tmp_path)
    # The first header's length goes to the wait that rank 1 had begun, and nothing after it.
    assert sent == (["cannot send to rank 1 within 0.1 s"] * 3, "duplicate")
    assert got == (["cannot receive from rank 0 within 0.1 s"] * 2, True, "duplicate")


def both_write(rank: int) -> list[bytes]:
    """As a receiver that refuses while rows are coming."""
    transport = DistributedTransport(1 - rank)
    for index in range(20):
        transport.write(bytes([rank, index]) * 1000, SECONDS)
    return [transport.read(SECONDS) for _ in range(20)]


def test_both_sides_write_at_once(tmp_path: Path) -> None:
    for rank, got in enumerate(run_ranks(both_write, 2, tmp_path)):
        assert got == [bytes([1 - rank, index]) * 1000 for index in range(20)]


def ending(rank: int) -> Any:
    transport = DistributedTransport(1 - rank)
    errors = [failure(lambda: transport.read(0.05)), failure(lambda: transport.write(b"", 1))]
    dist.barrier()
    if rank == 1:
        errors += [failure(lambda: transport.read(SECONDS)), failure(transport.ready)]  # the other one leaves
        errors.append(failure(lambda: transport.write(b"1", SECONDS)))
    return errors


def test_a_rank_that_has_gone_ends_the_group(tmp_path: Path) -> None:
    left, stayed = run_ranks(ending, 2, tmp_path)
    assert left[0] == "cannot receive from rank 1 within 0.05 s"
    assert left[1] == "message of 0 bytes to rank 1, allowed: 1 to 2147483648"
    for error, what in zip(stayed[2:], ("receive from", "receive from", "send to"), strict=True):
        assert error.startswith(f"cannot {what} rank 0, the group has ended, allowed: another one (")


LEAVE = """
import sys, torch.distributed as dist
from dscompile.kv.gloo_transport import DistributedTransport
from dscompile.kv.transfer import TransferError
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
try:
    DistributedTransport(1 - dist.get_rank()).read(0.1)
except TransferError:
    dist.barrier()
    print("left")
"""


@pytest.mark.slow
def test_processes_end_while_they_wait(tmp_path: Path) -> None:
    """In order, and at once: without the group having been taken down."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVE, str(tmp_path), str(rank)],
            cwd=ROOT, env={"PATH": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, _ = rank.communicate(timeout=60)
        assert (out, rank.returncode) == (b"left\n", 0)
