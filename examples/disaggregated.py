"""A V4.1 miniature served by two prefill instances and one decode instance, two processes each, on this machine.

    python examples/disaggregated.py [--requests 32]

In an instance, each rank has its own requests and cache (attention is data-parallel) and half of the experts. Prompts
that are stored are handed over through shared memory to the decode rank that has room.
Exit status 1: a request's tokens differ from those that the whole model gives eagerly in one process, or one is lost.
A request may differ from a token on that was nearly a tie: stored rows have 4 and 8 bits a value, and where compiled
code adds in another order, one value in some hundred thousand falls to the other side of a rounding boundary. No more
than a quarter of the requests may.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import dscompile
from dscompile.kv.deepseek_v41 import PagedModel, paged_cache
from dscompile.kv.memory_transport import SharedMemoryTransport
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import generate
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.outbox import Outbox, Sent
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.rank import Left, in_step, serve_decode, serve_prefill
from dscompile.serving.requests import Failed, Finished, Request, Work
from dscompile.serving.router import Router
from dscompile.serving.senders import SenderGone

PREFILL = ((0, 1), (2, 3))  # ranks of each prefill instance
DECODE = (4, 5)
INSTANCES = (*PREFILL, DECODE)
SENDERS = tuple(rank for ranks in PREFILL for rank in ranks)
CHUNK, PROMPT_ROWS = 64, 2  # of a step of the first instance: more than the 61 that the last layers need
TILE, TILES = 16, 8  # of the second: as many tokens a step, in rows that any prompt takes as it needs them
DECODE_ROWS = 4
MOST_PROMPT, MOST_TOKENS = 100, 20
NEAR_TIE = 0.5  # of the logits' standard deviation; the best logit is about 3 of them above the mean
SECONDS = 120.0  # of silence, in a hand-over or between ranks


@dataclass(frozen=True)
class Summary:
    """What a rank says at the end. pages: bytes in its cache that were not given back."""

    rank: int
    work: Work
    sent: Sent
    pages: int
    report: tuple[str, ...]


def requests(count: int) -> list[Request]:
    """The same ones in every run: prompts of 1 to 100 tokens, 1 to 20 to generate."""
    draw = random.Random(7)
    lengths = [(draw.randint(1, MOST_PROMPT), draw.randint(1, MOST_TOKENS)) for _ in range(count)]
    return [Request(name, tuple(draw.choices(range(512), k=p)), t) for name, (p, t) in enumerate(lengths)]


ROLES: dict[str, dict[str, Any]] = {
    "prefill": {"role": "prefill", "elide": "exact"},
    "packed prefill": {"role": "prefill"},
    "decode": {"role": "decode", "expert_capacity": DECODE_ROWS},
}


def role_of(rank: int) -> str:
    """The two prefill instances differ: one leaves out what the last layers need not do, the other packs prompts."""
    return "decode" if rank in DECODE else "prefill" if rank in PREFILL[0] else "packed prefill"


def compiled(model: Any, group: Any, role: str) -> Any:
    """One half of the experts here, and the graph of a role. Without Inductor: quick to start, slow to run."""
    dscompile.shard_experts(model, group)
    options = {"mesh": group, "inductor": False, **ROLES[role]}
    return torch.compile(model, backend="dsv4", options=options, fullgraph=True)


def serve(rank: int, folder: str, orders: list[Any], told: Any) -> None:
    """Process: one rank of one instance."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.filterwarnings("ignore", category=UserWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(orders))
    groups = [dist.new_group(ranks) for ranks in INSTANCES]
    group = next(group for group, ranks in zip(groups, INSTANCES) if rank in ranks)
    model = v41_model(torch.float32)
    role = role_of(rank)
    held, rows = {"prefill": (6, PROMPT_ROWS), "packed prefill": (6, TILES), "decode": (DECODE_ROWS, DECODE_ROWS)}[role]
    cache = paged_cache(model.config, held, tokens=512, page_tokens=16)
    paged = PagedModel(model, cache, rows, MOST_PROMPT + MOST_TOKENS, compiled(model, group, role))
    ways = open_ways(rank)
    sent = Sent()
    if role == "decode":
        paged.step([], [])  # compiles
        decode = DecodeLoop(paged)
        ready(told, rank)
        serve_decode(decode, ways, orders[rank], told.put, SECONDS, in_step(group))
        work = decode.work
    else:
        packed = role == "packed prefill"
        prefill, outbox = PrefillLoop(paged, TILE if packed else CHUNK, packed), Outbox(ways, SECONDS)
        prefill.step()
        ready(told, rank)
        serve_prefill(prefill, outbox, orders[rank], told.put, in_step(group))
        outbox.close()
        work, sent = prefill.work, outbox.sent
    told.put(Summary(rank, work, sent, cache.pages.used_bytes, report_lines()))
    dist.barrier()  # nobody takes shared memory away that another one still looks at
    for way in ways:
        way.close()
    dist.destroy_process_group()


def open_ways(rank: int) -> list[SharedMemoryTransport]:
    """One piece of shared memory for each pair of a prefill and a decode rank; decode ranks make them."""
    mine = {(p, rank): SharedMemoryTransport.create(1 << 20) for p in SENDERS} if rank in DECODE else {}
    everyone: list[Any] = [None] * (len(SENDERS) + len(DECODE))
    dist.all_gather_object(everyone, {pair: way.name for pair, way in mine.items()})
    if mine:
        return list(mine.values())
    names = {pair: name for each in everyone for pair, name in each.items()}
    return [SharedMemoryTransport.attach(names[rank, d]) for d in DECODE]


def ready(told: Any, rank: int) -> None:
    dist.barrier()
    told.put(rank)


def report_lines() -> tuple[str, ...]:
    """What the compiler says of this role, without its tables."""
    graph = dscompile.last_report().graphs[-1]
    records = [each for each in (graph.elision, graph.decoding) if each is not None]
    return (f"exchange: {graph.exchanges[0]}", *(line for each in records for line in each.lines()))


def route(asked: list[Request], orders: list[Any], news: Iterator[Any]) -> dict[int, tuple[int, ...]]:
    """Feed every request to a prefill rank, and wait for all tokens -> by name."""
    router, done = Router(len(SENDERS)), {}
    for request in asked:
        orders[SENDERS[router.choose(request)]].put(request)
    while len(done) < len(asked):
        word = next(news)
        if isinstance(word, Left):
            router.left(word.name)
        elif isinstance(word, Finished):
            done[word.name] = word.tokens
        elif isinstance(word, Failed):
            raise RuntimeError(f"request {word.name} failed: {word.text}")
        elif isinstance(word, SenderGone):
            raise RuntimeError(f"a decode rank lost rank {SENDERS[word.sender]}: {word.text}")
    for each in orders:
        each.put(None)
    return done


def words(told: Any, processes: list[Any]) -> Iterator[Any]:
    """What ranks say. RuntimeError when one has died or all are silent for too long."""
    last = time.monotonic()
    while True:
        try:
            word = told.get(timeout=1)
        except queue.Empty:
            dead = {rank: each.exitcode for rank, each in enumerate(processes) if each.exitcode}
            if dead or time.monotonic() - last > 5 * SECONDS:
                raise RuntimeError(f"ranks have ended or are silent; exit statuses {dead}") from None
            continue
        last = time.monotonic()
        yield word


def show(console: Console, summaries: list[Summary], seconds: float) -> None:
    table = Table("rank", "role", "requests", "tokens", "steps", "tokens/s", "handed over", "full before",
                  title=f"{seconds:.1f} s from first request to last token; measured here, now, without Inductor",
                  title_justify="left", show_edge=False)  # fmt: skip
    for each in sorted(summaries, key=lambda each: each.rank):
        work, role = each.work, role_of(each.rank)
        over = ("", "") if role == "decode" else (str(each.sent.bundles), str(each.sent.refused))
        table.add_row(str(each.rank), role, *map(str, (work.requests, work.tokens, work.steps)),
                      f"{work.rate:.0f}", *over)  # fmt: skip
    console.print(table)
    for role in ROLES:
        ranks = [each for each in summaries if role_of(each.rank) == role]
        rate = sum(each.work.rate for each in ranks)
        console.print(f"{role}: {rate:.0f} tokens per second, {len(ranks)} ranks together")
    sent = [each.sent for each in summaries]
    size, tokens, bundles = (sum(getattr(each, key) for each in sent) for key in ("bytes", "tokens", "bundles"))
    console.print(f"hand-over: {bundles} requests, {size} bytes, {size / max(tokens, 1):.0f} bytes a prompt token")
    for line in dict.fromkeys(line for each in summaries for line in each.report):
        console.print(line, style="dim")


@torch.no_grad()
def margin(model: Any, request: Request, tokens: tuple[int, ...]) -> float:
    """By how much the last of `tokens` is behind the best one in eager logits, in their standard deviations."""
    start, cache = len(request.prompt), model.new_cache(1, request.room)
    logits = model(torch.tensor([request.prompt]), torch.arange(start)[None], cache)[0, -1]
    for at, token in enumerate(tokens[:-1], start):
        logits = model(torch.tensor([[token]]), torch.tensor([[at]]), cache)[0, -1]
    return float((logits.max() - logits[tokens[-1]]) / logits.std())


def compare(asked: list[Request], done: dict[int, tuple[int, ...]]) -> tuple[list[str], list[str]]:
    """Lines for requests that differ from what one process gives: those that must not, and those at near ties."""
    model, wrong, ties = v41_model(torch.float32), [], []
    for request in asked:
        got = done.get(request.name, ())
        want = tuple(generate(model, torch.tensor([request.prompt]), request.tokens)[0].tolist())
        if got == want:
            continue
        first = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
        if first is None:
            wrong.append(f"request {request.name}: {len(got)} tokens, expected {len(want)}")
            continue
        behind = margin(model, request, got[: first + 1])
        line = f"request {request.name} differs from token {first} on, {behind:.3f} deviations behind the best"
        (ties if behind <= NEAR_TIE and len(got) == len(want) else wrong).append(line)
    if len(ties) > len(asked) // 4:
        wrong.append(f"{len(ties)} of {len(asked)} requests differ at near ties, allowed: a quarter")
    return wrong, ties


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=32)
    asked = requests(parser.parse_args().requests)
    console = Console(width=120)
    spawn = mp.get_context("spawn")
    count = len(SENDERS) + len(DECODE)
    orders, told = [spawn.Queue() for _ in range(count)], spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [spawn.Process(target=serve, args=(r, folder, orders, told), daemon=True) for r in range(count)]
        for process in processes:
            process.start()
        news = words(told, processes)
        console.print(f"{count} processes are compiling")
        for _ in range(count):
            next(news)
        began = time.perf_counter()
        done = route(asked, orders, news)
        seconds = time.perf_counter() - began
        summaries = [next(word for word in news if isinstance(word, Summary)) for _ in range(count)]
        for process in processes:
            process.join(SECONDS)
    show(console, summaries, seconds)
    wrong, ties = compare(asked, done)
    wrong += [f"rank {each.rank}: {each.pages} bytes of pages are in use" for each in summaries if each.pages]
    for line in ties:
        console.print(f"near tie: {line}", style="yellow")
    for line in wrong:
        console.print(f"FAILED {line}", style="red")
    if not wrong:
        others = f", {len(ties)} of them but for near ties" if ties else ""
        console.print(f"tokens of all {len(asked)} requests equal those of one eager process{others}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
