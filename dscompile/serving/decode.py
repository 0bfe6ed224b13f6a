"""What a decode rank does in a step: one token of every request that it has."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dscompile.kv.bundle import BundleRefused, Header, KVBundle, import_kv
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.kv.transfer import Transport
from dscompile.serving.requests import Finished, Note, Work, decode_room, vocabulary_of


@dataclass
class _Running:
    name: int
    tokens: list[int]
    wanted: int


class DecodeLoop:
    """Bundles in, generated tokens out. A request joins between two steps and leaves when it has all its tokens.

    A request takes a state page, and token pages for all that it will store, or does not come in (`OutOfPages`): what
    came in is never held up or thrown out. What could never come in, or would make a step fail for all, is refused
    before it has a page (`BundleRefused`). Every step is one call of `paged.rows` rows of one token.
    """

    def __init__(self, paged: PagedModel) -> None:
        """ValueError for a cache with more state pages than rows: requests could come in that no step can run."""
        pages = paged.cache.pages.state.pages
        if pages > paged.rows:
            raise ValueError(f"a cache for {pages} requests, allowed: <= {paged.rows}, the rows of a step")
        self.paged = paged
        self.running: dict[int, _Running] = {}
        self.work = Work()
        self._unwanted: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether a step would generate something."""
        return bool(self.running)

    def receive(self, transport: Transport, timeout: float) -> list[Finished]:
        """The next bundle of a transport; raises what `Transport.receive` does.

        OutOfPages, when rows or pages are taken: the sender learns of it and tries again later, or elsewhere.
        BundleRefused "length", when no pages would ever be enough, and "format", when its note is not as it should be.
        """
        return self._join(transport.receive(self.paged.cache, timeout, room=self._room))

    def take(self, bundle: KVBundle) -> list[Finished]:
        """A bundle that is here already. BundleRefused or OutOfPages leave everything as it was."""
        return self._join(import_kv(self.paged.cache, bundle, room=self._room))

    def step(self) -> list[Finished]:
        """One more token of every request -> those that now have all of theirs. Idle rows alone if there are none."""
        began = time.perf_counter()
        numbers = list(self.running)
        logits = self.paged.step(numbers, [self.running[number].tokens[-1:] for number in numbers])
        for number, token in zip(numbers, logits[:, -1].argmax(-1).tolist()):
            self.running[number].tokens.append(token)
        out = [done for number in numbers for done in self._leave(number)]
        if numbers:
            self.work.steps += 1
            self.work.tokens += len(numbers)
            self.work.seconds += time.perf_counter() - began
        return out

    def abort(self, name: int, coming: bool = False) -> bool:
        """Forget a request and free its pages -> whether it was here. `coming`: if not, do so when it arrives."""
        for number, each in self.running.items():
            if each.name == name:
                del self.running[number]
                self.paged.cache.close(number)
                self.work.aborted.append(name)
                return True
        if coming:
            self._unwanted.add(name)
        return False

    def _room(self, header: Header) -> int:
        """Tokens to reserve pages for. Asked before any page is taken, so that a refusal leaves nothing behind."""
        note = Note.of(header.note, vocabulary_of(self.paged))
        room, cache = decode_room(header), self.paged.cache
        pages = cache.pages.tokens.pages * cache.layout.page_tokens
        if room > min(self.paged.limit, pages):
            given = f"{header.length} tokens stored and {note.tokens} wanted are {room} to store"
            most = f"<= {min(self.paged.limit, pages)} (limit {self.paged.limit}, all pages {pages})"
            raise BundleRefused("length", f"request {note.name}: {given}, allowed: {most}")
        return room

    def _join(self, number: int) -> list[Finished]:
        note = Note.of(self.paged.cache.request(number).note)
        self.running[number] = _Running(note.name, [note.next], note.tokens)
        self.work.requests += 1
        if note.name in self._unwanted:
            self._unwanted.remove(note.name)
            self.abort(note.name)
            return []
        return self._leave(number)

    def _leave(self, number: int) -> list[Finished]:
        each = self.running[number]
        if len(each.tokens) < each.wanted:
            return []
        del self.running[number]
        self.paged.cache.close(number)
        return [Finished(each.name, tuple(each.tokens))]
