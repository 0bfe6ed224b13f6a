"""A bundle from one process to another: one interface, and the protocol that message transports share.

    sender                                      receiver
    header (fingerprints, sizes, checksums) ->
                                            <-  go: pages are reserved, or refused with the reason
    data frames, in any order               ->
                                            <-  done: it is a request now, or refused with the reason

Every wait has a limit: `timeout` seconds without anything from the other side. A receiver that gives up, for whatever
reason, gives its pages back first.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from typing import NamedTuple, Protocol

import torch

from dscompile.kv.bundle import BundleRefused, Header, Incoming, KVBundle, Room, as_buffer
from dscompile.kv.cache import PagedCache
from dscompile.kv.pages import OutOfPages

FRAME_BYTES = 4 << 20  # of payload in a frame
_HEAD = struct.Struct("<4s1s16sIQI")  # magic, kind, bundle id, part, offset, CRC-32 of all that and the payload
_MAGIC = b"DSKV"
_HEADER, _DATA, _GO, _DONE, _REFUSED = b"H", b"D", b"G", b"F", b"R"
_ANY = bytes(16)  # in place of a bundle's id, where a frame could not be read


class TransferError(RuntimeError):
    """The other side is gone, silent for too long, or does not follow the protocol."""


class TransferRefused(TransferError):
    """The other side did not take the bundle; `reason` is that of `BundleRefused`, or "pages" (try again later)."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"the receiver refused: {text}")
        self.reason = reason


class Transport(Protocol):
    """One end of a way from a prefill process to a decode process."""

    def send(self, bundle: KVBundle, timeout: float) -> None:
        """Returns when the receiver has made a request of it. TransferRefused, TransferError."""

    def receive(self, cache: PagedCache, timeout: float, convert: bool = False, room: Room = None) -> int:
        """The next bundle as a request of `cache`; see `import_kv`. BundleRefused, OutOfPages, TransferError."""

    def close(self) -> None:
        """Let go of what the transport holds."""


class Frame(NamedTuple):
    """One message. `bundle`: 16 bytes of the bundle's id; `part` and `offset` are of data frames."""

    kind: bytes
    bundle: bytes
    part: int
    offset: int
    payload: bytes | memoryview

    def pack(self) -> bytes:
        """As bytes, with a checksum."""
        head = _HEAD.pack(_MAGIC, self.kind, self.bundle, self.part, self.offset, 0)
        crc = zlib.crc32(self.payload, zlib.crc32(head))
        return b"".join((head[:-4], struct.pack("<I", crc), self.payload))

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> Frame:
        """BundleRefused for a frame that is not as it was sent."""
        if len(data) < _HEAD.size:
            raise BundleRefused("truncated", f"frame of {len(data)} bytes, allowed: >= {_HEAD.size}")
        magic, kind, bundle, part, offset, crc = _HEAD.unpack_from(data)
        payload = memoryview(data)[_HEAD.size :]
        head = _HEAD.pack(magic, kind, bundle, part, offset, 0)
        if magic != _MAGIC or zlib.crc32(payload, zlib.crc32(head)) != crc:
            raise BundleRefused("damaged", f"frame of {len(data)} bytes does not have its checksum")
        return Frame(kind, bundle, part, offset, payload)


class MessageTransport:
    """`Transport` over messages. A subclass gives `write` and `read`, both with a limit in seconds.

    After a refusal the receiver goes on receiving: what was on its way is passed over, and the sender learns the
    reason.
    """

    frame_bytes = FRAME_BYTES

    def write(self, message: bytes, timeout: float) -> None:
        """Hand one message to the other side. TransferError if it is gone or takes too long."""
        raise NotImplementedError

    def read(self, timeout: float) -> bytes | bytearray:
        """The next message. TransferError if the other side is gone or silent for too long."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether something has come that `read` would take now. Not every transport can tell."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what the transport holds."""

    def send(self, bundle: KVBundle, timeout: float) -> None:
        """See `Transport.send`."""
        name = bytes.fromhex(bundle.header.id)
        self.write(Frame(_HEADER, name, 0, 0, bundle.header.to_json().encode()).pack(), timeout)
        self._answer(name, _GO, timeout)
        for part, rows in enumerate(bundle.payload):
            data = as_buffer(rows)
            for offset in range(0, len(data), self.frame_bytes):
                frame = Frame(_DATA, name, part, offset, data[offset : offset + self.frame_bytes])
                self.write(frame.pack(), timeout)
        self._answer(name, _DONE, timeout)

    def receive(self, cache: PagedCache, timeout: float, convert: bool = False, room: Room = None) -> int:
        """See `Transport.receive`. What is left of a bundle that was given up is passed over."""
        incoming, name = self._accept(cache, timeout, convert, room)
        try:
            deadline = time.monotonic() + timeout
            while incoming.missing:
                frame = self._next(deadline)
                if frame.bundle != name or frame.kind != _DATA:
                    continue  # of a bundle that was given up, or the header once more
                before = incoming.missing
                incoming.put(frame.part, frame.offset, frame.payload)
                if incoming.missing < before:
                    deadline = time.monotonic() + timeout
            number = incoming.finish()
        except BaseException as error:
            incoming.abort()
            self._refuse(name, error, timeout)
            raise
        try:
            self.write(Frame(_DONE, name, 0, 0, b"").pack(), timeout)
        except TransferError:
            cache.close(number)  # the sender cannot know that it arrived, keeps the request and may send it again
            cache.imported.pop(incoming.header.id, None)
            raise
        return number

    def _accept(self, cache: PagedCache, timeout: float, convert: bool, room: Room) -> tuple[Incoming, bytes]:
        """Wait for a header and reserve its pages."""
        deadline = time.monotonic() + timeout
        try:
            frame = self._next(deadline)
            while frame.kind != _HEADER:
                frame = self._next(deadline)
        except BundleRefused as error:
            self._refuse(_ANY, error, timeout)
            raise
        try:
            incoming = Incoming(cache, Header.from_json(bytes(frame.payload).decode()), convert, room)
        except (BundleRefused, OutOfPages) as error:
            self._refuse(frame.bundle, error, timeout)
            raise
        try:
            self.write(Frame(_GO, frame.bundle, 0, 0, b"").pack(), timeout)
        except BaseException:
            incoming.abort()
            raise
        return incoming, frame.bundle

    def _next(self, deadline: float) -> Frame:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferError("nothing from the sender for longer than the timeout")
        return Frame.unpack(self.read(left))

    def _answer(self, name: bytes, wanted: bytes, timeout: float) -> None:
        """Wait for the receiver's word on this bundle."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError(f"no answer from the receiver in {timeout} s")
            try:
                frame = Frame.unpack(self.read(left))
            except BundleRefused as error:
                raise TransferError(f"answer cannot be read: {error}") from error
            if frame.bundle not in (name, _ANY):
                continue
            if frame.kind == _REFUSED:
                word = json.loads(bytes(frame.payload))
                raise TransferRefused(word["reason"], word["text"])
            if frame.kind == wanted:
                return

    def _refuse(self, name: bytes, error: BaseException, timeout: float) -> None:
        reason = error.reason if isinstance(error, BundleRefused) else "pages" if isinstance(error, OutOfPages) else ""
        word = json.dumps({"reason": reason or "aborted", "text": str(error)}).encode()
        try:
            self.write(Frame(_REFUSED, name, 0, 0, word).pack(), min(timeout, 1.0))
        except Exception:  # the sender may be what failed; it has a timeout of its own
            return


def as_tensor(message: bytes) -> torch.Tensor:
    """Bytes as a uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
