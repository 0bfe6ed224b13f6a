"""One request's rows as a bundle of bytes, and how a bundle becomes a request of another cache.

A bundle holds the rows that decoding reads, and nothing of page numbers: both caches may lie differently. What arrives
is collected beside the cache (`Incoming`), with its pages reserved from the first moment; it becomes a request only
when all of it is there and every checksum fits.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.kv.cache import PagedCache
from dscompile.kv.layout import INT64, PoolSpec

VERSION = 1
_REMEMBERED = 1 << 16  # ids of bundles that a cache refuses to take again

Reason = Literal["model", "format", "version", "damaged", "truncated", "duplicate", "length", "aborted"]


class BundleRefused(ValueError):
    """A bundle that a cache does not take; `reason` says why in one word. The cache is as it was."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason


@dataclass(frozen=True)
class Part:
    """Rows of one pool: `count` of them from position (or, for compressed rows, row number) `first` on."""

    pool: str
    format: str
    dim: int
    first: int
    count: int
    bytes: int
    crc: int


@dataclass(frozen=True)
class Header:
    """What a bundle says about itself.

    Attributes:
        version: of this description.
        id: of the bundle; a cache takes it once.
        model: fingerprint of the model.
        format: fingerprint of the sender's layout.
        length: tokens stored; the next one is at this position.
        parts: in the order of the payload.
        note: anything that JSON can hold, such as the first token to decode.
    """

    version: int
    id: str
    model: str
    format: str
    length: int
    parts: tuple[Part, ...]
    note: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """With a SHA-256 of everything else."""
        data = asdict(self)
        return json.dumps({**data, "digest": _digest(data)})

    @staticmethod
    def from_json(text: str) -> Header:
        """BundleRefused if it was written by another version, or is not as it was written."""
        try:
            data = json.loads(text)
            digest, version = data.pop("digest"), data["version"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BundleRefused("damaged", f"header cannot be read ({error!r})") from error
        if digest != _digest(data):
            raise BundleRefused("damaged", "header does not have its own digest")
        if version != VERSION:
            raise BundleRefused("version", f"bundle of version {version}, allowed: {VERSION}")
        try:
            return Header(**{**data, "parts": tuple(Part(**part) for part in data["parts"])})
        except (KeyError, TypeError) as error:
            raise BundleRefused("damaged", f"header has other fields ({error})") from error


# Tokens to reserve pages for: a number, or one that follows from the header; None: just those stored.
Room = int | Callable[[Header], int] | None


@dataclass(frozen=True)
class KVBundle:
    """A header and one uint8 tensor [count, row_bytes] on the CPU for each of its parts."""

    header: Header
    payload: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """Of the payload."""
        return sum(part.bytes for part in self.header.parts)


def export_kv(cache: PagedCache, number: int, note: dict[str, Any] | None = None) -> KVBundle:
    """The rows of a request, copied to the CPU. The request stays: `cache.close` it when the other side has it."""
    request = cache.request(number)
    if request.length < 1:
        raise ValueError(f"request {number}: {request.length} tokens stored, allowed: >= 1")
    parts, payload = [], []
    for spec in cache.layout.pools:
        held = spec.held(request.length)
        rows = cache.read(spec, cache.slots(number, spec, held)).cpu().contiguous()
        crc = checksum(rows)
        parts.append(Part(spec.name, spec.format, spec.dim, held.start, len(held), rows.numel(), crc))
        payload.append(rows)
    header = Header(
        VERSION, secrets.token_hex(16), cache.layout.model, cache.layout.fingerprint, request.length, tuple(parts),
        note or {},
    )  # fmt: skip
    return KVBundle(header, tuple(payload))


def import_kv(cache: PagedCache, bundle: KVBundle, convert: bool = False, room: Room = None) -> int:
    """A bundle becomes a request -> its number. BundleRefused or OutOfPages leave the cache as it was.

    `convert`: rows of another format are converted (`KVFormat.convert`, whose docstring says when that is exact)
    instead of refused. `room`: tokens to reserve pages for, by default just those stored. `cache.request(number).note`
    is the bundle's.
    """
    incoming = Incoming(cache, bundle.header, convert, room)
    try:
        for index, rows in enumerate(bundle.payload):
            incoming.put(index, 0, as_buffer(rows))
        return incoming.finish()
    except BaseException:
        incoming.abort()
        raise


class Incoming:
    """A bundle on its way in. Pages are reserved; `finish` makes a request of them, `abort` gives them back."""

    def __init__(self, cache: PagedCache, header: Header, convert: bool = False, room: Room = None) -> None:
        self.header = header
        self._cache = cache
        self._specs = _matching_pools(cache, header, convert)
        if header.id in cache.imported:
            raise BundleRefused("duplicate", f"bundle {header.id} came before")
        check_room(room)
        tokens = room(header) if callable(room) else room
        check_room(tokens, "room of the header")
        self._reserved = cache.pages.reserve(max(tokens or 0, header.length))
        try:
            self._bytes = [torch.empty(part.bytes, dtype=torch.uint8) for part in header.parts]
        except BaseException:
            cache.pages.cancel(self._reserved)
            raise
        self._reserved.note = header.note
        self._pieces: list[dict[int, int]] = [{} for _ in header.parts]
        self._open = True
        cache.imported[header.id] = None
        while len(cache.imported) > _REMEMBERED:
            cache.imported.popitem(last=False)

    @property
    def missing(self) -> int:
        """Bytes that have not come."""
        return sum(part.bytes for part in self.header.parts) - sum(sum(p.values()) for p in self._pieces)

    def put(self, part: int, offset: int, data: Any) -> None:
        """Bytes (any buffer) of a part, in any order; what comes twice must be the same. BundleRefused otherwise."""
        piece = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        if not self._open:
            raise BundleRefused("aborted", f"bundle {self.header.id} is no longer awaited")
        if not 0 <= part < len(self._bytes):
            raise BundleRefused("damaged", f"part {part}, allowed: 0 to {len(self._bytes) - 1}")
        whole, pieces, end = self._bytes[part], self._pieces[part], offset + len(piece)
        if offset < 0 or end > len(whole):
            raise BundleRefused("damaged", f"bytes {offset} to {end} of part {part}, allowed: 0 to {len(whole)}")
        if pieces.get(offset) == len(piece):
            if not torch.equal(whole[offset:end], piece):
                raise BundleRefused("damaged", f"bytes {offset} to {end} of part {part} came twice and differ")
            return
        if any(offset < start + size and start < end for start, size in pieces.items()):
            raise BundleRefused("damaged", f"bytes {offset} to {end} of part {part} overlap what came before")
        whole[offset:end] = piece
        if len(piece):
            pieces[offset] = len(piece)

    def finish(self) -> int:
        """All of it is there -> the number of the new request. After any failure the bundle may come again."""
        cache, number = self._cache, self._reserved.number
        try:
            self._check_complete()
            rows = [self._rows(*each) for each in zip(self._specs, self._bytes)]
            cache.adopt(self._reserved)
            cache.commit(number, self.header.length)
            for (spec, part), data in zip(self._specs, rows):
                cache.store(spec, cache.slots(number, spec, range(part.first, part.first + part.count)), data)
        except BaseException:
            if number in cache.pages.requests:  # what was reserved is the request's now, and goes with it
                self._open = False
                cache.close(number)
                cache.imported.pop(self.header.id, None)
            self.abort()
            raise
        self._open = False
        return number

    def _rows(self, match: tuple[PoolSpec, Part], data: Tensor) -> Tensor:
        """The bytes of a part as rows of the cache's pool, in its format."""
        spec, part = match
        if not part.count:
            return data.new_empty(0, spec.row_bytes)
        rows = data.view(part.count, -1)
        if part.format == spec.format:
            return rows
        return FORMATS[part.format].convert(rows, spec.dim, FORMATS[spec.format])

    def abort(self) -> None:
        """Give back the pages; the bundle may come again. Does nothing after `finish` or another `abort`."""
        if self._open:
            self._open = False
            self._cache.pages.cancel(self._reserved)
            self._cache.imported.pop(self.header.id, None)

    def _check_complete(self) -> None:
        if not self._open:
            raise BundleRefused("aborted", f"bundle {self.header.id} is no longer awaited")
        for index, (part, data, pieces) in enumerate(zip(self.header.parts, self._bytes, self._pieces)):
            there = sum(pieces.values())
            if there != part.bytes:
                raise BundleRefused("truncated", f"part {index} ({part.pool}) has {there} of {part.bytes} bytes")
            if checksum(data) != part.crc:
                raise BundleRefused("damaged", f"part {index} ({part.pool}) does not have its checksum")


def _matching_pools(cache: PagedCache, header: Header, convert: bool) -> list[tuple[PoolSpec, Part]]:
    """The cache's pool for every part. BundleRefused for a bundle that does not belong here."""
    layout = cache.layout
    if header.version != VERSION:
        raise BundleRefused("version", f"bundle of version {header.version}, allowed: {VERSION}")
    if header.model != layout.model:
        raise BundleRefused("model", f"rows of model {header.model}, allowed: {layout.model}")
    if header.length < 1:
        raise BundleRefused("length", f"{header.length} tokens, allowed: >= 1")
    names = [part.pool for part in header.parts]
    if names != [spec.name for spec in layout.pools]:
        raise BundleRefused("format", f"pools {names}, allowed: {[spec.name for spec in layout.pools]}")
    if header.format != layout.fingerprint and not convert:
        theirs = {part.pool: part.format for part in header.parts}
        unlike = {s.name: (theirs[s.name], s.format) for s in layout.pools if theirs[s.name] != s.format}
        raise BundleRefused("format", f"layout {header.format}, allowed: {layout.fingerprint}; unlike rows {unlike}")
    for spec, part in zip(layout.pools, header.parts):
        held = spec.held(header.length)
        if part.dim != spec.dim or (part.format != spec.format and INT64 in (part.format, spec.format)):
            ours = f"{spec.format} of {spec.dim} values"
            raise BundleRefused("format", f"{part.pool}: {part.format} of {part.dim} values, allowed: {ours}")
        if part.format not in FORMATS and part.format != INT64:
            raise BundleRefused("format", f"{part.pool}: {part.format!r}, allowed: {sorted(FORMATS)}")
        width = 8 * part.dim if part.format == INT64 else FORMATS[part.format].row_bytes(part.dim)
        if (part.first, part.count, part.bytes) != (held.start, len(held), len(held) * width):
            given = f"{part.count} rows from {part.first}, {part.bytes} bytes"
            wanted = f"{len(held)} rows from {held.start}, {len(held) * width} bytes"
            raise BundleRefused("format", f"{part.pool}: {given}, allowed: {wanted} for {header.length} tokens")
    return list(zip(layout.pools, header.parts))


def check_room(room: Any, name: str = "room") -> None:
    """TypeError for a `room` that is none."""
    whole = isinstance(room, int) and not isinstance(room, bool)
    if not (room is None or whole or (name == "room" and callable(room))):
        allowed = "int, None or a function of the header" if name == "room" else "int or None"
        raise TypeError(f"{name}: {room!r}, a {type(room).__name__}, allowed: {allowed}")


def as_buffer(rows: Tensor) -> memoryview:
    """The bytes of a uint8 tensor on the CPU; a view if it is contiguous."""
    array: Any = rows.contiguous().flatten().numpy()
    return memoryview(array)


def checksum(rows: Tensor) -> int:
    """CRC-32 of a uint8 tensor on the CPU."""
    return zlib.crc32(as_buffer(rows))


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
