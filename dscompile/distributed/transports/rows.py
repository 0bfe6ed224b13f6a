"""What transports that move whole rows of bytes have in common: everything but the move itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dscompile.distributed import traffic, wire
from dscompile.distributed.routing import Route, Spec, chosen_slots, destinations, route
from dscompile.distributed.transports import checked_indices
from dscompile.ops.exchange import added_rows

Wait = Callable[[], Tensor]


class Mover(Protocol):
    """Moves rows between the ranks of a group. Each call returns at once; what it returns waits."""

    def swap(self, rows: Tensor, sent: list[int] | None, received: list[int] | None) -> Wait:
        """Rows [S, bytes or D], sorted by destination; how many go to and come from each rank, None: equally many."""

    def counts(self, counts: Tensor) -> list[int]:
        """int64 [ranks], rows for each rank -> rows from each; waits."""

    def any(self, flag: Tensor) -> bool:
        """Whether a bool scalar is true on some rank; waits."""


class RowExchange:
    """An exchange by a `Mover`; see `Exchange`."""

    def __init__(self, x: Tensor, indices: Tensor, weights: Tensor, table: Tensor, spec: Spec, mover: Mover) -> None:
        self._spec, self._mover = spec, mover
        self._dtype, self._weights_dtype = x.dtype, weights.dtype
        self._hidden, self._top_k = x.shape[1], indices.shape[1]
        slot = chosen_slots(checked_indices(indices, table.shape[0]), table, spec.rank)
        wanted = destinations(slot, spec)
        self._sent = self._received = None
        counts = self._counts(x.shape[0], wanted)
        if counts is not None:
            self._sent, self._received = counts.tolist(), mover.counts(counts)
        self._route: Route = route(slot, wanted, spec, self._sent)
        rows = wire.pack(x, self._route.token, self._route.slots, weights, spec.payload)
        self._wait: Wait = mover.swap(rows, self._sent, self._received)
        traffic.record(
            spec, self._rows_sent(), wire.payload_bytes(self._hidden, x.dtype, spec.payload),
            wire.label_bytes(self._top_k), self._hidden * x.element_size(),
        )  # fmt: skip

    def _counts(self, tokens: int, wanted: Tensor) -> Tensor | None:
        """Rows for each rank where the exact form is due; None for the padded one."""
        spec = self._spec
        if spec.capacity == 0:
            return wanted.sum(0)
        if spec.overflow == "exact":
            counts = wanted.sum(0)
            return counts if self._mover.any((counts > spec.capacity).any()) else None
        if tokens > spec.capacity:  # a token has at most one row for each rank, so this many always fit
            raise ValueError(
                f"{tokens} tokens on rank {spec.rank} with expert_capacity {spec.capacity}, allowed: up to the "
                "capacity, or expert_overflow='exact'"
            )
        return None

    def _rows_sent(self) -> int:
        """Rows that leave this rank."""
        spec = self._spec
        if self._sent is None:
            return (spec.ranks - 1) * spec.capacity
        return sum(self._sent) - self._sent[spec.rank]

    def arrive(self) -> tuple[Tensor, Tensor, Tensor]:
        return wire.unpack(
            self._wait(), self._hidden, self._top_k, self._dtype, self._weights_dtype, self._spec.payload
        )

    def combine(self, sums: Tensor) -> None:
        self._wait = self._mover.swap(sums.to(self._dtype).contiguous(), self._received, self._sent)

    def finish(self) -> Tensor:
        return added_rows(self._wait(), self._route.place, None)  # the operator would read the places to check them
