"""What a prefill rank does in a step: a chunk of every prompt that is running."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.serving.requests import Prefilled, Request, RequestRefused, Work, vocabulary_of


@dataclass
class _Running:
    request: Request
    number: int
    done: int = 0


class PrefillLoop:
    """Prompts in, stored requests out. Their pages stay until `release`, so that nothing is lost on the way on.

    Every step is one call of `paged.rows` rows of `chunk` tokens, whatever is running: ranks that share experts stay
    in step, and a compiled model has one graph. A prompt has one row of a step, or, `packed`, as many as are left: in
    order of arrival, until no row or no token is left. A chunk of 1 is run in rows of 2: a call of one token is a
    decode step, in which the release scores other keys.
    """

    def __init__(self, paged: PagedModel, chunk: int, packed: bool = False) -> None:
        if not 1 <= chunk <= paged.limit:
            raise ValueError(f"chunk: {chunk} tokens, allowed: 1 to {paged.limit}")
        self.paged, self.chunk, self.packed = paged, chunk, packed
        self.waiting: deque[Request] = deque()
        self.running: list[_Running] = []
        self.stored: dict[int, int] = {}  # name -> number, until released
        self.work = Work()

    @property
    def busy(self) -> bool:
        """Whether a step would advance something. False while what waits has to wait for pages."""
        return bool(self.running) or bool(self.waiting) and self._fits(self.waiting[0])

    def submit(self, request: Request) -> None:
        """Take a request in. RequestRefused, a ValueError, for what could never be run here or would mix up two."""
        if self.has(request.name):
            raise RequestRefused("duplicate", f"request {request.name} is here already, allowed: a name of its own")
        if len(request.prompt) > self.paged.limit:
            given = f"prompt of {len(request.prompt)} tokens"
            raise RequestRefused("length", f"request {request.name}: {given}, allowed: <= {self.paged.limit}")
        request.check_vocabulary(vocabulary_of(self.paged))
        self.waiting.append(request)

    def has(self, name: int) -> bool:
        """Whether a request of this name waits, runs or is stored."""
        here = (*self.waiting, *(each.request for each in self.running))
        return name in self.stored or any(request.name == name for request in here)

    def step(self) -> list[Prefilled]:
        """Run the next tokens of running prompts, new ones included -> those that are stored whole.

        With nothing to run all rows are idle; call it nevertheless when another rank of the instance is busy.
        """
        began = time.perf_counter()
        self._admit()
        parts = self._parts()
        run = self.paged.pack if self.packed else self.paged.feed
        logits = run([each.number for each in self.running[: len(parts)]], parts, max(self.chunk, 2))
        best = logits.argmax(-1).tolist()
        out = []
        for each, part, first in zip(list(self.running), parts, best):
            each.done += len(part)
            if each.done == len(each.request.prompt):
                self.running.remove(each)
                self.stored[each.request.name] = each.number
                out.append(Prefilled(each.request, each.number, first))
        if parts:
            self.work.steps += 1
            self.work.tokens += sum(map(len, parts))
            self.work.requests += len(out)
            self.work.seconds += time.perf_counter() - began
        return out

    def _parts(self) -> list[tuple[int, ...]]:
        """Tokens of a step of the first running prompts: of all, or, packed, of as many as there are rows for."""
        if not self.packed:
            return [each.request.prompt[each.done : each.done + self.chunk] for each in self.running]
        parts, rows, width = [], self.paged.rows, max(self.chunk, 2)
        for each in self.running:
            if rows == 0:
                break
            parts.append(each.request.prompt[each.done : each.done + rows * width])
            rows -= self.paged.rows_for(len(parts[-1]), width)
        return parts

    def release(self, name: int) -> None:
        """The other side has it, or nobody wants it: its pages are free. Nothing happens for one that is gone."""
        number = self.stored.pop(name, None)
        if number is not None:
            self.paged.cache.close(number)

    def abort(self, name: int) -> bool:
        """Forget a request, wherever it is, and free its pages -> whether it was here."""
        here = name in self.stored
        self.release(name)
        kept = deque(request for request in self.waiting if request.name != name)
        here |= len(kept) < len(self.waiting)
        self.waiting = kept
        for each in [each for each in self.running if each.request.name == name]:
            self.paged.cache.close(each.number)
            self.running.remove(each)
            here = True
        if here:
            self.work.aborted.append(name)
        return here

    def _admit(self) -> None:
        """In order of arrival: a long prompt is not overtaken by short ones for ever."""
        while self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(_Running(request, self.paged.cache.open(len(request.prompt))))

    def _fits(self, request: Request) -> bool:
        return len(self.running) < self.paged.rows and self.paged.cache.pages.fits(len(request.prompt))
