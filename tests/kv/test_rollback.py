"""Tokens that are taken back leave no trace in what decoding reads."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.kv.cache import PagedCache
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.kv.rollback import restore, save
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from support.paged import Ids, fill, greedy, scattered, tiny_layout

# How many tokens are drafted at once (for each of two requests), and how many of them are kept.
ROUNDS = st.lists(st.tuples(*[st.integers(1, 6)] * 2, *[st.integers(0, 6)] * 2), min_size=1, max_size=8)


@settings(max_examples=60)
@given(st.integers(1, 20), ROUNDS, st.integers(0, 1000))
def test_equal_to_storing_only_what_was_kept(length: int, rounds: list[tuple[int, int, int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Ids:
        return torch.randint(0, 99, (count,), generator=generator).tolist()

    cache = PagedCache(tiny_layout(), requests=2, token_pages=60)
    kept = [draw(length), draw(length + 3)]
    numbers = [cache.open(120), cache.open(120)]
    for number, tokens in zip(numbers, kept):
        fill(cache, number, tokens)
    for a, b, keep_a, keep_b in rounds:
        counts, keep = [a, b], [min(keep_a, a), min(keep_b, b)]
        saved = save(cache, numbers, counts)
        for i, number in enumerate(numbers):
            drafts = draw(counts[i])
            fill(cache, number, kept[i] + drafts, start=len(kept[i]))
            kept[i] = kept[i] + drafts[: keep[i]]
        restore(cache, saved, keep)
        fresh = PagedCache(tiny_layout(), requests=2, token_pages=60)
        for number, tokens in zip(numbers, kept):
            assert cache.request(number).length == len(tokens)
            alone = fresh.open(120)
            fill(fresh, alone, tokens)
            for (name, got), want in zip(cache.state_bytes(number).items(), fresh.state_bytes(alone).values()):
                assert got.equal(want), f"{name} after {len(tokens)} tokens"


def test_too_many_to_take_back() -> None:
    cache = PagedCache(tiny_layout(), requests=1, token_pages=9)
    number = cache.open(30)
    fill(cache, number, list(range(9)))
    with pytest.raises(ValueError, match="window.0: 7 tokens at once, allowed: up to 6"):
        save(cache, [number], [7])
    saved = save(cache, [number], [2])
    with pytest.raises(ValueError, match="3 accepted, allowed: 0 to 2"):
        restore(cache, saved, [3])


@pytest.mark.parametrize("length", [1, 2, 15, 16, 33])
def test_drafts_change_no_token(exact: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], length: int) -> None:
    """Greedy decoding with drafts, some right and some wrong, of two requests at once says what it says without."""
    prompts = [prompt(length, 1), prompt(length + 4, 2)]
    plain = PagedModel(exact, scattered(exact, 2, 400), rows=2, max_tokens=128)
    numbers = [plain.cache.open(len(p)) for p in prompts]
    want = greedy(plain, numbers, plain.prefill(numbers, prompts), 30)

    paged = PagedModel(exact, scattered(exact, 2, 400, skip=1), rows=3, max_tokens=128)
    numbers = [paged.cache.open(len(p)) for p in prompts]
    tokens = [[first] for first in paged.prefill(numbers, prompts).argmax(-1).tolist()]
    turn = 0
    while min(map(len, tokens)) < 30:
        turn += 1
        calls = []
        for i, known in enumerate(tokens):
            drafts = want[i][len(known) : len(known) + turn % 8]
            if turn % 3 and drafts:
                drafts = [*drafts[:-1], (drafts[-1] + 1) % 512]  # the last one is wrong
            calls.append([known[-1], *drafts])
        for known, more in zip(tokens, paged.verify(numbers, calls)):
            known += more
        lengths = [len(p) + len(known) - 1 for p, known in zip(prompts, tokens)]
        assert [paged.cache.request(n).length for n in numbers] == lengths
    for got, right in zip(tokens, want):
        assert got[:30] == right


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (20, 1), (20, 2), (33, 3), (14, 5), (47, 7)])
def test_no_trace_in_the_models_rows(
    exact: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], length: int, kept: int
) -> None:
    """8 tokens at once of which some stay, against a cache that ran those alone.

    Bytes differ where sums of another order round to another code: not one in a hundred of any pool.
    """
    ids, states = prompt(length + 8), []
    for count in (8, kept):
        run = PagedModel(exact, scattered(exact, 1, 64), rows=1, max_tokens=64)
        number = run.cache.open(length)
        run.prefill([number], [ids[:length]])
        run.cache.extend([number], [length + count])
        saved = save(run.cache, [number], [count])
        run.step([number], [ids[length : length + count]])
        restore(run.cache, saved, [kept])
        states.append(run.cache.state_bytes(number))
    for (name, after), want in zip(states[0].items(), states[1].values()):
        assert after.shape == want.shape
        if name.startswith("open_groups"):
            torch.testing.assert_close(after.view(torch.float32), want.view(torch.float32), rtol=0, atol=1e-5)
        elif after.numel():
            assert (after != want).float().mean() < 0.01, name
