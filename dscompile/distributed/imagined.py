"""A process group whose other ranks do not exist, to compile for ranks without starting them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from dscompile.distributed import agreement, transports
from dscompile.distributed.mesh import MeshError


@contextlib.contextmanager
def imagined_ranks(ranks: int, rank: int = 0) -> Iterator[Any]:
    """A process group of torch's backend "fake" in which this is one of `ranks`; see `transports.mirror`.

    Raises:
        MeshError: torch.distributed is initialised in this process already; or fewer than one rank.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if ranks < 1:
        raise MeshError(f"{ranks} ranks, allowed: 1 or more")
    if dist.is_initialized():
        raise MeshError("imagined ranks in a process with a process group; allowed: before init_process_group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    group: Any = dist.group.WORLD
    try:
        yield group
    finally:
        agreement.forget(group.group_name)
        transports.forget(group.group_name)
        dist.destroy_process_group()
