"""Bundles point to point over torch.distributed (gloo, on CPUs)."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dscompile.kv.transfer import MessageTransport, TransferError, as_tensor

_MOST_BYTES = 1 << 31  # of a message: more is a length that was not one
_TAG = 0x6B76  # of these messages, so that they are apart from other exchanges of the group
_FOREVER = timedelta(days=3650)


class _Exchange:
    """A send or a receive under way, which a thread waits for without a limit; then it sets `news`.

    Gloo ends the connections of a group when a wait reaches its limit; and `is_completed` of its exchanges stays False
    until somebody has waited. So nobody who has a limit waits for gloo itself.
    """

    going: ClassVar[set[_Exchange]] = set()

    def __init__(self, start: Callable[[torch.Tensor], Any], data: torch.Tensor, news: threading.Event) -> None:
        self.data, self.over, self.error = data, False, ""
        self._news = news
        try:  # a rank that is gone shows here, or while it is waited for
            self._work = start(data)
        except RuntimeError as error:
            self._end(str(error).splitlines()[0])
            return
        self.going.add(self)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            done = self._work is not None and self._work.wait(_FOREVER)
            self._end("" if done else "the exchange was given up")
        except RuntimeError as error:
            self._end(str(error).splitlines()[0])

    def _end(self, error: str) -> None:
        self.error, self.over = error, True
        self.going.discard(self)
        self._news.set()

    def cancel(self) -> None:
        """End it, and with it every other exchange of the group."""
        with suppress(RuntimeError):
            self._work.wait(timedelta(milliseconds=1))
        self._thread.join(1.0)


@atexit.register
def _cancel_all() -> None:
    """Threads that still wait would hold up, or bring down, a process that ends."""
    for exchange in list(_Exchange.going):
        exchange.cancel()


class DistributedTransport(MessageTransport):
    """`Transport` to rank `peer` of a process group whose backend sends tensors of the CPU.

    A `timeout` that is over ends nothing: what was being received or sent stays so, the next `read` goes on with it,
    and the next `write` comes after it. Only a rank that is gone ends the group; every call says so from then on.
    There is one transport to a rank, as long as the group is there: another would not get the message that this one
    waits for.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("no process group, allowed: after torch.distributed.init_process_group")
        if peer == dist.get_rank(group) or not 0 <= peer < dist.get_world_size(group):
            others = [r for r in range(dist.get_world_size(group)) if r != dist.get_rank(group)]
            raise ValueError(f"peer: {peer}, allowed: {others}")
        self.peer = dist.get_global_rank(group, peer) if group is not None else peer
        self.group = group
        self._news = threading.Event()
        self._moves = 0  # exchanges that were done
        self._going: deque[_Exchange] = deque()  # lengths and messages that have not left
        self._coming: _Exchange | None = None  # the next length, or the message after one
        self._in_message = False
        self._arrived: deque[bytes] = deque()

    def write(self, message: bytes, timeout: float) -> None:
        """Its length, then its bytes; before that, what is left of the message before.

        An exchange is done when both sides take part. So what comes meanwhile is taken in: the other side may be
        writing, too.
        """
        if not 0 < len(message) <= _MOST_BYTES:
            raise TransferError(f"message of {len(message)} bytes to rank {self.peer}, allowed: 1 to {_MOST_BYTES}")
        self._until(self._sent, timeout, "send to")
        for data in (torch.tensor([len(message)]), as_tensor(message)):
            self._going.append(_Exchange(self._send, data, self._news))
        self._until(self._sent, timeout, "send to")

    def read(self, timeout: float) -> bytes:
        """Its length, then its bytes."""
        self._until(self._received, timeout, "receive from")
        return self._arrived.popleft()

    def ready(self) -> bool:
        """Whether a message has begun to come. TransferError when the group has ended."""
        return self._received() or self._in_message

    def _until(self, look: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self._news.clear()  # before looking, so that what comes meanwhile is not missed
            moves = self._moves
            if look():
                return
            if self._moves > moves:
                deadline = time.monotonic() + timeout
            if not self._news.wait(max(deadline - time.monotonic(), 0.0)):
                raise TransferError(f"cannot {what} rank {self.peer} within {timeout:.3g} s")

    def _sent(self) -> bool:
        while self._going and self._going[0].over:
            self._raise_error(self._going[0], "send to")
            self._going.popleft()
            self._moves += 1
        if self._going:
            self._take_in()  # an error of it is for `read`: what was sent may have arrived all the same
        return not self._going

    def _received(self) -> bool:
        if not self._arrived:
            coming = self._take_in()
            if not self._arrived:
                self._raise_error(coming, "receive from")
        return bool(self._arrived)

    def _take_in(self) -> _Exchange:
        """What has come, as far as it has; returns what is waited for now."""
        coming = self._coming or self._receive(1, torch.int64)
        while coming.over and not coming.error:
            self._moves += 1
            if self._in_message:
                self._arrived.append(coming.data.numpy().tobytes())
                self._in_message, coming = False, self._receive(1, torch.int64)
            elif 0 < (length := int(coming.data)) <= _MOST_BYTES:
                self._in_message, coming = True, self._receive(length, torch.uint8)
            else:
                coming.error = f"message of {length} bytes, allowed: 1 to {_MOST_BYTES}"
        return coming

    def _receive(self, count: int, dtype: torch.dtype) -> _Exchange:
        into = torch.empty(count, dtype=dtype)
        self._coming = _Exchange(lambda data: dist.irecv(data, self.peer, self.group, _TAG), into, self._news)
        return self._coming

    def _send(self, data: torch.Tensor) -> Any:
        return dist.isend(data, self.peer, self.group, _TAG)

    def _raise_error(self, exchange: _Exchange, what: str) -> None:
        if exchange.error:
            raise TransferError(
                f"cannot {what} rank {self.peer}, the group has ended, allowed: another one ({exchange.error})"
            )
