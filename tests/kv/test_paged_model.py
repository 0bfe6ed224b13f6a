"""What `PagedModel` refuses changes nothing: no page taken, no row written, and the next call works."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from dscompile.kv.deepseek_v41 import PagedModel, paged_cache
from dscompile.kv.rollback import restore, save
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from support.paged import Ids, greedy, scattered

Model = DeepseekV41ForCausalLM


def snapshot(run: PagedModel) -> tuple[Any, ...]:
    cache = run.cache
    pools = {name: pool[:-1].clone().view(torch.uint8) for name, pool in cache.pools.items()}
    requests = {number: (r.length, tuple(r.pages)) for number, r in cache.pages.requests.items()}
    return pools, requests, cache.pages.state.available, cache.pages.tokens.available


def assert_unchanged(run: PagedModel, before: tuple[Any, ...]) -> None:
    after = snapshot(run)
    assert after[1:] == before[1:]
    assert all(pool.equal(before[0][name]) for name, pool in after[0].items())


BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    ([1.5], TypeError, "token id 1.5, allowed: an int"),
    (["a"], TypeError, "token id 'a', allowed: an int"),
    ([3] * 20 + [512], ValueError, "token id 512, allowed: 0 to 511"),
    ([-1], ValueError, "token id -1, allowed: 0 to 511"),
    ([], ValueError, "0 tokens, allowed: a list of >= 1"),
    (torch.tensor(3), ValueError, "tokens 3, allowed: a list of >= 1"),
    (torch.zeros(2), TypeError, "token id 0.0, allowed: an int"),
    (torch.zeros(1, 2, dtype=torch.int64), TypeError, r"token id \[0, 0\], allowed: an int"),
]


@pytest.mark.parametrize(("ids", "error", "says"), BAD_IDS)
@pytest.mark.parametrize("call", ["prefill", "feed", "pack", "step", "verify"])
def test_token_ids(
    model: Model, prompt: Callable[..., Ids], call: str, ids: Any, error: type[Exception], says: str
) -> None:
    run = PagedModel(model, scattered(model, 2, 80), rows=2, max_tokens=64)
    one, two = run.cache.open(24), run.cache.open(24)
    if call in ("step", "verify"):
        run.prefill([one, two], [prompt(8), prompt(9)])
        ids = ids[-1:] if isinstance(ids, list) else ids
    before = snapshot(run)
    extra = {"prefill": (8,), "feed": (32,), "pack": (32,)}.get(call, ())
    with pytest.raises(error, match=f"request {two}: {says}"):
        getattr(run, call)([one, two], [[1, 2], ids], *extra)
    assert_unchanged(run, before)


def test_ids_from_arrays_and_tensors(model: Model, prompt: Callable[..., Ids], alone: Callable[..., Ids]) -> None:
    ids, out = prompt(20), []
    for form in (numpy.array(ids), torch.tensor(ids), tuple(map(numpy.int64, ids))):
        run = PagedModel(model, scattered(model, 1, 64), rows=1, max_tokens=64)
        number = run.cache.open(20)
        out.append(greedy(run, [number], run.prefill([number], [form], 8), 3)[0])
    assert out == [alone(model, ids, 3)] * 3


def test_a_step_beyond_the_limit_leaves_the_request_as_it_was(model: Model, prompt: Callable[..., Ids]) -> None:
    run = PagedModel(model, paged_cache(model.config, 2, 256, 16), rows=2, max_tokens=32)
    number, other = run.cache.open(28), run.cache.open(16)
    run.prefill([number, other], [prompt(28), prompt(16)])
    before = snapshot(run)
    for call in (run.step, run.verify):
        with pytest.raises(ValueError, match=f"request {number}: 33 tokens, allowed: <= 32"):
            call([other, number], [[1], [1] * 5])
    with pytest.raises(ValueError, match="no number twice"):
        run.step([other, other], [[1], [1]])
    with pytest.raises(ValueError, match="tokens of 1 requests, allowed: 2, one list for each"):
        run.step([number, other], [[1]])
    narrow = PagedModel(model, run.cache, rows=2, max_tokens=16)
    with pytest.raises(ValueError, match=f"request {number}: 2 token pages, allowed: 1 columns"):
        narrow.step([other, number], [[1], [1]])
    with pytest.raises(ValueError, match=f"request {other}: 17 tokens, allowed: <= 16"):
        narrow.step([other], [[1]])
    assert_unchanged(run, before)
    run.step([number, other], [[1] * 4, [1]])
    assert [run.cache.request(each).length for each in (number, other)] == [32, 17]


def test_nothing_to_prefill(model: Model) -> None:
    run = PagedModel(model, scattered(model, 1, 64), rows=1, max_tokens=64)
    with pytest.raises(ValueError, match=r"requests \[\], allowed: at least one"):
        run.prefill([], [])


def test_published_pages_stay_what_they_are(
    model: Model, prompt: Callable[..., Ids], alone: Callable[..., Ids]
) -> None:
    """A second prefill of the same request, of any length, would write over pages that others share."""
    run = PagedModel(model, scattered(model, 3, 300), rows=1, max_tokens=64)
    first = run.cache.open(40)
    run.prefill([first], [prompt(40)])
    run.cache.publish(first, prompt(40))
    before = snapshot(run)
    for other in (prompt(40, 9), prompt(20, 9)):
        with pytest.raises(ValueError, match=f"request {first}: 40 tokens are stored, allowed: none before a prefill"):
            run.prefill([first], [other])
    assert_unchanged(run, before)
    second = run.cache.open(44, prompt(40))
    assert run.cache.request(second).shared == 32
    assert greedy(run, [second], run.prefill([second], [prompt(40)]), 3)[0] == alone(model, prompt(40), 3)


def test_a_shared_beginning_is_run_first_and_with_its_own_prompt(model: Model, prompt: Callable[..., Ids]) -> None:
    run = PagedModel(model, scattered(model, 3, 300), rows=1, max_tokens=64)
    first = run.cache.open(40)
    run.prefill([first], [prompt(40)])
    run.cache.publish(first, prompt(40), salt=b"image")
    second = run.cache.open(44, prompt(40), salt=b"image")
    before = snapshot(run)
    for call in (
        lambda: run.step([second], [[1]]),
        lambda: run.feed([second], [[1]], 8),
        lambda: run.pack([second], [[1]], 8),
    ):
        with pytest.raises(ValueError, match=f"request {second}: a shared beginning, allowed: `prefill`"):
            call()
    with pytest.raises(ValueError, match=f"request {second}: another prompt than it was opened with"):
        run.prefill([second], [prompt(40, 9)])
    with pytest.raises(ValueError, match=f"request {second}: prompt of 32 tokens, allowed: > 32, what it shares"):
        run.prefill([second], [prompt(40)[:32]])
    assert_unchanged(run, before)
    run.cache.pages.tokens.forget()
    run.prefill([second], [prompt(40)])


def test_one_token_behind_a_shared_beginning_is_no_decode_step(prompt: Callable[..., Ids]) -> None:
    """A window of 1 wants no token run again."""
    model = v41_model(torch.float32, sliding_window=1)
    run = PagedModel(model, paged_cache(model.config, 3, 256, 8), rows=1, max_tokens=64)
    first = run.cache.open(32)
    run.prefill([first], [prompt(32)])
    run.cache.publish(first, prompt(32))
    second, third = run.cache.open(33, prompt(33)), run.cache.open(33)
    assert run.cache.request(second).shared == 32
    torch.testing.assert_close(
        run.prefill([second], [prompt(33)]), run.prefill([third], [prompt(33)]), rtol=0, atol=2e-2
    )


@pytest.mark.parametrize("release_keys", [True, False])
def test_rows_of_decode_steps_are_published_where_a_prompt_gives_the_same(
    model: Model, exact: Model, prompt: Callable[..., Ids], release_keys: bool
) -> None:
    chosen = model if release_keys else exact
    run = PagedModel(chosen, scattered(chosen, 2, 200), rows=1, max_tokens=80)
    first = run.cache.open(20)
    tokens = greedy(run, [first], run.prefill([first], [prompt(20)]), 21)[0]
    whole = prompt(20) + tokens[:-1]
    assert run.cache.publish(first, whole) == (2 if release_keys else 5)
    second = run.cache.open(50, [*whole, 1, 2])
    logits = run.prefill([second], [[*whole, 1, 2]])
    alone = PagedModel(chosen, scattered(chosen, 1, 80, 5), rows=1, max_tokens=80)
    number = alone.cache.open(50)
    assert logits.argmax(-1).equal(alone.prefill([number], [[*whole, 1, 2]]).argmax(-1))


def test_sizes_that_are_no_ints(model: Model, prompt: Callable[..., Ids]) -> None:
    run = PagedModel(model, scattered(model, 2, 200), rows=2, max_tokens=64)
    one, two = run.cache.open(10), run.cache.open(10)
    run.prefill([one, two], [prompt(10), prompt(10)])
    before = snapshot(run)
    for call in (
        lambda: run.cache.open(64.0),
        lambda: run.cache.extend([one, two], [60, 60.5]),
        lambda: run.cache.commit(one, 1.5),
    ):
        with pytest.raises(TypeError):
            call()  # type: ignore[arg-type, no-untyped-call]
    saved = save(run.cache, [one], [2])
    with pytest.raises(ValueError, match=f"request {one}: 2.0 accepted, allowed: 0 to 2"):
        restore(run.cache, saved, [2.0])  # type: ignore[list-item]
    assert_unchanged(run, before)
