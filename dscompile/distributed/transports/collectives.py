"""torch.distributed's functional collectives: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, wait_tensor

from dscompile import compat
from dscompile.distributed.routing import Spec
from dscompile.distributed.transports.mirror import Mirror
from dscompile.distributed.transports.rows import RowExchange, Wait


class Collectives:
    """A `Mover` and, by it, a transport."""

    def __init__(self, group: str) -> None:
        self._group = compat.process_group(group)

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor, table: Tensor, spec: Spec) -> RowExchange:
        return RowExchange(x, indices, weights, table, spec, self)

    def swap(self, rows: Tensor, sent: list[int] | None, received: list[int] | None) -> Wait:
        pending = all_to_all_single(rows, received, sent, self._group)
        return lambda: wait_tensor(pending)

    def counts(self, counts: Tensor) -> list[int]:
        arriving: list[int] = wait_tensor(all_to_all_single(counts, None, None, self._group)).tolist()
        return arriving

    def any(self, flag: Tensor) -> bool:
        return bool(wait_tensor(all_reduce(flag.to(torch.int32), "max", self._group)))


def connect(group: str) -> Collectives | Mirror:
    if dist.get_backend(compat.process_group(group)) == "fake":
        return Mirror()
    return Collectives(group)
