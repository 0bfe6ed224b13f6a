"""torch's symmetric memory: GPUs that see each other's memory write rows straight into it. For the padded form.

Every rank has a buffer that all others can write to. A swap copies rows into the peers' buffers, waits at a barrier,
and copies its own buffer out. Two swaps in a row never use the same buffer: a peer writes to one again only after the
barrier of a swap between, which this rank enters after it has copied the buffer out. So one barrier a swap is enough,
and swaps captured in a CUDA graph can be replayed. All of it runs on a stream of its own, in the order of the swaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dscompile import compat
from dscompile.distributed.routing import Spec
from dscompile.distributed.transports import refuse_capture
from dscompile.distributed.transports.collectives import Collectives
from dscompile.distributed.transports.rows import RowExchange, Wait


@dataclass(frozen=True)
class _Buffer:
    """views: of each rank's memory, uint8 [ranks, bytes of a pair's rows]; row r holds what rank r wrote."""

    views: tuple[Tensor, ...]
    handle: Any


class Symmetric:
    """A `Mover` and, by it, a transport. Buffers are made on the first swap of a size, which all ranks do together."""

    def __init__(self, group: str, rank: int, ranks: int, device: torch.device, memory: Any) -> None:
        """memory: the module torch.distributed._symmetric_memory, or what does the same."""
        self._group, self._rank, self._ranks, self._device = group, rank, ranks, device
        self._memory = memory
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._last: tuple[int, int] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor, table: Tensor, spec: Spec) -> RowExchange:
        """As `Transport.dispatch`. ValueError for the exact form, whose rows have no fixed place in a buffer."""
        if spec.capacity == 0:
            raise ValueError(
                "transport 'symmetric' with expert_exchange 'exact', allowed: 'padded' (with its expert_capacity)"
            )
        return RowExchange(x, indices, weights, table, spec, self)

    def swap(self, rows: Tensor, sent: list[int] | None, received: list[int] | None) -> Wait:
        if sent is not None:  # a step with more rows than the capacity; buffers have no room for them
            return Collectives(self._group).swap(rows, sent, received)
        stream = self._stream
        if stream is None:
            done = self._swap(rows)
            return lambda: done
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            out = self._swap(rows)
            event = stream.record_event()
        rows.record_stream(stream)

        def wait() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            out.record_stream(current)
            return out

        return wait

    def counts(self, counts: Tensor) -> list[int]:
        return Collectives(self._group).counts(counts)

    def any(self, flag: Tensor) -> bool:
        return Collectives(self._group).any(flag)

    @property
    def held_bytes(self) -> int:
        """Bytes of this rank's buffers."""
        return sum(buffer.views[self._rank].numel() for buffer in self._buffers.values())

    def _swap(self, rows: Tensor) -> Tensor:
        blocks = rows.view(torch.uint8).view(self._ranks, -1)
        buffer = self._next(blocks.shape[1])
        for step in range(self._ranks):  # each rank starts at another peer, so that none is written to by all at once
            peer = (self._rank + step) % self._ranks
            buffer.views[peer][self._rank].copy_(blocks[peer])
        buffer.handle.barrier()
        return buffer.views[self._rank].clone().view(rows.dtype).view(rows.shape)

    def _next(self, size: int) -> _Buffer:
        """A buffer for `size` bytes a pair that the last swap did not use; the same one on every rank."""
        key = (size, 1 if self._last == (size, 0) else 0)
        self._last = key
        if key not in self._buffers:
            refuse_capture("transport 'symmetric'")
            shape = (self._ranks, size)
            own = self._memory.empty(shape, dtype=torch.uint8, device=self._device)
            handle = self._memory.rendezvous(own, self._group)
            views = (handle.get_buffer(peer, shape, torch.uint8) for peer in range(self._ranks))
            self._buffers[key] = _Buffer(tuple(views), handle)
        return self._buffers[key]


def connect(group: str) -> Symmetric:
    """The transport of a group, on this process's GPU. Every rank calls it.

    Raises:
        ValueError: no GPU here, or torch has no symmetric memory for it, or the group's GPUs do not reach each other.
    """
    found = compat.process_group(group)
    if not torch.cuda.is_available():
        raise ValueError(
            f"transport 'symmetric' needs GPUs that torch's symmetric memory connects, torch {torch.__version__} finds "
            "none here; allowed: 'collectives'"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory(device)
    try:
        memory.rendezvous(memory.empty((1,), dtype=torch.uint8, device=device), group)
    except RuntimeError as error:
        raise ValueError(
            f"transport 'symmetric': the GPUs of group {group!r} do not reach each other's memory "
            f"({' '.join(str(error).split())[:200]}); allowed: 'collectives'"
        ) from error
    return Symmetric(group, found.rank(), found.size(), device, memory)


def symmetric_memory(device: torch.device) -> Any:
    """torch's module for it. ValueError where this torch has none for the device."""
    try:
        from torch.distributed import _symmetric_memory as memory

        backend = memory.get_backend(device)
    except (ImportError, AttributeError, RuntimeError) as error:
        backend, why = None, f" ({type(error).__name__}: {error})"
    else:
        why = ""
    if backend is None:
        raise ValueError(
            f"transport 'symmetric': torch {torch.__version__} has no symmetric memory for {device.type}{why}; "
            "allowed: 'collectives'"
        )
    return memory
