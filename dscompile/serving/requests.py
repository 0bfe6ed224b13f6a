"""Requests as they travel: what is asked for, what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dscompile.kv.bundle import Header


@dataclass(frozen=True)
class Request:
    """A prompt to continue greedily.

    name: unique among all requests. prompt: token ids. tokens: how many to generate, the first one included.
    """

    name: int
    prompt: tuple[int, ...]
    tokens: int

    def __post_init__(self) -> None:
        if not self.prompt or self.tokens < 1:
            given = f"a prompt of {len(self.prompt)} tokens and {self.tokens} to generate"
            raise ValueError(f"request {self.name}: {given}, allowed: >= 1 of each")

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
        """For the bundle: all that decoding has to know."""
        return {"name": self.request.name, "next": self.first, "tokens": self.request.tokens}


@dataclass(frozen=True)
class Finished:
    """All generated tokens of a request."""

    name: int
    tokens: tuple[int, ...]


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
