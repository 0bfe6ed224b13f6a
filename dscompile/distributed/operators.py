"""The exchange as operators of a graph, namespace `dsv4_ep`.

    ticket = dispatch(x, indices, weights, table, load, after, ...)   starts to send
    rows, slots, weights = dispatch_wait(ticket, ..., after)          rows for this rank's experts
    ticket = combine(ticket, sums, after, ...)                        starts to send back
    y = combine_wait(ticket, x, dtype, after)                         sums of this rank's tokens

What lies between a start and its wait runs while rows travel. `after` is a tensor that a start must not overtake: ranks
whose graphs differ (other shapes) then still start exchanges in one order. For a wait it is what runs before it.

The pending exchange itself is a Python object. Its ticket is one byte of memory: no two that are pending have the same
address, and the compiler sees who needs whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dscompile import compat
from dscompile.distributed import agreement
from dscompile.distributed.failure import named_failures
from dscompile.distributed.routing import Spec
from dscompile.distributed.transports import Exchange, transport

NAMESPACE = "dsv4_ep"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_PENDING: dict[int, tuple[Spec, Exchange]] = {}

DISPATCH = (
    "dispatch(Tensor x, Tensor indices, Tensor weights, Tensor table, Tensor? load, Tensor? after, str group, "
    "int ranks, int slots, int capacity, str overflow, str payload, str transport, str agreed) -> Tensor"
)
DISPATCH_WAIT = (
    "dispatch_wait(Tensor ticket, Tensor x, Tensor indices, Tensor weights, int ranks, int capacity, str overflow, "
    "Tensor[]? after=None) -> (Tensor, Tensor, Tensor)"
)
COMBINE = "combine(Tensor ticket, Tensor sums, Tensor? after) -> Tensor"
COMBINE_WAIT = "combine_wait(Tensor ticket, Tensor x, ScalarType out_dtype, Tensor[]? after=None) -> Tensor"


def dispatch(
    x: Tensor, indices: Tensor, weights: Tensor, table: Tensor, load: Tensor | None, after: Tensor | None, group: str,
    ranks: int, slots: int, capacity: int, overflow: str, payload: str, transport_name: str, agreed: str,
) -> Tensor:  # fmt: skip
    """Start to send x [N, D] to the experts `indices` int [N, k] (-1: none), with their weights [N, k]: a ticket.

    table: `routing.slot_table`. load: int64 [experts], to which the tokens of each expert are added, or None; it is
    state of the exchange, which no operator of the graph reads. agreed: key of `agreement.announce`. The rest as in
    `Spec`. Raises ExchangeError, AgreementError, IndexError, ValueError as the transport does.
    """
    rank = torch.distributed.get_rank(compat.process_group(group))
    spec = Spec(group, ranks, rank, slots, capacity, overflow, payload)
    with named_failures(group, rank, "dispatch"):
        if agreed:
            agreement.ensure(group, agreed)
        if load is not None:
            there = (indices >= 0).flatten().long()
            load.scatter_add_(0, indices.clamp(min=0).flatten().long(), there)
        pending = transport(transport_name, group).dispatch(x, indices, weights, table, spec)
    return _ticket(x, spec, pending)


def dispatch_wait(
    ticket: Tensor, x: Tensor, indices: Tensor, weights: Tensor, ranks: int, capacity: int, overflow: str,
    after: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows for this rank's experts: [M, D] in x's dtype, slots int64 [M, k] (-1: none), weights [M, k].

    M is ranks * capacity in the padded form. x, indices and weights are those of the dispatch.
    """
    spec, pending = _of(ticket, take=False)
    with named_failures(spec.group, spec.rank, "dispatch"):
        return pending.arrive()


def combine(ticket: Tensor, sums: Tensor, after: Tensor | None) -> Tensor:
    """Start to send the sums [M, D] of the rows that arrived back: another ticket."""
    spec, pending = _of(ticket, take=True)
    with named_failures(spec.group, spec.rank, "combine"):
        pending.combine(sums)
    return _ticket(sums, spec, pending)


def combine_wait(ticket: Tensor, x: Tensor, out_dtype: torch.dtype, after: Sequence[Tensor] | None = None) -> Tensor:
    """The sums of this rank's tokens x [N, D], added up in fp32: [N, D] in `out_dtype`."""
    spec, pending = _of(ticket, take=True)
    with named_failures(spec.group, spec.rank, "combine"):
        return pending.finish().to(out_dtype)


def pending_exchanges() -> int:
    """How many exchanges have been started and not finished; 0 between steps unless one has failed."""
    return len(_PENDING)


def drop_pending() -> None:
    """Forget exchanges that a failed step left behind."""
    _PENDING.clear()


def _ticket(like: Tensor, spec: Spec, pending: Exchange) -> Tensor:
    ticket = torch.empty(1, dtype=torch.uint8, device=like.device)
    _PENDING[ticket.data_ptr()] = (spec, pending)
    return ticket


def _of(ticket: Tensor, take: bool) -> tuple[Spec, Exchange]:
    key = ticket.data_ptr()
    if key not in _PENDING:
        raise RuntimeError("an exchange was waited for that was not started, or is over")
    return _PENDING.pop(key) if take else _PENDING[key]


def _fake_ticket(like: Tensor, *rest: Any) -> Tensor:
    return like.new_empty((1,), dtype=torch.uint8)


def _fake_wait(
    ticket: Tensor, x: Tensor, indices: Tensor, weights: Tensor, ranks: int, capacity: int, overflow: str,
    after: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows: Any = ranks * capacity
    if capacity == 0 or overflow == "exact":
        rows = torch.library.get_ctx().new_dynamic_size()
    k = indices.shape[1]
    return (
        x.new_empty((rows, x.shape[1])), indices.new_empty((rows, k), dtype=torch.int64), weights.new_empty((rows, k))
    )  # fmt: skip


def _define(schema: str, kernel: Any, fake: Any) -> None:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)


_define(DISPATCH, dispatch, lambda x, *rest: _fake_ticket(x))
_define(DISPATCH_WAIT, dispatch_wait, _fake_wait)
_define(COMBINE, combine, lambda ticket, sums, after: _fake_ticket(sums))
_define(COMBINE_WAIT, combine_wait, lambda ticket, x, out_dtype, after=None: x.new_empty(x.shape, dtype=out_dtype))
