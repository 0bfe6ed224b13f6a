"""Bundles over NIXL, by one-sided reads. Written against its public Python interface; not run on its hardware.

The sender puts a message into memory that it registered and tells the receiver where (a notification); the receiver
reads it into its own, and the completion of the read tells the sender. Its memory stays as it is until then, also when
it stopped waiting: what a notification points at is the message that it was sent for. Notifications are numbered;
a number that is not the last one is of a message that was given up with its transport.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dscompile.kv.transfer import FRAME_BYTES, MessageTransport, TransferError, as_tensor

_POLL_SECONDS = 0.0005
_HEAD_BYTES = 4096  # of a message, beside what a frame carries
_READY, _TAKEN, _FAILED = b"ready:", b"taken:", b"failed:"


def nixl_available() -> bool:
    """Whether the package imports."""
    try:
        importlib.import_module("nixl._api")
    except ImportError:
        return False
    return True


class _Inbox:
    """Notifications of an agent by sender. The agent hands each out once, to whichever of its transports asks."""

    def __init__(self) -> None:
        self.peers: set[str] = set()  # that some transport is connected to
        self._notes: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()

    def notes(self, agent: Any, peer: str, keep: Callable[[bytes], bool]) -> list[bytes]:
        """What came from `peer` and is not to be kept for later."""
        with self._lock:
            for sender, notes in agent.get_new_notifs().items():
                self._notes.setdefault(_text(sender), []).extend(notes)
            there = self._notes.pop(peer, [])
            kept = [note for note in there if keep(note)]
            if kept:
                self._notes[peer] = kept
        return [note for note in there if not keep(note)]


_INBOXES: WeakKeyDictionary[Any, _Inbox] = WeakKeyDictionary()


class NixlTransport(MessageTransport):
    """`Transport` between two NIXL agents. One agent may have several, each to another peer.

    Each side makes one with a name, hands its `metadata` to the other (over any control channel) and calls `connect`
    with the other's. `agent` is a ready `nixl_agent`; by default one with the UCX backend is made.
    """

    def __init__(self, name: str, agent: Any = None, message_bytes: int = FRAME_BYTES + _HEAD_BYTES) -> None:
        if agent is None:
            try:
                api = importlib.import_module("nixl._api")
            except ImportError as error:
                raise ImportError("NixlTransport needs the package nixl: pip install nixl") from error
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        if message_bytes <= _HEAD_BYTES:
            raise ValueError(f"message_bytes: {message_bytes}, allowed: > {_HEAD_BYTES}")
        self.name, self._agent = name, agent
        self._out = torch.zeros(message_bytes, dtype=torch.uint8)
        self._in = torch.zeros(message_bytes, dtype=torch.uint8)
        self._registered = [agent.register_memory(self._out), agent.register_memory(self._in)]
        self._inbox = _INBOXES.setdefault(agent, _Inbox())
        self._peer: str | None = None
        self._closed = False
        self._serial = time.time_ns()  # more than that of an earlier transport between the same two
        self._seen = 0
        self._untaken = False
        self._arrived: deque[bytes] = deque()  # messages that came while this side was writing
        self.frame_bytes = min(FRAME_BYTES, message_bytes - _HEAD_BYTES)

    @property
    def metadata(self) -> bytes:
        """What the other side's `connect` takes."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> None:
        """Know the other side. ValueError if a transport of this agent knows it already."""
        if self._closed or self._peer is not None:
            raise ValueError(f"{self.name} is {'closed' if self._closed else 'connected'}, allowed: connect once")
        peer = _text(self._agent.add_remote_agent(metadata))
        if peer in self._inbox.peers:
            raise ValueError(f"peer: {peer}, allowed: none that another open transport of this agent has")
        self._inbox.peers.add(peer)
        self._peer = peer

    def write(self, message: bytes, timeout: float) -> None:
        """Offer it, and wait until it was read. Before that, until the one before was, if that took too long.

        What is offered meanwhile is taken in: the other side may be waiting in its `write`, too.
        """
        if not 0 < len(message) <= len(self._out):
            raise TransferError(f"message of {len(message)} bytes, allowed: 1 to {len(self._out)} (message_bytes)")
        peer = self._other()
        if self._untaken:
            self._wait(lambda: self._result(timeout), timeout, "took nothing, the message before included,")
        self._serial += 1
        self._out[: len(message)] = as_tensor(message)
        where = self._agent.get_serialized_descs(self._agent.get_xfer_descs([self._out[: len(message)]]))
        self._agent.send_notif(peer, _READY + b"%d:%d:" % (self._serial, len(message)) + where)
        self._untaken = True
        if self._wait(lambda: self._result(timeout), timeout, "took nothing").startswith(_FAILED):
            raise TransferError(f"{peer} could not read a message of {len(message)} bytes")

    def read(self, timeout: float) -> bytes:
        """Wait for an offer and read it."""
        if not self._arrived:
            self._wait(lambda: self._take_in(timeout), timeout, "sent nothing")
        return self._arrived.popleft()

    def _take_in(self, timeout: float) -> bytes | None:
        """Read the message that is offered now; None if there is none."""
        offer = self._last_offer()
        if offer is None:
            return None
        _, serial, size, where = offer.split(b":", 3)
        try:
            self._arrived.append(self._fetch(int(size), where, _TAKEN + serial, timeout))
        except TransferError:
            self._agent.send_notif(self._other(), _FAILED + serial)  # it may use its memory again
            raise
        return offer

    def _fetch(self, length: int, where: bytes, note: bytes, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        if not 0 < length <= len(self._in):
            raise TransferError(f"message of {length} bytes, allowed: 1 to {len(self._in)} (message_bytes)")
        local = self._agent.get_xfer_descs([self._in[:length]])
        remote = self._agent.deserialize_descs(where)
        handle = self._agent.initialize_xfer("READ", local, remote, self._other(), note)
        try:
            state = self._agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                if time.monotonic() > deadline:
                    raise TransferError(f"read from {self._peer} not done within {timeout:.3g} s")
                time.sleep(_POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state == "ERR":
            raise TransferError(f"read from {self._peer} failed")
        return self._in[:length].numpy().tobytes()

    def close(self) -> None:
        """Forget the other side and unregister the memory. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._peer is not None:
            self._inbox.notes(self._agent, self._peer, keep=lambda _: False)
            self._inbox.peers.remove(self._peer)
            self._agent.remove_remote_agent(self._peer)
        for registered in self._registered:
            self._agent.deregister_memory(registered)

    def _result(self, timeout: float) -> bytes | None:
        """What the receiver says about the message that lies in `_out`; answers to others are dropped."""
        for note in self._inbox.notes(self._agent, self._other(), keep=lambda note: note.startswith(_READY)):
            if note in (_TAKEN + b"%d" % self._serial, _FAILED + b"%d" % self._serial):
                self._untaken = False
                return note
        self._take_in(timeout)
        return None

    def _last_offer(self) -> bytes | None:
        """The newest message that was not read before; older ones are no longer there."""
        offers = self._inbox.notes(self._agent, self._other(), keep=lambda note: not note.startswith(_READY))
        newest = max(offers, key=_number, default=None)
        if newest is None or _number(newest) <= self._seen:
            return None
        self._seen = _number(newest)
        return newest

    def _other(self) -> str:
        if self._closed or self._peer is None:
            raise TransferError(f"{self.name} has no other side, allowed: after `connect`, before `close`")
        return self._peer

    def _wait(self, look: Callable[[], bytes | None], timeout: float, what: str) -> bytes:
        deadline, peer = time.monotonic() + timeout, self._other()
        while (note := look()) is None:
            if time.monotonic() > deadline:
                raise TransferError(f"{peer} {what} for {timeout:.3g} s")
            time.sleep(_POLL_SECONDS)
        return note


def _number(note: bytes) -> int:
    return int(note.split(b":", 2)[1])


def _text(name: str | bytes) -> str:
    """Names of agents come as either."""
    return name.decode() if isinstance(name, bytes) else name
