"""Work in several real processes that talk over gloo on this machine."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dscompile.distributed.imagined import imagined_ranks


@contextlib.contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[dist.ProcessGroup]:
    """This process as one rank of a group whose others do not exist: enough to compile, not to run."""
    with imagined_ranks(ranks, rank) as group:
        yield group


Work = Callable[..., Any]
#: The server starts no threads by importing these, so that forking it is safe. It skips what it cannot import.
PRELOADED = ["pytest", "torch.distributed", "torch._dynamo", "dscompile.backend", "tests.support.expert_blocks"]


def run_ranks(work: Work, ranks: int, folder: Path, *args: Any, seconds: float = 60) -> list[Any]:
    """`work(rank, *args)` in `ranks` processes with a gloo group each; what they return, by rank.

    A rank that ends its process in `work` counts as one that returns None. Raises AssertionError with the traceback of
    every rank that raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Forked from a server that has imported what every rank needs: that takes longer than most of what ranks do.
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(_run, (work, ranks, str(folder), seconds, args), nprocs=ranks, start_method="forkserver")
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    results = [torch.load(file, weights_only=False) if file.exists() else (True, None) for file in files]
    wrong = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(results) if not ok]
    assert not wrong, "\n".join(wrong)
    return [value for _, value in results]


def _run(rank: int, work: Work, ranks: int, folder: str, seconds: float, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip
    try:
        found: tuple[bool, Any] = (True, work(rank, *args))
    except Exception:
        found = (False, traceback.format_exc())
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
