"""Bundles point to point over torch.distributed (gloo, on CPUs)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dscompile.kv.transfer import MessageTransport, TransferError, as_tensor

_MOST_BYTES = 1 << 31  # of a message: more is a length that was not one


class DistributedTransport(MessageTransport):
    """`Transport` to rank `peer` of a process group whose backend sends tensors of the CPU."""

    def __init__(self, peer: int, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("no process group, allowed: after torch.distributed.init_process_group")
        if peer == dist.get_rank(group) or not 0 <= peer < dist.get_world_size(group):
            others = [r for r in range(dist.get_world_size(group)) if r != dist.get_rank(group)]
            raise ValueError(f"peer: {peer}, allowed: {others}")
        self.peer = dist.get_global_rank(group, peer) if group is not None else peer
        self.group = group

    def write(self, message: bytes, timeout: float) -> None:
        """Its length, then its bytes."""
        self._move(dist.isend, torch.tensor([len(message)]), timeout, "send to")
        self._move(dist.isend, as_tensor(message), timeout, "send to")

    def read(self, timeout: float) -> bytes:
        """Its length, then its bytes."""
        length = torch.zeros(1, dtype=torch.int64)
        self._move(dist.irecv, length, timeout, "receive from")
        if not 0 < int(length) <= _MOST_BYTES:
            raise TransferError(f"message of {int(length)} bytes from rank {self.peer}, allowed: 1 to {_MOST_BYTES}")
        data = torch.empty(int(length), dtype=torch.uint8)
        self._move(dist.irecv, data, timeout, "receive from")
        return data.numpy().tobytes()

    def _move(self, start: Callable[..., Any], data: torch.Tensor, timeout: float, what: str) -> None:
        """A peer that is gone shows while the exchange is started or while it is waited for, as its end was noticed."""
        try:
            work = start(data, self.peer, self.group)
            done = work is not None and work.wait(timedelta(seconds=max(timeout, 0.001)))
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise TransferError(f"cannot {what} rank {self.peer} within {timeout:.3g} s: {first}") from error
        if not done:
            raise TransferError(f"cannot {what} rank {self.peer} within {timeout:.3g} s")
