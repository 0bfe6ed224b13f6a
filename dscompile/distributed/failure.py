"""When an exchange fails: which ranks are gone.

A broken connection says little about who broke it. Every rank that fails answers a roll call at the group's store;
those that do not answer are named.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from dscompile import compat

ANSWER_SECONDS = 10.0  # for ranks that have not noticed yet; much shorter than any group's timeout


class ExchangeError(RuntimeError):
    """An exchange between ranks failed; the message names the ranks that did not answer afterwards."""


@contextlib.contextmanager
def named_failures(group: str, rank: int, what: str) -> Iterator[None]:
    """Turns a failed collective into an `ExchangeError` that names the ranks which are gone, by their global ranks."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, ExchangeError) or not _is_of_communication(error):
            raise
        text = " ".join(str(error).split())
        here = dist.get_rank() if dist.is_initialized() else rank
        raise ExchangeError(f"{what} failed on rank {here}: {_who(group, rank)} ({text[:300]})") from error


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    words = ("connection", "timed out", "timeout", "gloo", "nccl", "peer", "socket")
    return any(word in str(error).lower() for word in words)


def _who(group: str, rank: int) -> str:
    try:
        missing = missing_ranks(group, rank, ANSWER_SECONDS)
    except Exception as error:
        return f"the store that ranks meet at does not answer either ({type(error).__name__}), its host is gone"
    if not missing:
        return "every rank answered, so none has died; do all ranks run the same steps?"
    members = dist.get_process_group_ranks(compat.process_group(group))
    shown = ", ".join(str(members[each]) for each in missing)
    return f"rank{'s' if len(missing) > 1 else ''} {shown} did not answer within {ANSWER_SECONDS:g} s"


def missing_ranks(group: str, rank: int, seconds: float) -> list[int]:
    """Ranks of a group that do not say within `seconds` that they are there; every rank that is should call this."""
    found: Any = compat.process_group(group)
    store, size = compat.group_store(found), dist.get_world_size(found)
    store.set(f"dsv4/alive/{rank}", "1")
    missing, until = [], time.monotonic() + seconds
    for other in range(size):
        left = max(until - time.monotonic(), 0.05)
        try:
            store.wait([f"dsv4/alive/{other}"], datetime.timedelta(seconds=left))
        except (RuntimeError, dist.DistStoreError) as error:  # a file store has no error type of its own
            if "imeout" not in str(error) and "imed out" not in str(error):
                raise
            missing.append(other)
    return missing
