"""Which prefill rank gets a request."""

from __future__ import annotations

from dscompile.serving.requests import Request


class Router:
    """The prefill rank with the fewest prompt tokens that are under way gets the next request.

    Decode ranks need no choice here: a prompt that is stored goes to the first that has room.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ValueError(f"prefill ranks: {ranks}, allowed: >= 1")
        self.tokens = [0] * ranks
        self._where: dict[int, tuple[int, int]] = {}

    def choose(self, request: Request) -> int:
        """The rank that gets it, from 0. ValueError for a name that is under way."""
        if request.name in self._where:
            raise ValueError(f"request {request.name} is under way, allowed: a name of its own")
        rank = self.tokens.index(min(self.tokens))
        self.tokens[rank] += len(request.prompt)
        self._where[request.name] = (rank, len(request.prompt))
        return rank

    def where(self, name: int) -> int | None:
        """The rank that has it; None if no prefill rank has."""
        return self._where[name][0] if name in self._where else None

    def left(self, name: int) -> None:
        """A request has left its prefill rank. Nothing happens for one that is not there."""
        rank, tokens = self._where.pop(name, (0, 0))
        self.tokens[rank] -= tokens
