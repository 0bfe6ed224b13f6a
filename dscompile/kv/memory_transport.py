"""Bundles through shared memory of one host: two rings of bytes, one in each direction."""

from __future__ import annotations

import os
import struct
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

from dscompile.kv.transfer import MessageTransport, TransferError

_WORD = struct.Struct("<Q")
_HEAD_BYTES = 64  # of each ring: bytes written, bytes read, process id of its writer
_LENGTH = struct.Struct("<I")
_POLL_SECONDS = 0.0002


class SharedMemoryTransport(MessageTransport):
    """`Transport` between two processes of a host. One side makes it with `create`, the other has its `name`.

    A ring has one writer and one reader; each owns one of the two counters. Frames carry checksums, so that a write
    that is seen before its bytes are (on machines that reorder them) is refused, not taken.
    """

    def __init__(self, memory: SharedMemory, owner: bool) -> None:
        assert memory.buf is not None
        self._memory, self._bytes, self._owner = memory, memory.buf, owner
        ring = memory.size // 2
        self._capacity = ring - _HEAD_BYTES
        self._out, self._in = (0, ring) if owner else (ring, 0)
        self.frame_bytes = min(MessageTransport.frame_bytes, max(self._capacity // 4, 1))
        self._broken = ""
        self._put(self._out + 16, os.getpid())

    @classmethod
    def create(cls, capacity: int = 16 << 20) -> SharedMemoryTransport:
        """A new piece of shared memory with rings of `capacity` bytes; `close` removes it."""
        if capacity < 1024:
            raise ValueError(f"capacity: {capacity} bytes, allowed: >= 1024")
        memory = SharedMemory(create=True, size=2 * (-(-capacity // 64) * 64 + _HEAD_BYTES))
        return cls(memory, owner=True)

    @classmethod
    def attach(cls, name: str) -> SharedMemoryTransport:
        """The other end of `create`. FileNotFoundError if there is none of that name."""
        if sys.version_info >= (3, 13):
            return cls(SharedMemory(name, track=False), owner=False)
        # Until then every process that opens it registers it for removal; the one that made it is enough.
        register = resource_tracker.register
        resource_tracker.register = lambda *_: None  # type: ignore[assignment]
        try:
            memory = SharedMemory(name)
        finally:
            resource_tracker.register = register
        return cls(memory, owner=False)

    @property
    def name(self) -> str:
        """What `attach` takes."""
        return self._memory.name

    def write(self, message: bytes, timeout: float) -> None:
        """A length and the bytes, as far as there is room; the limit starts again when some were taken."""
        self._check()
        self._stream(_LENGTH.pack(len(message)) + message, timeout)

    def read(self, timeout: float) -> bytearray:
        """A length and the bytes."""
        self._check()
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, timeout, inside=False))
        return self._take(length, timeout, inside=True)

    def ready(self) -> bool:
        """Whether bytes have come that were not read."""
        return self._get(self._in) != self._get(self._in + 8)

    def close(self) -> None:
        """Let go of the memory; the side that made it removes it."""
        self._bytes.release()
        self._memory.close()
        if self._owner:
            self._memory.unlink()

    def _stream(self, data: bytes, timeout: float) -> None:
        view, deadline = memoryview(data), time.monotonic() + timeout
        while view:
            written, read = self._get(self._out), self._get(self._out + 8)
            room = self._capacity - (written - read)
            if room == 0:
                self._pause(deadline, "took nothing", timeout, len(view) < len(data))
                continue
            at = written % self._capacity
            count = min(room, len(view), self._capacity - at)
            start = self._out + _HEAD_BYTES + at
            self._bytes[start : start + count] = view[:count]
            self._put(self._out, written + count)
            view = view[count:]
            deadline = time.monotonic() + timeout

    def _take(self, length: int, timeout: float, inside: bool) -> bytearray:
        data, done, deadline = bytearray(length), 0, time.monotonic() + timeout
        while done < length:
            written, read = self._get(self._in), self._get(self._in + 8)
            if written == read:
                self._pause(deadline, "sent nothing", timeout, inside or done > 0)
                continue
            at = read % self._capacity
            count = min(written - read, length - done, self._capacity - at)
            start = self._in + _HEAD_BYTES + at
            data[done : done + count] = self._bytes[start : start + count]
            self._put(self._in + 8, read + count)
            done += count
            deadline = time.monotonic() + timeout
        return data

    def _pause(self, deadline: float, what: str, timeout: float, inside: bool) -> None:
        """Wait a little. `inside`: a message has begun, and what comes after it would be read as the rest of it."""
        if time.monotonic() > deadline:
            other = self._get(self._in + 16)
            who = "the other side, which never came," if not other else f"process {other}{_state(other)}"
            why = f"{who} {what} for {timeout:.3g} s"
            if inside:
                self._broken = why
            raise TransferError(why)
        time.sleep(_POLL_SECONDS)

    def _check(self) -> None:
        if self._broken:
            raise TransferError(f"given up in the middle of a message ({self._broken}); make a new one")

    def _get(self, at: int) -> int:
        return int(_WORD.unpack_from(self._bytes, at)[0])

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._bytes, at, value)


def _state(process: int) -> str:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ", which is gone,"
    except PermissionError:
        pass
    return ""
