"""Cases R04, R05, R07, R08, R09, R12, R13 and R16 of public failure reports (docs/cases.md), in paged form."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dscompile.kv.cache import PagedCache
from dscompile.kv.deepseek_v41 import PagedModel, batch_view
from dscompile.kv.rows import one_each
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from support.paged import Ids, fill, scattered, tiny_layout

LENGTH = 40
Model = DeepseekV41ForCausalLM


@pytest.fixture(scope="module")
def model() -> Model:
    """Window 8, so that 40 tokens are five windows; 32 index heads keep scores clear of ties."""
    return v41_model(
        torch.float32, engram_layer_ids=(1,), release_decode_keys=False, sliding_window=8, index_n_heads=32
    )


@pytest.fixture(scope="module")
def ids(prompt: Callable[..., Ids]) -> Ids:
    return prompt(LENGTH, 3)


@pytest.fixture(scope="module")
def one_shot(model: Model, ids: Ids) -> Tensor:
    """float32 [40, vocab], from the dense cache."""
    return dense(model, ids)


@torch.no_grad()
def dense(model: Model, ids: Ids) -> Tensor:
    return model(torch.tensor([ids]), torch.arange(len(ids))[None], model.new_cache(1, 64))[0]


def paged(model: Model, rows: int = 1, requests: int = 3, skip: int = 0) -> PagedModel:
    return PagedModel(model, scattered(model, requests, 64 * requests, skip), rows, max_tokens=64)


@torch.no_grad()
def feed(run: PagedModel, number: int, ids: Ids, sizes: Sequence[int]) -> Tensor:
    """Logits [T, vocab] of `ids` in chunks of the given sizes, after what the request holds."""
    logits = []
    for size in sizes:
        start = run.cache.request(number).length
        run.cache.extend([number], [start + size])
        part = ids[start : start + size]
        logits.append(run._run(one_each([number], [part], [start]), size)[0])
        run.cache.commit(number, start + size)
    return torch.cat(logits)


def pools(cache: PagedCache) -> dict[str, Tensor]:
    """Every pool without its scratch row, as bytes."""
    return {name: pool[:-1].clone().view(torch.uint8) for name, pool in cache.pools.items()}


def changed_rows(cache: PagedCache, before: dict[str, Tensor], name: str) -> set[int]:
    return set((pools(cache)[name] != before[name]).any(1).nonzero().flatten().tolist())


def test_r04_padding_writes_nothing() -> None:
    """Slots 3, -1, 5, -1 with NaN in the rows of -1: rows 3 and 5 change, and not a byte elsewhere."""
    cache = PagedCache(tiny_layout(), requests=3, token_pages=8)
    fill(cache, cache.open(20), list(range(20)))
    before = {name: pool.clone() for name, pool in cache.pools.items()}
    for spec in cache.layout.pools:
        rows = torch.full((4, spec.row_bytes), 0xFF, dtype=torch.uint8)
        rows[0], rows[2] = 17, 23
        cache.store(spec, torch.tensor([3, -1, 5, -1]), rows)
        pool = cache.pools[spec.name].view(torch.uint8)
        assert (pool[3] == 17).all() and (pool[5] == 23).all()
        keep = [row for row in range(len(pool)) if row not in (3, 5)]
        assert pool[keep].equal(before[spec.name].view(torch.uint8)[keep]), "the last row too"


def test_r04_idle_rows_and_padding_of_a_batch(model: Model, ids: Ids) -> None:
    """Idle rows, padded rows and rows of closed requests: only the live one's own rows change."""
    run = paged(model, rows=5)
    live, other = run.cache.open(16), run.cache.open(16)
    feed(run, other, ids, [13])
    before = pools(run.cache)
    view = batch_view(run.cache, [None, live, None, other, None], run.columns)
    positions = torch.full((5, 9), -1)
    positions[1, :6] = torch.arange(6)
    positions[2] = torch.arange(9)  # a row that has no pages
    with torch.no_grad():
        model(torch.tensor([ids[:9]] * 5), positions, view)
    run.cache.commit(live, 6)
    for spec in run.cache.layout.pools:
        own = set(run.cache.slots(live, spec, range(6 // spec.ratio if spec.kind == "rows" else 6)).tolist())
        assert changed_rows(run.cache, before, spec.name) <= own, spec.name


def test_r05_slots_out_of_bounds_write_nothing() -> None:
    cache = PagedCache(tiny_layout(), requests=3, token_pages=8)
    for spec in cache.layout.pools:
        last = len(cache.pools[spec.name]) - 1
        before = cache.pools[spec.name].clone()
        for slot in (last, 2**40 + 17, -(2**40), -2):
            rows = torch.full((2, spec.row_bytes), 5, dtype=torch.uint8)
            with pytest.raises(IndexError, match=f"slot {slot}, allowed: 0 to {last - 1}"):
                cache.store(spec, torch.tensor([last - 1, slot]), rows)
            assert cache.pools[spec.name].equal(before)
        with pytest.raises(TypeError, match="slots torch.int32"):
            cache.store(spec, torch.tensor([1], dtype=torch.int32), rows[:1])


@pytest.mark.parametrize("start", [15, 16, 17, 40, 2**40 + 17, -(2**40)])
def test_r05_positions_beyond_a_requests_pages(model: Model, ids: Ids, start: int) -> None:
    """15 still has a page and is stored; what has none is not, and the neighbours' rows stay as they are."""
    run = paged(model)
    guard, number, behind = run.cache.open(16), run.cache.open(16), run.cache.open(16)
    for each in (guard, number, behind):
        feed(run, each, ids, [15])
    before = pools(run.cache)
    view = batch_view(run.cache, [number], run.columns)
    with torch.no_grad():
        model(torch.tensor([ids[:3]]), torch.arange(start, start + 3)[None], view)
    window = run.cache.layout.pools[0]
    own = set(run.cache.slots(number, window, range(15, 16)).tolist()) if start == 15 else set()
    assert changed_rows(run.cache, before, "window.0") == own
    if start != 15:
        assert all(not changed_rows(run.cache, before, name) for name in before)


@pytest.mark.parametrize("sizes", [[3, 5, 1, 7, 8, 16], [24, 16], [39, 1], [7, 1, 1, 1, 30]])
def test_r07_prompt_over_several_forwards(model: Model, ids: Ids, one_shot: Tensor, sizes: list[int]) -> None:
    run = paged(model)
    torch.testing.assert_close(feed(run, run.cache.open(1), ids, sizes), one_shot, rtol=0, atol=1e-4)


def test_r08_decoding_equals_prefill(model: Model, ids: Ids, one_shot: Tensor) -> None:
    """8 tokens, then 32 steps of one; pages come as they are needed."""
    run = paged(model)
    number = run.cache.open(8)
    torch.testing.assert_close(feed(run, number, ids, [8]), one_shot[:8], rtol=0, atol=1e-4)
    for at in range(8, LENGTH):
        logits = run.step([number], [[ids[at]]])[0]
        torch.testing.assert_close(logits, one_shot[at : at + 1], rtol=0, atol=1e-4)
    assert len(run.cache.request(number).pages) == 5


def test_r09_chunk_longer_than_the_window(model: Model, ids: Ids, one_shot: Tensor) -> None:
    run = paged(model)
    torch.testing.assert_close(feed(run, run.cache.open(5), ids, [5, 35]), one_shot, rtol=0, atol=1e-4)
    other = [*ids[:39], (ids[39] + 1) % 512]
    got = feed(run, run.cache.open(5), other, [5, 35])
    torch.testing.assert_close(got[:39], one_shot[:39], rtol=0, atol=1e-4)
    assert not got[39].allclose(one_shot[39], atol=1e-4)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_r12_several_tokens_at_once(model: Model, ids: Ids, one_shot: Tensor, count: int) -> None:
    """After 5 tokens, then as many again: each token sees what it would see alone."""
    run = paged(model)
    number = run.cache.open(5)
    feed(run, number, ids, [5])
    for start in (5, 5 + count):
        got = run.step([number], [ids[start : start + count]])[0]
        torch.testing.assert_close(got, one_shot[start : start + count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("idle", [3, 32, 33])
def test_r13_idle_rows_in_a_batch(model: Model, ids: Ids, one_shot: Tensor, idle: int) -> None:
    """A row of 9 tokens, one of 1, one with a negative position, the rest idle; then nothing but idle rows."""
    run = paged(model, rows=idle + 2)
    a, b = run.cache.open(9), run.cache.open(9)
    view = batch_view(run.cache, [a, *[None] * idle, b], run.columns)
    positions = torch.full((idle + 2, 9), -1)
    positions[0], positions[-1, 0], positions[2] = torch.arange(9), 0, torch.arange(-4, 5)
    with torch.no_grad():
        got = model(torch.tensor([ids[:9]] * (idle + 2)), positions, view)
    torch.testing.assert_close(got[0], one_shot[:9], rtol=0, atol=1e-4)
    torch.testing.assert_close(got[-1, :1], one_shot[:1], rtol=0, atol=1e-4)
    before = pools(run.cache)
    for length in (1, 3):
        with torch.no_grad():
            view = batch_view(run.cache, [None] * (idle + 2), run.columns)
            assert (
                model(torch.zeros(idle + 2, length).long(), torch.full((idle + 2, length), -1), view).isfinite().all()
            )
    assert all(not changed_rows(run.cache, before, name) for name in before)


def test_r16_reuse_layers_read_this_forwards_source(ids: Ids) -> None:
    """Sources 0 and 2 of four layers. Every page that is not the request's is poisoned before each call."""
    sources = {
        "num_hidden_layers": 4, "compress_ratios": (2, 2, 1, 1), "kv_source_layer_ids": (0, 2),
        "index_source_layer_ids": (0, 2), "candidate_source_layer_id": None, "release_decode_keys": False,
    }  # fmt: skip
    model = v41_model(torch.float32, **sources)
    want, run = dense(model, ids), paged(model)
    number = run.cache.open(LENGTH)
    for start, end in [(0, 6), (6, 7), (7, 8), (8, 14), (14, 15), (15, 40)]:
        for spec in run.cache.layout.pools:
            request = run.cache.request(number)
            own = [request.state_page] if spec.in_state else request.pages
            pool = run.cache.pools[spec.name]
            foreign = torch.ones(len(pool), dtype=torch.bool)
            foreign[:-1].view(-1, spec.rows)[own] = False
            pool[foreign] = 0xFF if pool.dtype == torch.uint8 else float("nan")
        got = feed(run, number, ids, [end - start])
        torch.testing.assert_close(got, want[start:end], rtol=0, atol=1e-4)
