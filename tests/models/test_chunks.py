"""The same tokens in other chunks, rows and company give the same logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.models.deepseek_v41 import DeepseekV41Cache, DeepseekV41ForCausalLM

Model = DeepseekV41ForCausalLM

LENGTH = 40
IDS = (torch.arange(LENGTH) * 7 % 64).unsqueeze(0)


def stored(cache: DeepseekV41Cache) -> list[Tensor]:
    """Every pool without its scratch row."""
    pools = [*cache.window.values(), *cache.compressed.values(), *cache.index_keys.values()]
    pools += [*cache.open_groups.values(), *([] if cache.tokens is None else [cache.tokens])]
    return [pool[:-1].clone() for pool in pools]


def same(a: DeepseekV41Cache, b: DeepseekV41Cache) -> bool:
    """Equal but for what the last place of a product can do: float32 rows nearly, and one byte in a hundred.

    The smallest pool has 8 rows, so a row in a wrong place shows.
    """
    for x, y in zip(stored(a), stored(b)):
        if x.is_floating_point() and not x.allclose(y, atol=1e-5):
            return False
        if not x.is_floating_point() and (x != y).float().mean() > 0.01:
            return False
    return True


@pytest.fixture(scope="module")
def one_shot(tiny: Model, feed: Callable[..., Tensor]) -> Tensor:
    return feed(tiny, IDS, [LENGTH], tiny.new_cache(1, LENGTH))


@pytest.mark.parametrize(
    "sizes",
    [
        [3, 5, 1, 7, 8, 16],
        [24, 16],
        [39, 1],
        [7, 1, 1, 1, 30],
        [5, 35],  # longer than four windows
        [8] + [1] * 32,
        [5, 4, 2, 3, 5, 21],
        [13, 2, 2, 2, 2, 2, 17],
    ],
)
def test_any_split_equals_one_shot(
    tiny: Model, feed: Callable[..., Tensor], one_shot: Tensor, sizes: list[int]
) -> None:
    cache, whole = tiny.new_cache(1, LENGTH), tiny.new_cache(1, LENGTH)
    torch.testing.assert_close(feed(tiny, IDS, sizes, cache), one_shot, rtol=0, atol=1e-4)
    feed(tiny, IDS, [LENGTH], whole)
    assert same(cache, whole)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9])
def test_short_prompts(tiny: Model, feed: Callable[..., Tensor], one_shot: Tensor, length: int) -> None:
    got = feed(tiny, IDS[:, :length], [length], tiny.new_cache(1, LENGTH))
    torch.testing.assert_close(got, one_shot[:, :length], rtol=0, atol=1e-4)


def test_the_future_is_hidden(tiny: Model, feed: Callable[..., Tensor], one_shot: Tensor) -> None:
    for changed in (16, 17, 39):
        other = IDS.clone()
        other[0, changed] = 1
        got = feed(tiny, other, [5, 35], tiny.new_cache(1, LENGTH))
        torch.testing.assert_close(got[:, :changed], one_shot[:, :changed], rtol=0, atol=1e-4)
        assert not got[:, changed].allclose(one_shot[:, changed], atol=1e-4)


def test_decode_keys_of_the_release_differ_only_while_a_group_is_open(
    make_model: Callable[..., Model], feed: Callable[..., Tensor], one_shot: Tensor
) -> None:
    model = make_model(release_decode_keys=True)
    cache = model.new_cache(1, LENGTH)
    feed(model, IDS[:, :12], [12], cache)
    step = feed(model, IDS[:, 12:13], [1], cache, start=12)
    assert not step[:, 0].allclose(one_shot[:, 12], atol=1e-4)
    cache = model.new_cache(1, LENGTH)
    feed(model, IDS[:, :13], [13], cache)
    step = feed(model, IDS[:, 13:14], [1], cache, start=13)
    torch.testing.assert_close(step[:, 0], one_shot[:, 13], rtol=0, atol=1e-4)


def test_rows_at_different_positions(tiny: Model, feed: Callable[..., Tensor]) -> None:
    """Row 0 goes on from 9, row 1 starts, row 2 is idle, row 3 goes on from 16 with less to say."""
    ids = torch.randint(0, 64, (4, 30))
    together = tiny.new_cache(4, 64)
    first, starts, counts = torch.tensor([9, 0, 0, 16]), torch.tensor([9, 0, -1, 16]), torch.tensor([11, 11, 0, 4])
    steps = torch.arange(16)
    tiny(ids[:, :16], torch.where(steps < first[:, None], steps, -1), together)
    untouched = stored(together)
    steps = torch.arange(11)
    positions = torch.where(steps < counts[:, None], starts[:, None] + steps, -1)
    chunk = torch.stack([ids[b, s : s + 11] if s >= 0 else ids[b, :11] for b, s in enumerate(starts.tolist())])
    got = tiny(chunk, positions, together)
    assert got.isfinite().all()
    for b in (0, 1, 3):
        alone = tiny.new_cache(1, 64)
        start, count = int(first[b]), int(counts[b])
        sizes = [start, count] if start else [count]
        want = feed(tiny, ids[b : b + 1, : start + count], sizes, alone)[:, -count:]
        torch.testing.assert_close(got[b, :count], want[0], rtol=0, atol=1e-4)
    for pool, before in zip(stored(together), untouched):  # the idle row
        rows = len(pool) // 4
        assert pool[2 * rows : 3 * rows].equal(before[2 * rows : 3 * rows])


def test_padding_is_not_stored(tiny: Model, feed: Callable[..., Tensor]) -> None:
    ids = torch.randint(0, 64, (2, 12))
    plain, padded = tiny.new_cache(2, 32), tiny.new_cache(2, 32)
    want = feed(tiny, ids[:, :7], [7], plain)
    positions = torch.where(torch.arange(12) < 7, torch.arange(12), -1).expand(2, -1)
    got = tiny(ids, positions, padded)
    torch.testing.assert_close(got[:, :7], want, rtol=0, atol=1e-5)
    assert same(plain, padded)


@pytest.mark.parametrize(
    "positions",
    [
        [[14, 15, 16, 17]],  # beyond max_tokens 16
        [[14, 15, 2**40, 17]],
        [[14, 15, 9, 10]],  # jumps back
        [[14, 15, -1, 17]],  # a hole
        [[14, 15, -7, -1]],
    ],
)
def test_wrong_positions_are_padding(tiny: Model, feed: Callable[..., Tensor], positions: list[list[int]]) -> None:
    ids = torch.randint(0, 64, (1, 18))
    right, wrong = tiny.new_cache(1, 16), tiny.new_cache(1, 16)
    feed(tiny, ids[:, :16], [14, 2], right)
    feed(tiny, ids[:, :14], [14], wrong)
    tiny(ids[:, 14:18], torch.tensor(positions), wrong)
    assert same(right, wrong)


@pytest.mark.parametrize("positions", [[[-1, 0, 1]], [[-5, -4, -3]], [[16, 17, 18]], [[2**62, 2**62 + 1, 2**62 + 2]]])
def test_rows_that_start_wrong_store_nothing(tiny: Model, positions: list[list[int]]) -> None:
    cache = tiny.new_cache(1, 16)
    assert tiny(torch.tensor([[1, 2, 3]]), torch.tensor(positions), cache).isfinite().all()
    assert same(cache, tiny.new_cache(1, 16))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (3, 1), (6, 2), (12, 4), (20, 4)])
def test_head_counts(make_model: Callable[..., Model], feed: Callable[..., Tensor], heads: int, groups: int) -> None:
    model = make_model(num_attention_heads=heads, o_groups=groups)
    ids = IDS[:, :20]
    got = feed(model, ids, [11, 1, 8], model.new_cache(1, 20))
    torch.testing.assert_close(got, feed(model, ids, [20], model.new_cache(1, 20)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 112},
        {"hc_mult": 2},
        {"compress_ratios": (0, 3, 3, 1, 1)},
        {"compress_ratios": (0, 4, 4, 2, 2)},
        {"sliding_window": 5},
        {"candidate_source_layer_id": None},
        {"n_shared_experts": 2},
        {"swiglu_limit": 0.0},
        {"rope_scaling_type": "none"},
        {"index_topk": 64},
    ],
)
def test_other_shapes(make_model: Callable[..., Model], feed: Callable[..., Tensor], changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    got = feed(model, IDS, [6, 1, 1, 9, 23], model.new_cache(1, LENGTH))
    torch.testing.assert_close(got, feed(model, IDS, [LENGTH], model.new_cache(1, LENGTH)), rtol=0, atol=1e-4)


def test_degenerate_scores_still_choose(make_model: Callable[..., Model]) -> None:
    """All index scores zero: min(k, visible) distinct visible rows each, the same on every run."""
    model = make_model()
    for layer in model.layers:
        if hasattr(layer, "indexer"):
            layer.indexer.weights_proj.weight.zero_()
    chosen: list[Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    for _ in range(2):
        model(IDS, torch.arange(LENGTH).unsqueeze(0), model.new_cache(1, LENGTH))
    hook.remove()
    assert chosen[0].equal(chosen[1])
    for t, row in enumerate(chosen[0][0].tolist()):
        visible = (t + 1) // 2
        live = [j for j in row if j >= 0]
        assert live == list(range(max(visible - 4, 0), visible)) and row[len(live) :] == [-1] * (4 - len(live))


def test_a_used_cache_serves_a_new_sequence(tiny: Model, feed: Callable[..., Tensor], one_shot: Tensor) -> None:
    cache = tiny.new_cache(1, LENGTH)
    feed(tiny, torch.randint(0, 64, (1, 33)), [33], cache)
    torch.testing.assert_close(feed(tiny, IDS, [9, 31], cache), one_shot, rtol=0, atol=1e-4)
