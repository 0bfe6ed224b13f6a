"""For a group of torch's backend "fake", whose other ranks do not exist: each of them sends what this one sends to it.

Shapes and indices are then like those of real ranks, values are not. It serves to compile for ranks that are not there.
"""

from __future__ import annotations

from torch import Tensor

from dscompile.distributed.routing import Spec
from dscompile.distributed.transports.rows import RowExchange, Wait


class Mirror:
    """A `rows.Mover` and, by it, a transport."""

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor, table: Tensor, spec: Spec) -> RowExchange:
        return RowExchange(x, indices, weights, table, spec, self)

    def swap(self, rows: Tensor, sent: list[int] | None, received: list[int] | None) -> Wait:
        return lambda: rows

    def counts(self, counts: Tensor) -> list[int]:
        found: list[int] = counts.tolist()
        return found

    def any(self, flag: Tensor) -> bool:
        return bool(flag)
