"""Requests as they travel: what is asked for, what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dscompile.kv.bundle import BundleRefused, Header


class RequestRefused(ValueError):
    """A request that a prefill rank does not take; `reason`: `length`, `vocabulary` or `duplicate`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Request:
    """A prompt to continue greedily.

    name: unique among all requests. prompt: token ids. tokens: how many to generate, the first one included.
    """

    name: int
    prompt: tuple[int, ...]
    tokens: int

    def __post_init__(self) -> None:
        if not _is_int(self.name):
            raise ValueError(f"request {self.name!r}: a name of type {type(self.name).__name__}, allowed: int")
        if not _is_int(self.tokens):
            raise ValueError(f"request {self.name}: tokens {self.tokens!r}, allowed: an int >= 1")
        if not self.prompt or self.tokens < 1:
            given = f"a prompt of {len(self.prompt)} tokens and {self.tokens} to generate"
            raise ValueError(f"request {self.name}: {given}, allowed: >= 1 of each")
        for place, token in enumerate(self.prompt):
            if not _is_int(token) or token < 0:
                raise ValueError(f"request {self.name}: token {token!r} at {place} of its prompt, allowed: an int >= 0")

    def check_vocabulary(self, size: int | None) -> None:
        """RequestRefused for a token that a model of so many does not have; `None`: the size is not known."""
        if size is not None and max(self.prompt) >= size:
            given = f"token {max(self.prompt)} at {self.prompt.index(max(self.prompt))} of its prompt"
            raise RequestRefused("vocabulary", f"request {self.name}: {given}, allowed: 0 to {size - 1}")

    @property
    def room(self) -> int:
        """Tokens that are stored when the last one is generated; that one is not."""
        return len(self.prompt) + self.tokens - 1


@dataclass(frozen=True)
class Prefilled:
    """A request whose prompt is stored. number: in its cache. first: the first generated token."""

    request: Request
    number: int
    first: int

    @property
    def note(self) -> dict[str, Any]:
        """For the bundle: all that decoding has to know; `Note` reads it."""
        return {"name": self.request.name, "next": self.first, "tokens": self.request.tokens}


@dataclass(frozen=True)
class Note:
    """What a bundle's note says: the request's name, its first generated token, and how many it wants in all."""

    name: int
    next: int
    tokens: int

    @staticmethod
    def of(note: Any, vocabulary: int | None = None) -> Note:
        """BundleRefused for a note that is not complete and right: what one request says must not stop the others."""
        if not isinstance(note, dict) or not {"name", "next", "tokens"} <= note.keys():
            raise BundleRefused("format", f"note {note!r}, allowed: a dict with name, next and tokens")
        most = None if vocabulary is None else vocabulary - 1
        for key, least, limit in (("name", None, None), ("next", 0, most), ("tokens", 1, None)):
            value = note[key]
            if _is_int(value) and (least is None or value >= least) and (limit is None or value <= limit):
                continue
            span = "" if least is None else f" >= {least}" if limit is None else f" from {least} to {limit}"
            raise BundleRefused("format", f"note of request {note['name']!r}: {key} {value!r}, allowed: an int{span}")
        return Note(note["name"], note["next"], note["tokens"])


@dataclass(frozen=True)
class Finished:
    """All generated tokens of a request."""

    name: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """A request that nobody can run or hold: its pages are free, and nothing more comes of it.

    reason: one word, of `RequestRefused` or `BundleRefused`, or several where receivers differ. text: with numbers.
    """

    name: int
    reason: str
    text: str


@dataclass
class Work:
    """What a rank did. tokens: of prompts, or generated ones after the first. seconds: of steps with work here."""

    steps: int = 0
    tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    aborted: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second of the steps that had some."""
        return self.tokens / self.seconds if self.seconds else 0.0


def decode_room(header: Header) -> int:
    """Tokens to reserve pages for when a bundle comes in: as many as the request will ever store.

    A decode rank then never runs out of pages in the middle of a request.
    """
    return header.length + max(int(header.note.get("tokens", 1)) - 1, 0)


def vocabulary_of(paged: Any) -> int | None:
    """How many tokens the model of a `PagedModel` knows; `None` for a stand-in that does not say."""
    config = getattr(getattr(paged, "model", None), "config", None)
    return getattr(config, "vocab_size", None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
