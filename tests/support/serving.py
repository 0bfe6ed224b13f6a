"""Prefill and decode loops in one process, ways between them, and a stand-in for a model whose tokens follow from every
stored byte."""

from __future__ import annotations

import queue
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dscompile.kv.bundle import BundleRefused, KVBundle, export_kv
from dscompile.kv.cache import PagedCache
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.kv.pages import OutOfPages
from dscompile.kv.transfer import TransferError
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.requests import Request
from support.paged import tiny_layout
from support.transfers import QueueTransport

VOCAB = 89
SECONDS = 60.0  # more than anything here takes


class Bytes:
    """In place of `PagedModel`: stores rows that tell token and position, and reads all that decoding reads."""

    def __init__(self, rows: int, requests: int, token_pages: int, page_tokens: int = 4) -> None:
        self.cache = PagedCache(tiny_layout(page_tokens), requests, token_pages)
        self.rows, self.limit = rows, token_pages * page_tokens

    rows_for = staticmethod(PagedModel.rows_for)

    def feed(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int) -> Tensor:
        assert all(len(part) <= width for part in parts)
        return self.pack(numbers, parts, width)

    def pack(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], width: int) -> Tensor:
        assert sum(self.rows_for(len(part), width) for part in parts) <= self.rows
        for number, part in zip(numbers, parts, strict=True):
            assert part
            for token in part:
                self._store(number, token)
        return self._logits(numbers)

    def step(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        assert len(numbers) <= self.rows
        self.cache.extend(numbers, [self.cache.request(number).length + 1 for number in numbers])
        for number, (token,) in zip(numbers, tokens):
            self._store(number, token)
        return self._logits(numbers).unsqueeze(1)

    def _store(self, number: int, token: int) -> None:
        position = self.cache.request(number).length
        for spec in self.cache.layout.pools:
            if spec.kind == "rows" and (position + 1) % spec.ratio:
                continue
            place = position // spec.ratio if spec.kind == "rows" else position
            row = torch.full((1, spec.row_bytes), (token * 7 + position * 3) % 251, dtype=torch.uint8)
            self.cache.store(spec, self.cache.slots(number, spec, range(place, place + 1)), row)
        self.cache.commit(number, position + 1)

    def _logits(self, numbers: Sequence[int]) -> Tensor:
        logits = torch.zeros(len(numbers), VOCAB)
        for row, number in enumerate(numbers):
            crc = 0
            for rows in self.cache.state_bytes(number).values():
                crc = zlib.crc32(rows.numpy().tobytes(), crc)
            logits[row, crc % VOCAB] = 1
        return logits

    @staticmethod
    def alone(request: Request) -> tuple[int, ...]:
        """All tokens of a request in a cache of its own."""
        model = Bytes(1, 1, 40)
        number = model.cache.open(len(request.prompt))
        tokens = [int(model.feed([number], [request.prompt], 160).argmax())]
        while len(tokens) < request.tokens:
            tokens.append(int(model.step([number], [tokens[-1:]]).argmax()))
        return tuple(tokens)


def small_model(dtype: torch.dtype) -> DeepseekV41ForCausalLM:
    """Window only; Full and Reuse of ratio 2; Full of ratio 1. 32 index heads keep scores clear of ties."""
    return v41_model(
        dtype, num_hidden_layers=4, compress_ratios=(0, 2, 2, 1), kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3), candidate_source_layer_id=3, index_n_heads=32, hidden_size=64, vocab_size=96,
        engram_layer_ids=(1,),
    )  # fmt: skip


@torch.no_grad()
def behind(model: DeepseekV41ForCausalLM, request: Request, tokens: Sequence[int]) -> float:
    """By how much the last of `tokens` is behind the best one that follows the others, in the logits' deviations."""
    start, cache = len(request.prompt), model.new_cache(1, request.room)
    logits = model(torch.tensor([request.prompt]), torch.arange(start)[None], cache)[0, -1]
    for at, token in enumerate(tokens[:-1], start):
        logits = model(torch.tensor([[token]]), torch.tensor([[at]]), cache)[0, -1]
    return float((logits.max() - logits[tokens[-1]]) / logits.std())


def draw_requests(count: int, longest: int, tokens: int, vocab: int, seed: int = 0) -> list[Request]:
    """Random prompts of 1 to `longest` tokens, both ends included, and 1 to `tokens` to generate."""
    draw = random.Random(seed)
    lengths = [1, 2, longest, *(draw.randint(1, longest) for _ in range(count))][:count]
    return [
        Request(name, tuple(draw.choices(range(vocab), k=length)), draw.randint(1, tokens))
        for name, length in enumerate(lengths)
    ]


class Pair:
    """A prefill and a decode loop by turns. Bundles that find no room wait, and keep their pages at the sender."""

    def __init__(self, prefill: PrefillLoop, decode: DecodeLoop) -> None:
        self.prefill, self.decode = prefill, decode
        self.way: deque[KVBundle] = deque()
        self.done: dict[int, tuple[int, ...]] = {}
        self.failed: dict[int, str] = {}
        self.refused = self.most_rows = 0
        self.positions: set[tuple[int, ...]] = set()

    def turn(self) -> None:
        if self.prefill.busy:
            for each in self.prefill.step():
                self.way.append(export_kv(self.prefill.paged.cache, each.number, each.note))
        self.hand_over()
        if self.decode.busy:
            lengths = [self.decode.paged.cache.request(number).length for number in self.decode.running]
            self.most_rows = max(self.most_rows, len(lengths))
            self.positions.add(tuple(lengths))
            self._note(self.decode.step())

    def hand_over(self) -> None:
        while self.way:
            try:
                self._note(self.decode.take(self.way[0]))
            except OutOfPages:
                self.refused += 1
                return
            except BundleRefused as error:
                self.failed[self.way[0].header.note["name"]] = error.reason
            self.prefill.release(self.way.popleft().header.note["name"])

    def run(self, requests: Sequence[Request], after: Callable[[int], None] = lambda turn: None) -> None:
        """Until all are done. `after` every turn."""
        for request in requests:
            self.prefill.submit(request)
        turn = 0
        while self.prefill.waiting or self.prefill.running or self.way or self.decode.running:
            self.turn()
            after(turn)
            turn += 1
            assert turn < 20_000, "nothing moves any more"

    def used_bytes(self) -> int:
        return self.prefill.paged.cache.pages.used_bytes + self.decode.paged.cache.pages.used_bytes

    def _note(self, finished: Sequence[object]) -> None:
        for each in finished:
            assert each.name not in self.done
            self.done[each.name] = each.tokens


class Way(QueueTransport):
    """Messages in a queue, of which the receiver can tell whether there is one."""

    def ready(self) -> bool:
        return not self._in.empty()


class Slow(Way):
    """A sender's end that waits for `go` before it writes rows."""

    go: threading.Event

    def write(self, message: bytes, timeout: float) -> None:
        if message[4:5] == b"D":
            assert self.go.wait(SECONDS)
        super().write(message, timeout)


class Cut(Way):
    """A receiver's end where a message has begun, and the rest of it never comes."""

    waited: float = 0.0

    def ready(self) -> bool:
        return True

    def read(self, timeout: float) -> bytes:
        time.sleep(timeout)
        self.waited += timeout
        raise TransferError(f"sent nothing for {timeout:.3g} s")


def way(end: type[Way] = Way, other: type[Way] = Way) -> tuple[Any, Any]:
    """Sender's and receiver's end."""
    there: queue.Queue[bytes] = queue.Queue()
    back: queue.Queue[bytes] = queue.Queue()
    return end(there, back), other(back, there)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
