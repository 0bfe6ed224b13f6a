"""Several requests in one flat batch: what each gives and stores is what it gives and stores by itself."""

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.kv import deepseek_v41_layout
from dscompile.kv.deepseek_v41 import PagedModel, batch_view
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, attention, block, checks, indexer
from dscompile.models.deepseek_v41.plan import joined_positions
from support.paged import Ids, greedy, scattered

Model = DeepseekV41ForCausalLM
ROWS = 9


def packed_steps(lengths: list[int], width: int, seed: int) -> list[list[tuple[int, int]]]:
    """(request, tokens) of every step: random parts that fit in ROWS rows, until all is stored."""
    draw, left, steps = random.Random(seed), list(lengths), []
    while any(left):
        step, free = [], ROWS
        for request in draw.sample(range(len(left)), len(left)):
            size = min(left[request], draw.randint(0, free * width))
            if size:
                step.append((request, size))
                left[request] -= size
                free -= -(-size // width)
        if step:
            steps.append(step)
    return steps


class Values:
    """In the model, what stands for a format: values as they are."""

    pack = fake_quant = staticmethod(lambda x: x)
    unpack = staticmethod(lambda rows, dim, dtype: rows.to(dtype))
    row_bytes = staticmethod(lambda dim: dim)  # compared with the columns of a pool of float32


@pytest.fixture(scope="module")
def clear() -> Model:
    """Many index heads keep scores clear of ties; a window of 8 ends within every prompt."""
    return v41_model(
        torch.float32, engram_layer_ids=(1,), release_decode_keys=False, sliding_window=8, index_n_heads=32
    )


@contextlib.contextmanager
def rows_of_values() -> Iterator[None]:
    """All rows are stored in float32: nothing falls on another side of a rounding boundary, and sums are compared."""
    window, compressed, index = "WINDOW_FORMAT", "COMPRESSED_FORMAT", "INDEX_FORMAT"
    patched = (attention, window), (attention, compressed), (block, compressed), (checks, window), (indexer, index)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in patched:
            patch.setattr(module, name, Values)
        for name in (window, compressed, index):
            patch.setattr(deepseek_v41_layout, name, FORMATS["fp32"])
        yield


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    width=st.sampled_from([2, 3, 5, 8, 16, 17, 32]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_parts(clear: Model, prompt: Callable[..., Ids], lengths: list[int], width: int, seed: int) -> None:
    prompts = [prompt(length, seed + i) for i, length in enumerate(lengths)]
    done, last = [0] * len(lengths), {}
    with rows_of_values():
        run = PagedModel(clear, scattered(clear, len(lengths), 400, seed), ROWS, max_tokens=80)
        numbers = [run.cache.open(length) for length in lengths]
        for step in packed_steps(lengths, width, seed):
            parts = [prompts[request][done[request] : done[request] + size] for request, size in step]
            logits = run.pack([numbers[request] for request, _ in step], parts, width)
            for (request, size), row in zip(step, logits):
                done[request] += size
                last[request] = row
        for request, each in enumerate(prompts):
            alone = PagedModel(clear, scattered(clear, 1, 80, seed + 1), 1, max_tokens=80)
            number = alone.cache.open(len(each))
            assert_close(last[request], alone.prefill([number], [each])[0])
            theirs = alone.cache.state_bytes(number)
            for name, rows in run.cache.state_bytes(numbers[request]).items():
                kind = torch.int64 if name.startswith("tokens") else torch.float32
                assert_close(rows.view(kind), theirs[name].view(kind))


def test_decoding_goes_on(model: Model, prompt: Callable[..., Ids], alone: Callable[..., Ids]) -> None:
    """With the packed rows of the release: tokens after two packed batches are those of each request by itself."""
    prompts = [prompt(length, length) for length in (1, 8, 31, 40)]
    run = PagedModel(model, scattered(model, 4, 300, 3), ROWS, max_tokens=64)
    numbers = [run.cache.open(len(each)) for each in prompts]
    run.pack(numbers[2:], [prompts[2][:13], prompts[3][:24]], 8)
    logits = run.pack(numbers, [prompts[0], prompts[1], prompts[2][13:], prompts[3][24:]], 8)
    assert greedy(run, numbers, logits, 5) == [alone(model, each, 5) for each in prompts]


def test_idle_batches_change_nothing(model: Model, prompt: Callable[..., Ids]) -> None:
    run = PagedModel(model, scattered(model, 1, 40), ROWS, max_tokens=64)
    number = run.cache.open(20)
    run.pack([number], [prompt(20)], 4)
    before = {name: pool[:-1].clone() for name, pool in run.cache.pools.items()}
    assert run.pack([], [], 4).shape == (0, model.config.vocab_size)
    assert all(pool[:-1].equal(before[name]) for name, pool in run.cache.pools.items())


def test_refusals(model: Model, prompt: Callable[..., Ids]) -> None:
    run = PagedModel(model, scattered(model, 3, 100), 4, max_tokens=64)
    one, two = run.cache.open(40), run.cache.open(8)
    with pytest.raises(ValueError, match=r"parts of \[30, 8\] tokens, 5 rows of 8, allowed: 4 rows"):
        run.pack([one, two], [prompt(30), prompt(8)], 8)
    with pytest.raises(ValueError, match=f"request {two}: 0 tokens, allowed: a list of >= 1"):
        run.pack([one, two], [prompt(3), []], 8)
    with pytest.raises(ValueError, match="no number twice"):
        run.pack([one, one], [prompt(3), prompt(3)], 8)
    with pytest.raises(ValueError, match="width: 1, allowed: 2 "):
        run.pack([one], [prompt(3)], 1)
    with pytest.raises(ValueError, match=f"request {two}: 9 tokens, allowed: <= 8"):
        run.pack([one, two], [prompt(3), prompt(9)], 8)
    assert run.cache.request(one).length == run.cache.request(two).length == 0


ROW = st.tuples(st.sampled_from(["begin", "go on", "gap", "other"]), st.integers(0, 4))


@given(rows=st.lists(ROW, min_size=1, max_size=8), start=st.integers(0, 9))
def test_rows_that_do_not_go_on_are_padding(rows: list[tuple[str, int]], start: int) -> None:
    """Against a loop: a row counts if it begins a request, or goes on where a full row that counts ends."""
    width, first, page, positions, want = 4, [], [], [], []
    for row, (kind, tokens) in enumerate(rows):
        begins = kind == "begin" or row == 0
        begin = start if begins else positions[-1][0] + width + (kind == "gap")
        first.append(row if begins else first[-1])
        page.append(row if begins or kind == "other" else page[-1])
        positions.append([begin + t for t in range(tokens)] + [-1] * (width - tokens))
        goes_on = kind == "go on" and want[-1][-1] >= 0 if not begins else True
        want.append(positions[-1] if goes_on else [-1] * width)
    given_positions, pages = torch.tensor(positions), torch.tensor(page)
    got = joined_positions(given_positions, torch.full((len(rows), 1), 99), torch.tensor(first), pages)
    assert got.tolist() == want


def test_a_request_begins_before_it_goes_on() -> None:
    positions, pages = torch.tensor([[4, 5, 6, 7], [0, 1, 2, 3]]), torch.tensor([0, 0])
    got = joined_positions(positions, torch.tensor([[99], [99]]), torch.tensor([1, 1]), pages)
    assert got.tolist() == [[-1] * 4, [0, 1, 2, 3]]


@pytest.mark.parametrize("first", [[-1, -1, -1], [0, -1, -1], [0, 0, 3], [0, 0, 99], [1, 0, 0]])
def test_rows_of_no_row_store_nothing(model: Model, first: list[int]) -> None:
    """A row that names none of the batch, or one behind it, is padding, and so are those that go on with it."""
    cache = scattered(model, 1, 40)
    number, row = cache.open(12), torch.arange(12).view(3, 4)
    with torch.no_grad():
        model(row, row, batch_view(cache, [number] * 3, 2, first))
    cache.commit(number, 12)
    stored = cache.state_bytes(number)["window.7"].any(1).view(3, 4).all(1).tolist()
    assert stored == [first[b] == 0 and all(each == 0 for each in first[:b]) for b in range(3)]


@pytest.mark.parametrize(
    ("first", "pages", "begins", "allowed"),
    [
        ([0, 0, 2], [3, 3, 4], [0, 4, 0], None),
        ([0, 0, 0], [3, 3, 3], [0, 4, 8], None),
        ([0, 0, 0], [3, 3, 3], [0, 4, 9], r"positions\[2, 0\]: 9, allowed: 8 or -1"),
        ([0, 0, 1], [3, 3, 3], [0, 4, 8], r"first_row\[2\]: 1, allowed: 2, or that of row 1"),
        ([0, 0, 0], [3, 4, 3], [0, 4, 8], r"first_row\[1\]: 0, allowed: 1, or that of row 0"),
        ([0, 1, 2], [3, 4, 3], [0, 4, 8], r"state_page\[2\]: 3, allowed: another one than row 0 has"),
    ],
)
def test_positions_are_checked_by_row(
    model: Model, first: list[int], pages: list[int], begins: list[int], allowed: str | None
) -> None:
    cache = scattered(model, 5, 100)
    number = cache.open(20)
    view = batch_view(cache, [number for _ in first], 3, first)._replace(state_page=torch.tensor(pages))
    positions = torch.tensor(begins).unsqueeze(1) + torch.arange(4)
    if allowed is None:
        checks.check_positions(positions, view)
        other = view.table.clone()
        other[1, 0] += 1
        with pytest.raises(ValueError, match=r"first_row\[1\]: 0, allowed: 1, or that of row 0 and of its request"):
            checks.check_positions(positions, view._replace(table=other))
        return
    with pytest.raises(ValueError, match=allowed):
        checks.check_positions(positions, view)


def test_a_row_of_one_token_is_refused(model: Model) -> None:
    cache = scattered(model, 2, 40)
    view = batch_view(cache, [cache.open(4), None], 2, [0, 1])
    with pytest.raises(ValueError, match="rows of 1 token with first_row, allowed: >= 2 tokens"):
        model(torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0], [-1]]), view)
    with pytest.raises(ValueError, match=r"first_row: torch.float32 \[2\], allowed: torch.int64 \[2\]"):
        model(torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), -1), view._replace(first_row=torch.zeros(2)))
