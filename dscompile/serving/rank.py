"""A rank's life: orders in, steps together with the other ranks of its instance, word of what happened out.

The ranks of an instance exchange tokens with one another in every layer, so that a step is one for all of them: before
each they tell one another whether anybody has work, and those that have none run idle rows.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dscompile.kv.bundle import export_kv
from dscompile.kv.transfer import MessageTransport
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.outbox import Outbox
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.requests import Failed, Finished, Request, RequestRefused
from dscompile.serving.senders import Senders

_IDLE_SECONDS = 0.001  # between looks when no rank of the instance has work

# (this rank has work, it is not done for good) -> the same of any rank of the instance.
Together = Callable[[bool, bool], tuple[bool, bool]]


@dataclass(frozen=True)
class Abort:
    """An order: forget the request of this name."""

    name: int


@dataclass(frozen=True)
class Left:
    """Word from a prefill rank: a request has left it."""

    name: int


Order = Request | Abort | None  # None: nothing comes after this


class Orders(Protocol):
    """Where orders come from: a queue of `queue` or `multiprocessing`."""

    def get_nowait(self) -> Any: ...


def alone(busy: bool, going: bool) -> tuple[bool, bool]:
    """`Together` of an instance of one rank."""
    return busy, going


def in_step(group: dist.ProcessGroup) -> Together:
    """`Together` of the ranks of a process group: one small all-reduce."""

    def ask(busy: bool, going: bool) -> tuple[bool, bool]:
        flags = torch.tensor([busy, going], dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        return bool(flags[0]), bool(flags[1])

    return ask


def serve_prefill(
    loop: PrefillLoop, outbox: Outbox, orders: Orders, tell: Callable[[Any], None], together: Together = alone
) -> None:
    """Until an order None has come to every rank of the instance and all its requests have left.

    tell: gets a `Left` for every request that has gone on, was aborted or has failed, a `Finished` for one whose first
    token is all that was wanted, and a `Failed` for one that this rank cannot run or no decode rank can hold. One that
    is refused for its name has not left: the one that is here by that name goes on.
    """
    closing = False
    while True:
        for order in _orders(orders):
            if order is None:
                closing = True
            elif isinstance(order, Abort):
                outbox.abort(order.name)
                if loop.abort(order.name):
                    tell(Left(order.name))
            else:
                _submit(loop, order, tell)
        for name in outbox.arrived():
            if name in loop.stored:
                loop.release(name)
                tell(Left(name))
        for failed in outbox.failed():
            if failed.name in loop.stored:
                loop.release(failed.name)
                tell(Left(failed.name))
                tell(failed)
        going = not closing or loop.busy or bool(loop.waiting) or bool(outbox.pending) or bool(loop.stored)
        busy, going = together(loop.busy, going)
        if not going:
            return
        if not busy:
            time.sleep(_IDLE_SECONDS)
            continue
        for each in loop.step():
            if each.request.tokens == 1:
                loop.release(each.request.name)
                tell(Left(each.request.name))
                tell(Finished(each.request.name, (each.first,)))
            else:
                outbox.put(export_kv(loop.paged.cache, each.number, each.note))


def serve_decode(
    loop: DecodeLoop,
    senders: Sequence[MessageTransport],
    orders: Orders,
    tell: Callable[[Any], None],
    timeout: float,
    together: Together = alone,
    stall: float = 5.0,
) -> None:
    """Until an order None has come to every rank of the instance, which is given when nothing is under way any more.

    tell: gets a `Finished` for every request, a `Refused` for a bundle that is not taken, and a `SenderGone` for a
    sender that was silent in the middle of a bundle or sent what is none; requests of the others, and what had come
    from it, go on. timeout: seconds of silence after which a sender counts as gone; steps are made meanwhile. stall:
    the same in the middle of a message, or while an answer is not taken: no step is made meanwhile.
    """
    incoming = Senders(loop, senders, tell, timeout, stall)
    closing = False

    def turn() -> bool:
        """Orders, what has come, a step -> whether it goes on. Also made while a sender is waited for."""
        nonlocal closing
        for order in _orders(orders):
            if order is None:
                closing = True
            elif isinstance(order, Abort):
                loop.abort(order.name, coming=True)
        incoming.receive(turn)
        busy, going = together(loop.busy, not closing or loop.busy or incoming.busy)
        if going and busy:
            for done in loop.step():
                tell(done)
        elif going:
            time.sleep(_IDLE_SECONDS)
        return going

    while turn():
        pass


def _submit(loop: PrefillLoop, request: Request, tell: Callable[[Any], None]) -> None:
    """One request that cannot be run must not end the rank, which has others."""
    try:
        loop.submit(request)
    except RequestRefused as error:
        if error.reason != "duplicate":
            tell(Left(request.name))
        tell(Failed(request.name, error.reason, str(error)))


def _orders(orders: Orders) -> list[Order]:
    found: list[Order] = []
    while True:
        try:
            found.append(orders.get_nowait())
        except queue.Empty:
            return found
