"""Requests through prefill, hand-over and decoding: the tokens of one process, nothing lost, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dscompile.kv.bundle import export_kv
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.kv.pages import OutOfPages
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, generate
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.requests import Request
from dscompile.serving.router import Router
from support.paged import scattered
from support.serving import VOCAB, Bytes, Pair, behind, draw_requests, small_model

Alone = Callable[[Request], tuple[int, ...]]


def small_pair(packed: bool = False, **prefill: int) -> Pair:
    """A decode side of three rows and too few pages for three long requests."""
    sizes = {"rows": 2, "requests": 4, "token_pages": 16, **prefill}
    return Pair(PrefillLoop(Bytes(**sizes), 5, packed), DecodeLoop(Bytes(3, 3, token_pages=9, page_tokens=8)))


@pytest.mark.parametrize(
    ("chunk", "longest", "packed"),
    [(1, 40, False), (7, 150, False), (64, 700, False), (700, 700, False), (1, 20, True), (16, 150, True)],
)
def test_random_requests(model: DeepseekV41ForCausalLM, alone: Alone, chunk: int, longest: int, packed: bool) -> None:
    """25 with each size of chunk. Pages of the decode side are too few for four long ones."""
    requests = draw_requests(25, longest, 6, 96, seed=chunk)
    prefill = PagedModel(model, scattered(model, 5, 2000), rows=3, max_tokens=704)
    decode = PagedModel(model, scattered(model, 4, 2 * longest + 100, skip=1, page_tokens=16), 4, max_tokens=720)
    pair = Pair(PrefillLoop(prefill, chunk, packed), DecodeLoop(decode))
    pair.run(requests)
    assert pair.done == {request.name: alone(request) for request in requests}
    assert pair.used_bytes() == 0
    assert pair.most_rows >= 2 and any(len(set(row)) > 1 for row in pair.positions), "rows at different positions"
    assert pair.prefill.work.tokens == sum(len(request.prompt) for request in requests)
    assert pair.decode.work.tokens == sum(request.tokens - 1 for request in requests)


@pytest.mark.parametrize(("chunk", "rows", "packed"), [(64, 3, False), (16, 8, True)])
def test_random_requests_in_bf16(chunk: int, rows: int, packed: bool) -> None:
    """Sums in another order round to other values: a request may differ from a token on that was nearly a tie."""
    model = small_model(torch.bfloat16)
    requests = draw_requests(25, 150, 6, 96, seed=chunk)
    prefill = PagedModel(model, scattered(model, 5, 2000), rows, max_tokens=704)
    pair = Pair(PrefillLoop(prefill, chunk, packed), DecodeLoop(PagedModel(model, scattered(model, 4, 500), 4, 720)))
    pair.run(requests)
    differ = 0
    for request in requests:
        want, got = generate(model, torch.tensor([request.prompt]), request.tokens)[0].tolist(), pair.done[request.name]
        assert len(got) == len(want)
        first = next((place for place, (a, b) in enumerate(zip(got, want)) if a != b), None)
        if first is not None:
            differ += 1
            assert behind(model, request, got[: first + 1]) <= 0.5, request
    assert differ <= 6 and pair.used_bytes() == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_thousand_requests_leave_nothing(packed: bool) -> None:
    """Through both caches, some of them aborted somewhere on their way; pages by count and by bytes."""
    requests, pair = draw_requests(1000, 18, 5, VOCAB, seed=1), small_pair(packed)
    gone: set[int] = set()

    def abort(turn: int) -> None:
        name = turn * 3
        if turn % 4 or name >= len(requests):
            return
        pair.way = type(pair.way)(each for each in pair.way if each.header.note["name"] != name)
        if pair.prefill.abort(name) or pair.decode.abort(name):
            gone.add(name)

    pair.run(requests, abort)
    assert pair.refused > 20 and len(gone) > 50
    assert pair.done == {each.name: Bytes.alone(each) for each in requests if each.name not in gone}
    for loop in (pair.prefill, pair.decode):
        cache = loop.paged.cache
        assert cache.pages.used_bytes == 0 and not cache.pages.requests and not cache._tables
        for pool in (cache.pages.state, cache.pages.tokens):
            assert sorted(pool._free) == list(range(pool.pages))
        assert not loop.running
    assert not pair.prefill.stored


def test_back_pressure_reaches_the_prompts_and_nothing_is_lost() -> None:
    """While decoding takes nothing, prompts stop where the prefill side has no pages left."""
    pair = small_pair(requests=3)
    requests = [Request(name, tuple(range(name, name + 12)), 4) for name in range(8)]
    for request in requests:
        pair.prefill.submit(request)
    held = pair.decode.paged.cache.open(72)
    for _ in range(20):
        pair.turn()
    assert pair.refused and not pair.done and len(pair.prefill.stored) == len(pair.way) == 3
    assert not pair.prefill.busy and len(pair.prefill.waiting) == 5
    with pytest.raises(OutOfPages):
        pair.decode.take(pair.way[0])
    pair.decode.paged.cache.close(held)
    pair.run([])
    assert pair.done == {each.name: Bytes.alone(each) for each in requests}
    assert pair.used_bytes() == 0


@pytest.mark.parametrize("where", ["waiting", "running", "stored", "arriving", "decoding"])
def test_an_aborted_request_frees_its_pages(where: str) -> None:
    pair = small_pair()
    victim, other = Request(0, tuple(range(11)), 5), Request(1, tuple(range(40, 47)), 5)
    for request in (victim, other):
        pair.prefill.submit(request)
    if where in ("running", "stored"):
        pair.prefill.step()
    if where == "stored":
        pair.prefill.step()
        pair.prefill.step()
        assert victim.name in pair.prefill.stored
    if where in ("arriving", "decoding"):
        while not pair.way:
            pair.way.extend(export_kv(pair.prefill.paged.cache, e.number, e.note) for e in pair.prefill.step()
                            if e.request.name == victim.name)  # fmt: skip
        if where == "arriving":
            assert not pair.decode.abort(victim.name, coming=True)
        pair.hand_over()
        if where == "decoding":
            pair.decode.step()
            assert pair.decode.abort(victim.name)
    else:
        assert pair.prefill.abort(victim.name) and not pair.prefill.abort(victim.name)
    assert pair.decode.paged.cache.pages.used_bytes == 0
    held = {each.number for each in pair.prefill.running} | set(pair.prefill.stored.values())
    assert set(pair.prefill.paged.cache.pages.requests) == held
    pair.prefill.abort(other.name)
    assert pair.used_bytes() == 0 and not pair.done
    pair.run([Request(2, victim.prompt, 5)])
    assert pair.done == {2: Bytes.alone(victim)}


def test_one_token_is_enough() -> None:
    pair = small_pair()
    pair.run([Request(0, (3,), 1), Request(1, (4, 5), 2)])
    assert [len(pair.done[name]) for name in (0, 1)] == [1, 2]
    assert pair.decode.work.steps == 1


def test_idle_steps_change_nothing(model: DeepseekV41ForCausalLM) -> None:
    paged = PagedModel(model, scattered(model, 2, 64), rows=2, max_tokens=64)
    before = {name: pool[:-1].clone() for name, pool in paged.cache.pools.items()}
    prefill, decode = PrefillLoop(paged, 8), DecodeLoop(paged)
    assert prefill.step() == [] and decode.step() == []
    assert all(paged.cache.pools[name][:-1].equal(pool) for name, pool in before.items())
    assert prefill.work.steps == decode.work.steps == 0


def test_refusals(model: DeepseekV41ForCausalLM) -> None:
    paged = PagedModel(model, scattered(model, 2, 64), rows=1, max_tokens=96)
    with pytest.raises(ValueError, match="prompt of 65 tokens, allowed: <= 64"):
        PrefillLoop(paged, 8).submit(Request(0, (1,) * 65, 1))
    with pytest.raises(ValueError, match="chunk: 97 tokens, allowed: 1 to 64"):
        PrefillLoop(paged, 97, packed=True)
    with pytest.raises(ValueError, match="chunk: 0 tokens"):
        PrefillLoop(paged, 0)
    with pytest.raises(ValueError, match="prompt of 0 tokens and 1 to generate"):
        Request(0, (), 1)
    number = paged.cache.open(8)
    bundle_of = PrefillLoop(paged, 8)
    with pytest.raises(ValueError, match="width: 1, allowed: 2 "):
        paged.feed([number], [[1]], 1)
    with pytest.raises(ValueError, match="3 tokens, allowed: 1 to 2"):
        paged.feed([number], [[1, 2, 3]], 2)
    assert not bundle_of.busy
    paged.feed([number], [[1, 2]], 2)
    with pytest.raises(ValueError, match="a cache for 2 requests, allowed: <= 1"):
        DecodeLoop(paged).take(export_kv(paged.cache, number))


def test_router_takes_the_rank_with_least_to_do() -> None:
    router = Router(2)
    long, short = Request(0, (1,) * 50, 1), [Request(name, (1,) * 20, 1) for name in range(1, 5)]
    assert [router.choose(each) for each in (long, *short[:3])] == [0, 1, 1, 1]
    assert router.where(0) == 0 and router.where(9) is None
    router.left(0)
    router.left(0)
    assert router.tokens == [0, 60] and router.choose(short[3]) == 0
    with pytest.raises(ValueError, match="request 1 is under way"):
        router.choose(short[0])
    with pytest.raises(ValueError, match="prefill ranks: 0"):
        Router(0)
