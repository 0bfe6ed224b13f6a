"""Prefill in one cache, decoding in another: the tokens are those of `generate` by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dscompile.kv.bundle import BundleRefused, export_kv, import_kv
from dscompile.kv.deepseek_v41 import PagedModel, paged_cache
from dscompile.kv.file_transport import FileTransport
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, check_positions
from support.paged import Ids, greedy, scattered

STEPS = 6
Alone = Callable[[DeepseekV41ForCausalLM, Ids, int], Ids]


@pytest.mark.parametrize(
    ("lengths", "chunk_size"),
    [
        ((1, 2, 3), None),
        ((7, 8, 9), 3),
        ((15, 16, 17), 7),
        ((31, 1, 33), 32),
        ((64, 65, 127), 16),
        ((130, 255), 100),
        ((256, 5), 256),
        pytest.param((511, 512, 513), 128, marks=pytest.mark.slow),
        ((700,), 300),
        pytest.param((700, 1, 301), None, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_process(
    model: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], alone: Alone, lengths: Ids, chunk_size: int | None
) -> None:
    prompts = [prompt(length, length) for length in lengths]
    there = PagedModel(model, scattered(model, 3, 1800), rows=len(prompts), max_tokens=704)
    numbers = [there.cache.open(len(each)) for each in prompts]
    logits = there.prefill(numbers, prompts, chunk_size)
    first = logits.argmax(-1).tolist()
    bundles = [export_kv(there.cache, n, note={"next": token}) for n, token in zip(numbers, first)]
    for number in numbers:
        there.cache.close(number)
    assert there.cache.pages.used_bytes == 0

    here = PagedModel(model, scattered(model, 5, 2000, skip=1, page_tokens=16), rows=4, max_tokens=720)
    here.cache.open(11)
    numbers = [import_kv(here.cache, bundle) for bundle in reversed(bundles)]
    tokens = [[bundle.header.note["next"]] for bundle in reversed(bundles)]
    for _ in range(STEPS - 1):
        best = here.step(numbers, [known[-1:] for known in tokens])[:, 0].argmax(-1).tolist()
        for known, token in zip(tokens, best):
            known.append(token)
    for known, each in zip(reversed(tokens), prompts):
        assert known == alone(model, each, STEPS)


def test_requests_join_and_leave(
    model: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], alone: Alone, tmp_path: Path
) -> None:
    """Three rows, five requests: each comes in over a folder when a row is free, and leaves after its tokens."""
    prompts = [prompt(length, length) for length in (20, 3, 41, 16, 8)]
    there = PagedModel(model, scattered(model, 1, 64), rows=1, max_tokens=64)
    folder = FileTransport(tmp_path)
    for each in prompts:
        number = there.cache.open(len(each))
        first = int(there.prefill([number], [each], 8).argmax(-1))
        folder.send(export_kv(there.cache, number, note={"next": first}))
        there.cache.close(number)
    from dscompile.kv.file_transport import load_bundle

    here = PagedModel(model, scattered(model, 3, 200, skip=2), rows=3, max_tokens=64)
    waiting = sorted(tmp_path.iterdir())
    live: dict[int, tuple[int, Ids]] = {}
    done: dict[int, Ids] = {}
    counts = [4, 9, 3, 6, 5]
    while waiting or live:
        while waiting and len(live) < 3:
            which = len(prompts) - len(waiting)
            bundle = load_bundle(waiting.pop(0))
            live[import_kv(here.cache, bundle)] = (which, [bundle.header.note["next"]])
        numbers = list(live)
        best = here.step(numbers, [live[n][1][-1:] for n in numbers])[:, 0].argmax(-1).tolist()
        for number, token in zip(numbers, best):
            which, known = live[number]
            known.append(token)
            if len(known) == counts[which]:
                done[which] = live.pop(number)[1]
                here.cache.close(number)
    assert here.cache.pages.used_bytes == 0
    for which, (each, count) in enumerate(zip(prompts, counts)):
        assert done[which] == alone(model, each, count)


def test_a_shared_beginning(model: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], alone: Alone) -> None:
    """Compressed rows of 280 tokens are found; only the 120 tokens that the rings need are run again."""
    common = prompt(285, 1)
    prompts = [common + prompt(20, 2), common + prompt(31, 3)]
    paged = PagedModel(model, scattered(model, 2, 800), rows=1, max_tokens=400)
    first = paged.cache.open(len(prompts[0]), prompts[0])
    assert greedy(paged, [first], paged.prefill([first], prompts[:1], 64), 4)[0] == alone(model, prompts[0], 4)
    assert paged.cache.publish(first, prompts[0]) == 38
    before, used = paged.cache.state_bytes(first), paged.cache.pages.tokens.used
    second = paged.cache.open(len(prompts[1]), prompts[1])
    request = paged.cache.request(second)
    assert request.shared == 280 and paged.cache.pages.replay_from(request) == 280 - 8 * 15
    assert paged.cache.pages.tokens.used - used == 40 - 35
    logits = paged.prefill([second], prompts[1:], 50)
    for name, rows in paged.cache.state_bytes(first).items():
        assert rows.equal(before[name]), f"{name}: a replay writes no shared row"
    paged.cache.close(first)
    assert greedy(paged, [second], logits, 4)[0] == alone(model, prompts[1], 4)
    paged.cache.close(second)
    assert paged.cache.pages.used_bytes == 0


def test_a_replay_leaves_exact_rings(prompt: Callable[..., Ids]) -> None:
    """Rings and all else are those of a prefill from the start, also where the first layer looks back at tokens.

    Bytes differ where sums of another order round to another code: not one in a hundred.
    """
    model = v41_model(torch.float32, num_hidden_layers=4, compress_ratios=(0, 2, 2, 1), kv_source_layer_ids=(1, 3),
                      index_source_layer_ids=(1, 3), candidate_source_layer_id=3, engram_layer_ids=(0,))  # fmt: skip
    ids, states = prompt(150, 7), []
    for share in (False, True):
        run = PagedModel(model, scattered(model, 2, 400), rows=1, max_tokens=200)
        if share:
            other = run.cache.open(144)
            run.prefill([other], [ids[:144]])
            run.cache.publish(other, ids[:144])
        number = run.cache.open(150, ids)
        assert run.cache.request(number).shared == (144 if share else 0)
        run.prefill([number], [ids])
        states.append(run.cache.state_bytes(number))
    for (name, got), want in zip(states[1].items(), states[0].values()):
        if got.numel() and not name.startswith("open_groups"):
            assert (got != want).float().mean() < 0.01, name


def test_a_prompt_that_is_there_already(
    model: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], alone: Alone
) -> None:
    paged = PagedModel(model, scattered(model, 2, 400), rows=1, max_tokens=160)
    for _ in range(2):
        number = paged.cache.open(144, prompt(144, 5))
        logits = paged.prefill([number], [prompt(144, 5)])
        paged.cache.publish(number, prompt(144, 5))
        assert greedy(paged, [number], logits, 3)[0] == alone(model, prompt(144, 5), 3)
        paged.cache.close(number)


def test_what_a_page_held_before_is_not_seen(
    model: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], alone: Alone
) -> None:
    """Not even NaN."""
    paged = PagedModel(model, scattered(model, 2, 80), rows=2, max_tokens=40)
    number = paged.cache.open(40)
    for pool in paged.cache.pools.values():
        pool.fill_(float("nan") if pool.is_floating_point() else 127)  # E4M3 and E4M3 scales: NaN
    paged.cache.close(number)
    number = paged.cache.open(9)
    assert greedy(paged, [number], paged.prefill([number], [prompt(9)]), 5)[0] == alone(model, prompt(9), 5)


def test_refusals(model: DeepseekV41ForCausalLM, prompt: Callable[..., Ids]) -> None:
    cache = paged_cache(model.config, 2, 64, 8)
    paged = PagedModel(model, cache, rows=1, max_tokens=32)
    number = cache.open(8)
    with pytest.raises(ValueError, match="9 tokens, allowed: <= 8"):
        paged.prefill([number], [prompt(9)])
    with pytest.raises(ValueError, match=f"request {number}: 0 tokens, allowed: a list of >= 1"):
        paged.prefill([number], [[]])
    paged.prefill([number], [prompt(8)])
    with pytest.raises(ValueError, match=r"tokens per request: \[9\], allowed: 1 to 8"):
        paged.step([number], [[1] * 9])
    with pytest.raises(ValueError, match=r"allowed: up to 1, no number twice"):
        paged.step([number, number], [[1], [1]])
    with pytest.raises(ValueError, match="rows: 0"):
        PagedModel(model, cache, rows=0, max_tokens=8)
    other = paged_cache(model.config.with_changes(index_topk=4), 1, 64, 8)
    with pytest.raises(ValueError, match="cache of model"):
        PagedModel(model, other, rows=1, max_tokens=8)
    with pytest.raises(BundleRefused, match="model"):
        import_kv(other, export_kv(cache, number))


def test_positions_without_a_page_are_told(model: DeepseekV41ForCausalLM) -> None:
    from dscompile.kv.deepseek_v41 import batch_view

    cache = paged_cache(model.config, 2, 64, 8)
    view = batch_view(cache, [cache.open(8), None], columns=4)
    check_positions(torch.tensor([[7], [-1]]), view)
    with pytest.raises(ValueError, match=r"positions\[0, 0\]: 8, allowed: < max_tokens 8"):
        check_positions(torch.tensor([[8], [-1]]), view)
    with pytest.raises(ValueError, match=r"positions\[1, 0\]: 0, allowed: < max_tokens 0"):
        check_positions(torch.tensor([[7], [0]]), view)
    with pytest.raises(ValueError, match=r"table: torch.int32 \[2, 4\], allowed: torch.int64 \[2, pages\]"):
        positions = torch.tensor([[0], [-1]])
        model(positions.clamp(min=0), positions, view._replace(table=view.table.int()))
