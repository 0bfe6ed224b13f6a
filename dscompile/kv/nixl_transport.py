"""Bundles over NIXL, by one-sided reads. Written against its public Python interface; not run on its hardware.

The sender puts a message into memory that it registered and tells the receiver where (a notification); the receiver
reads it into its own, and the completion of the read tells the sender.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from dscompile.kv.transfer import FRAME_BYTES, MessageTransport, TransferError, as_tensor

_POLL_SECONDS = 0.0005
_READY, _TAKEN = b"ready:", b"taken:"


def nixl_available() -> bool:
    """Whether the package imports."""
    try:
        importlib.import_module("nixl._api")
    except ImportError:
        return False
    return True


class NixlTransport(MessageTransport):
    """`Transport` between two NIXL agents.

    Each side makes one with a name, hands its `metadata` to the other (over any control channel) and calls `connect`
    with the other's. `agent` is a ready `nixl_agent`; by default one with the UCX backend is made.
    """

    def __init__(self, name: str, agent: Any = None, message_bytes: int = FRAME_BYTES + 4096) -> None:
        if agent is None:
            try:
                api = importlib.import_module("nixl._api")
            except ImportError as error:
                raise ImportError("NixlTransport needs the package nixl: pip install nixl") from error
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self.name, self._agent = name, agent
        self._out = torch.zeros(message_bytes, dtype=torch.uint8)
        self._in = torch.zeros(message_bytes, dtype=torch.uint8)
        self._registered = [agent.register_memory(self._out), agent.register_memory(self._in)]
        self._peer: str | None = None
        self._notes: list[bytes] = []
        self._serial = 0
        self.frame_bytes = min(FRAME_BYTES, message_bytes - 4096)
        if self.frame_bytes < 1:
            raise ValueError(f"message_bytes: {message_bytes}, allowed: > 4096")

    @property
    def metadata(self) -> bytes:
        """What the other side's `connect` takes."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> None:
        """Know the other side."""
        self._peer = _text(self._agent.add_remote_agent(metadata))

    def write(self, message: bytes, timeout: float) -> None:
        """Offer it, and wait until it was read."""
        if len(message) > len(self._out):
            raise TransferError(f"message of {len(message)} bytes, allowed: <= {len(self._out)} (message_bytes)")
        self._out[: len(message)] = as_tensor(message)
        self._serial += 1
        serial = b"%d" % self._serial
        where = self._agent.get_serialized_descs(self._agent.get_xfer_descs([self._out[: len(message)]]))
        self._agent.send_notif(self._other(), _READY + serial + b":" + b"%d:" % len(message) + where)
        taken = _TAKEN + serial
        self._wait(lambda: next((note for note in self._notes if note == taken), None), timeout, "took nothing")
        self._notes.remove(taken)

    def read(self, timeout: float) -> bytes:
        """Wait for an offer and read it."""
        deadline = time.monotonic() + timeout
        note = self._wait(
            lambda: next((note for note in self._notes if note.startswith(_READY)), None), timeout, "sent nothing"
        )
        self._notes.remove(note)
        _, serial, size, where = note.split(b":", 3)
        length = int(size)
        if not 0 < length <= len(self._in):
            raise TransferError(f"message of {length} bytes, allowed: 1 to {len(self._in)} (message_bytes)")
        local = self._agent.get_xfer_descs([self._in[:length]])
        remote = self._agent.deserialize_descs(where)
        handle = self._agent.initialize_xfer("READ", local, remote, self._other(), _TAKEN + serial)
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
        """Forget the other side and unregister the memory."""
        if self._peer is not None:
            self._agent.remove_remote_agent(self._peer)
        for registered in self._registered:
            self._agent.deregister_memory(registered)

    def _other(self) -> str:
        if self._peer is None:
            raise TransferError("no other side, allowed: after `connect`")
        return self._peer

    def _wait(self, found: Any, timeout: float, what: str) -> bytes:
        deadline, peer = time.monotonic() + timeout, self._other()
        while True:
            for sender, notes in self._agent.get_new_notifs().items():
                if _text(sender) == peer:
                    self._notes += notes
            note = found()
            if note is not None:
                return bytes(note)
            if time.monotonic() > deadline:
                raise TransferError(f"{peer} {what} for {timeout:.3g} s")
            time.sleep(_POLL_SECONDS)


def _text(name: str | bytes) -> str:
    """Names of agents come as either."""
    return name.decode() if isinstance(name, bytes) else name
