"""Ranks as threads of one process, which meet: what transports for hardware can be tried on without any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Meeting:
    """Threads hand each other values."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._values: dict[int, Any] = {}

    def everyone(self, rank: int, value: Any) -> list[Any]:
        """Values of all ranks, in order; every rank calls it."""
        self._values[rank] = value
        self._barrier.wait()
        found = [self._values[other] for other in range(self.ranks)]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


@dataclass
class ThreadGroup:
    """A process group of threads, as far as transports ask. calls: what a fake noted."""

    meeting: Meeting
    number: int
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.meeting.ranks


def run_threads(work: Callable[[int], Any], meeting: Meeting) -> list[Any]:
    """`work(rank)` in as many threads as the meeting has ranks; what they return. Raises what one of them raised."""
    results: list[Any] = [None] * meeting.ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(meeting.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results
