"""Requests, notes and bundles that must not come in: each is refused at the door, and what is there goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dscompile.kv.bundle import BundleRefused, KVBundle, export_kv
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from dscompile.serving.decode import DecodeLoop
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.requests import Request
from support.paged import scattered
from support.serving import Bytes, Pair

Alone = Callable[[Request], tuple[int, ...]]


def paged(model: DeepseekV41ForCausalLM, max_tokens: int = 64) -> PagedModel:
    return PagedModel(model, scattered(model, 2, 64), rows=2, max_tokens=max_tokens)


def bundles(source: Any, *notes: Any) -> list[KVBundle]:
    """The same three stored tokens with other notes; a note None is what a prefill rank writes."""
    loop = PrefillLoop(source, 8)
    loop.submit(Request(7, (1, 2, 3), 4))
    (each,) = loop.step()
    return [export_kv(source.cache, each.number, each.note if note is None else note) for note in notes]


@pytest.mark.parametrize("token", [-1, True, 1.0, "a", None])
def test_a_prompt_is_of_token_ids(token: Any) -> None:
    with pytest.raises(ValueError, match=r"request 3: token .* at 1 of its prompt, allowed: an int >= 0"):
        Request(3, (5, token), 1)


@pytest.mark.parametrize(("name", "tokens"), [("a", 1), (True, 1), (None, 1), (1, "a"), (1, 1.5), (1, True)])
def test_a_request_has_a_number_for_a_name_and_a_number_of_tokens(name: Any, tokens: Any) -> None:
    with pytest.raises(ValueError, match="allowed: (an )?int"):
        Request(name, (5,), tokens)


@pytest.mark.parametrize("packed", [False, True])
def test_a_token_that_the_model_does_not_have(model: DeepseekV41ForCausalLM, alone: Alone, packed: bool) -> None:
    loop, good = PrefillLoop(paged(model), 8, packed), Request(0, (95, 0), 1)
    with pytest.raises(ValueError, match="request 1: token 96 at 1 of its prompt, allowed: 0 to 95"):
        loop.submit(Request(1, (95, 96, 3), 1))
    assert not loop.busy
    loop.submit(good)
    assert [each.first for each in loop.step()] == list(alone(good))


@pytest.mark.parametrize("where", ["waiting", "running", "stored"])
@pytest.mark.parametrize("packed", [False, True])
def test_two_requests_of_one_name(where: str, packed: bool) -> None:
    """The second would take the place of the first, whose pages nobody would give back."""
    loop = PrefillLoop(Bytes(2, 3, 8), 2, packed)
    loop.submit(Request(4, (1, 2, 3, 4, 5), 3))
    for _ in range({"waiting": 0, "running": 1, "stored": 3}[where]):
        loop.step()
    assert bool(getattr(loop, where))
    with pytest.raises(ValueError, match="request 4 is here already, allowed: a name of its own"):
        loop.submit(Request(4, (6,), 2))
    while not loop.stored:
        loop.step()
    assert len(loop.paged.cache.pages.requests) == 1 and not loop.busy
    loop.release(4)
    assert loop.paged.cache.pages.used_bytes == 0
    loop.submit(Request(4, (6,), 2))
    assert loop.step() and loop.abort(4) and loop.paged.cache.pages.used_bytes == 0


NOTES = [
    {"next": 1}, {"name": 0, "next": 1}, {"name": 0, "tokens": 2}, 5, [1],
    {"name": "a", "next": 1, "tokens": 2}, {"name": True, "next": 1, "tokens": 2},
    {"name": 0, "next": 96, "tokens": 2}, {"name": 0, "next": -1, "tokens": 2}, {"name": 0, "next": "a", "tokens": 2},
    {"name": 0, "next": None, "tokens": 2}, {"name": 0, "next": True, "tokens": 2},
    {"name": 0, "next": 1, "tokens": 0}, {"name": 0, "next": 1, "tokens": "a"}, {"name": 0, "next": 1, "tokens": None},
]  # fmt: skip


def test_a_note_that_is_not_right_leaves_nothing_and_stops_nobody(model: DeepseekV41ForCausalLM, alone: Alone) -> None:
    source, loop = paged(model), DecodeLoop(paged(model))
    good, *bad = bundles(source, None, *NOTES)
    loop.take(good)
    before = loop.paged.cache.pages.used_bytes
    for bundle in bad:
        with pytest.raises(BundleRefused, match=r"^format: note .*, allowed: ") as refused:
            loop.take(bundle)
        assert refused.value.reason == "format"
        assert loop.paged.cache.pages.used_bytes == before and len(loop.paged.cache.pages.requests) == 1
        assert list(loop.running) == list(loop.paged.cache.pages.requests)
        assert bundle.header.id not in loop.paged.cache.imported
    done = [each for _ in range(3) for each in loop.step()]
    assert [each.tokens for each in done] == [alone(Request(7, (1, 2, 3), 4))]


def test_the_vocabulary_is_in_the_message(model: DeepseekV41ForCausalLM) -> None:
    (bundle,) = bundles(paged(model), {"name": 5, "next": 96, "tokens": 2})
    with pytest.raises(BundleRefused, match="note of request 5: next 96, allowed: an int from 0 to 95"):
        DecodeLoop(paged(model)).take(bundle)


def test_more_than_the_rank_could_ever_hold(model: DeepseekV41ForCausalLM) -> None:
    """Beyond its limit, or all of its pages: no time to wait for would help. The last that fits comes in."""
    source = paged(model)
    last, over = bundles(source, *({"name": 5, "next": 1, "tokens": tokens} for tokens in (14, 15)))
    loop = DecodeLoop(paged(model, max_tokens=16))
    with pytest.raises(BundleRefused) as refused:
        loop.take(over)
    assert refused.value.reason == "length" and loop.paged.cache.pages.used_bytes == 0
    assert str(refused.value) == (
        "length: request 5: 3 tokens stored and 15 wanted are 17 to store, allowed: <= 16 (limit 16, all pages 64)"
    )
    loop.take(last)
    assert len([each for _ in range(13) for each in loop.step()]) == 1
    few = Bytes(1, 1, token_pages=2)
    few.limit = 100
    (bundle,) = bundles(Bytes(1, 1, 4), {"name": 5, "next": 1, "tokens": 7})
    with pytest.raises(BundleRefused, match=r"9 to store, allowed: <= 8 \(limit 100, all pages 8\)"):
        DecodeLoop(few).take(bundle)


def test_what_nobody_can_hold_does_not_hold_up_the_others() -> None:
    pair = Pair(PrefillLoop(Bytes(2, 4, 16), 5), DecodeLoop(Bytes(2, 2, token_pages=5)))
    requests = [Request(name, tuple(range(name, name + 12)), 30 if name == 1 else 4) for name in range(5)]
    pair.run(requests)
    assert pair.failed == {1: "length"}
    assert pair.done == {each.name: Bytes.alone(each) for each in requests if each.name != 1}
    assert pair.used_bytes() == 0
