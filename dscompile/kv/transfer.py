"""A bundle from one process to another: one interface, and the protocol that message transports share.

    sender                                      receiver
    header (fingerprints, sizes, checksums) ->
                                            <-  go: pages are reserved, or refused with the reason
    data frames, in any order               ->
                                            <-  done: it is a request now, or refused with the reason

All of them name the try that they belong to, a random number of the sender: what is left on the way of a try that was
given up is passed over on both sides. A header of another try tells the receiver that the one before was given up.

Every wait has a limit: `timeout` seconds without anything from the other side. A receiver that gives up, for whatever
reason, gives its pages back first.
"""

from __future__ import annotations

import json
import secrets
import struct
import time
import zlib
from typing import NamedTuple, Protocol

import torch

from dscompile.kv.bundle import BundleRefused, Header, Incoming, KVBundle, Room, as_buffer, check_room
from dscompile.kv.cache import PagedCache
from dscompile.kv.pages import OutOfPages

FRAME_BYTES = 4 << 20  # of payload in a frame
_HEAD = struct.Struct("<4s1s16s8sIQI")  # magic, kind, bundle id, try, part, offset, CRC-32 of that and the payload
_MAGIC = b"DSK2"
_HEADER, _DATA, _GO, _DONE, _REFUSED = b"H", b"D", b"G", b"F", b"R"
_ANY = bytes(16), bytes(8)  # in place of a bundle's id and a try, where a frame could not be read


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
    """One message. `of`: 16 bytes of the bundle's id, 8 of the try; `part` and `offset` are of data frames."""

    kind: bytes
    of: tuple[bytes, bytes]
    part: int = 0
    offset: int = 0
    payload: bytes | memoryview = b""

    def pack(self) -> bytes:
        """As bytes, with a checksum."""
        head = _HEAD.pack(_MAGIC, self.kind, *self.of, self.part, self.offset, 0)
        crc = zlib.crc32(self.payload, zlib.crc32(head))
        return b"".join((head[:-4], struct.pack("<I", crc), self.payload))

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> Frame:
        """BundleRefused for a frame that is not as it was sent."""
        if len(data) < _HEAD.size:
            raise BundleRefused("truncated", f"frame of {len(data)} bytes, allowed: >= {_HEAD.size}")
        magic, kind, bundle, attempt, part, offset, crc = _HEAD.unpack_from(data)
        payload = memoryview(data)[_HEAD.size :]
        head = _HEAD.pack(magic, kind, bundle, attempt, part, offset, 0)
        if magic != _MAGIC or zlib.crc32(payload, zlib.crc32(head)) != crc:
            raise BundleRefused("damaged", f"frame of {len(data)} bytes does not have its checksum")
        return Frame(kind, (bundle, attempt), part, offset, payload)


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
        name = bytes.fromhex(bundle.header.id), secrets.token_bytes(8)
        self.write(Frame(_HEADER, name, payload=bundle.header.to_json().encode()).pack(), timeout)
        self._answer(name, _GO, timeout)
        for part, rows in enumerate(bundle.payload):
            data = as_buffer(rows)
            for offset in range(0, len(data), self.frame_bytes):
                frame = Frame(_DATA, name, part, offset, data[offset : offset + self.frame_bytes])
                self.write(frame.pack(), timeout)
        self._answer(name, _DONE, timeout)

    def receive(self, cache: PagedCache, timeout: float, convert: bool = False, room: Room = None) -> int:
        """See `Transport.receive`. What is left of a bundle that was given up is passed over."""
        check_room(room)
        header = self._header(timeout)
        while True:
            incoming = self._accept(header, cache, timeout, convert, room)
            done = self._collect(incoming, header, timeout)
            if isinstance(done, int):
                break
            header = done
        try:
            self.write(Frame(_DONE, header.of).pack(), timeout)
        except TransferError:
            cache.close(done)  # the sender cannot know that it arrived, keeps the request and may send it again
            cache.imported.pop(incoming.header.id, None)
            raise
        return done

    def _collect(self, incoming: Incoming, header: Frame, timeout: float) -> int | Frame:
        """The number of the new request; or the header of another try, for which the sender gave up this one."""
        try:
            deadline = time.monotonic() + timeout
            while incoming.missing:
                frame = self._next(deadline)
                if frame.kind == _HEADER and frame.of != header.of:
                    incoming.abort()
                    return frame
                if frame.of != header.of or frame.kind != _DATA:
                    continue  # of a try that was given up, or the header once more
                before = incoming.missing
                incoming.put(frame.part, frame.offset, frame.payload)
                if incoming.missing < before:
                    deadline = time.monotonic() + timeout
            return incoming.finish()
        except BaseException as error:
            incoming.abort()
            self._refuse(header.of, error, timeout)
            raise

    def _header(self, timeout: float) -> Frame:
        deadline = time.monotonic() + timeout
        try:
            frame = self._next(deadline)
            while frame.kind != _HEADER:
                frame = self._next(deadline)
        except BundleRefused as error:
            self._refuse(_ANY, error, timeout)
            raise
        return frame

    def _accept(self, header: Frame, cache: PagedCache, timeout: float, convert: bool, room: Room) -> Incoming:
        """Reserve the pages of a header and say so."""
        try:
            incoming = Incoming(cache, Header.from_json(bytes(header.payload).decode()), convert, room)
        except BaseException as error:
            self._refuse(header.of, error, timeout)
            raise
        try:
            self.write(Frame(_GO, header.of).pack(), timeout)
        except BaseException:
            incoming.abort()
            raise
        return incoming

    def _next(self, deadline: float) -> Frame:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferError("nothing from the sender for longer than the timeout")
        return Frame.unpack(self.read(left))

    def _answer(self, name: tuple[bytes, bytes], wanted: bytes, timeout: float) -> None:
        """Wait for the receiver's word on this try.

        A refusal of any counts too: it comes before the word on a header behind it, and that header gets no data.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError(f"no answer from the receiver in {timeout} s")
            try:
                frame = Frame.unpack(self.read(left))
            except BundleRefused as error:
                raise TransferError(f"answer cannot be read: {error}") from error
            if frame.of not in (name, _ANY):
                continue
            if frame.kind == _REFUSED:
                word = json.loads(bytes(frame.payload))
                raise TransferRefused(word["reason"], word["text"])
            if frame.kind == wanted:
                return

    def _refuse(self, name: tuple[bytes, bytes], error: BaseException, timeout: float) -> None:
        reason = error.reason if isinstance(error, BundleRefused) else "pages" if isinstance(error, OutOfPages) else ""
        word = json.dumps({"reason": reason or "aborted", "text": str(error)}).encode()
        try:
            self.write(Frame(_REFUSED, name, payload=word).pack(), min(timeout, 1.0))
        except Exception:  # the sender may be what failed; it has a timeout of its own
            return


def as_tensor(message: bytes) -> torch.Tensor:
    """Bytes as a uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
