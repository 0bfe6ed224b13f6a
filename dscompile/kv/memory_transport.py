"""Bundles through shared memory of one host: two rings of bytes, one in each direction."""

from __future__ import annotations

import os
import struct
import sys
import time
import zlib
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

from dscompile.kv.transfer import MessageTransport, TransferError

_HEAD_BYTES = 64  # of each ring: bytes written, bytes read, process id of its writer
_ALIGN = 8  # of messages, so that the word before each is aligned and does not wrap
_LENGTH = struct.Struct("<II")  # of a message, and a checksum of it and its place
_LEAST, _MOST_BYTES = 1024, (1 << 32) - 1  # of a ring, of a message
_POLL_SECONDS = 0.0002


class SharedMemoryTransport(MessageTransport):
    """`Transport` between two processes of a host. One side makes it with `create`, the other has its `name`.

    A ring has one writer and one reader; each owns one of the two counters. What is relied on: CPython stores and loads
    an element of a memoryview of 8-byte words with one instruction, so that no counter is seen half-written (`struct`
    writes byte by byte); and stores are seen in their order, as on x86, so that a counter is not seen before the bytes
    that it counts. Where that does not hold (ARM may reorder stores), a length is looked at again until it has its
    checksum, and a frame that was read too early does not have its own: the bundle is refused as damaged, not taken.
    """

    def __init__(self, memory: SharedMemory, owner: bool) -> None:
        ring = memory.size // 2
        self._capacity = ring - _HEAD_BYTES
        if memory.size % (2 * _ALIGN) or self._capacity < _LEAST:
            raise ValueError(f"shared memory {memory.name}: {memory.size} bytes, allowed: what `create` made")
        assert memory.buf is not None
        self._memory, self._bytes, self._owner = memory, memory.buf, owner
        self._words = memory.buf.cast("Q")
        self._out, self._in = (0, ring) if owner else (ring, 0)
        self.frame_bytes = min(MessageTransport.frame_bytes, max(self._capacity // 4, 1))
        self._broken, self._closed = "", False
        self._put(self._out + 16, os.getpid())

    @classmethod
    def create(cls, capacity: int = 16 << 20) -> SharedMemoryTransport:
        """A new piece of shared memory with rings of `capacity` bytes; `close` removes it."""
        if not isinstance(capacity, int):  # before anything is made that would have to be removed
            raise TypeError(f"capacity: {capacity!r}, a {type(capacity).__name__}, allowed: int")
        if capacity < _LEAST:
            raise ValueError(f"capacity: {capacity} bytes, allowed: >= {_LEAST}")
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
        if len(message) > _MOST_BYTES:
            raise ValueError(f"message of {len(message)} bytes, allowed: <= {_MOST_BYTES}")
        word = _length_word(len(message), self._get(self._out))
        self._stream(b"".join((word, message, bytes(-len(message) % _ALIGN))), timeout)

    def read(self, timeout: float) -> bytearray:
        """A length and the bytes."""
        self._check()
        length = self._take_length(timeout)
        data = self._take(length + -length % _ALIGN, timeout)
        del data[length:]
        return data

    def ready(self) -> bool:
        """Whether bytes have come that were not read."""
        self._check(closed_only=True)
        return self._get(self._in) != self._get(self._in + 8)

    def close(self) -> None:
        """Let go of the memory; the side that made it removes it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._words.release()
        self._bytes.release()
        self._memory.close()
        if self._owner:
            with suppress(FileNotFoundError):  # somebody cleaned up
                self._memory.unlink()

    def _stream(self, data: bytes, timeout: float) -> None:
        view, deadline = memoryview(data), time.monotonic() + timeout
        while view:
            written, used = self._used(self._out)
            room = self._capacity - used
            if not 0 < room <= self._capacity:
                self._pause(deadline, "took nothing", timeout, len(view) < len(data))
                continue
            at = written % self._capacity
            count = min(room, len(view), self._capacity - at)
            start = self._out + _HEAD_BYTES + at
            self._bytes[start : start + count] = view[:count]
            self._put(self._out, written + count)
            view = view[count:]
            deadline = time.monotonic() + timeout

    def _take_length(self, timeout: float) -> int:
        """The length of the next message, when it is there as it was written."""
        deadline = time.monotonic() + timeout
        while True:
            written, used = self._used(self._in)
            if not _LENGTH.size <= used <= self._capacity:
                self._pause(deadline, "sent nothing", timeout, inside=False)
                continue
            read = written - used
            start = self._in + _HEAD_BYTES + read % self._capacity
            word = bytes(self._bytes[start : start + _LENGTH.size])
            length = int(_LENGTH.unpack(word)[0])
            if word == _length_word(length, read):
                self._put(self._in + 8, read + _LENGTH.size)
                return length
            self._pause(deadline, f"sent no length of a message ({word.hex()})", timeout, inside=True)

    def _take(self, length: int, timeout: float) -> bytearray:
        data, done, deadline = bytearray(length), 0, time.monotonic() + timeout
        while done < length:
            written, used = self._used(self._in)
            if not 0 < used <= self._capacity:
                self._pause(deadline, "sent nothing", timeout, inside=True)
                continue
            read = written - used
            at = read % self._capacity
            count = min(used, length - done, self._capacity - at)
            start = self._in + _HEAD_BYTES + at
            data[done : done + count] = self._bytes[start : start + count]
            self._put(self._in + 8, read + count)
            done += count
            deadline = time.monotonic() + timeout
        return data

    def _used(self, ring: int) -> tuple[int, int]:
        """Bytes written to a ring, and how many of them were not read.

        Less than none or more than the ring holds would be counters that do not belong together: callers look again.
        """
        written = self._get(ring)
        return written, written - self._get(ring + 8)

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

    def _check(self, closed_only: bool = False) -> None:
        if self._closed:
            raise TransferError(f"shared memory {self.name} is closed, allowed: before `close`")
        if self._broken and not closed_only:
            raise TransferError(f"given up in the middle of a message ({self._broken}); make a new one")

    def _get(self, at: int) -> int:
        return self._words[at // 8]

    def _put(self, at: int, value: int) -> None:
        self._words[at // 8] = value


def _length_word(length: int, place: int) -> bytes:
    """What is written before a message; what lay there before, of another place, does not pass for it."""
    return _LENGTH.pack(length, zlib.crc32(struct.pack("<IQ", length, place)))


def _state(process: int) -> str:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ", which is gone,"
    except PermissionError:
        pass
    return ""
