"""The project's V4.1, compiled, in chunks, rows and companies of every kind (cases R04 to R13, R16, R18, R21, R23).

One model of five layers (window, Full with ratio 2, Reuse, Full with ratio 1 and candidates, Reindex) and three
sequences at a time. Two graphs serve all tests: one for chunks of any length, one for single tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dscompile.models.deepseek_v41 import DeepseekV41Cache, DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.generate import mark_length_dynamic

TOLERANCE = 1e-4
BATCH, LENGTH, WINDOW, CAPACITY = 3, 40, 8, 64
NAN = float("nan")


def make_config(**changes: Any) -> DeepseekV41Config:
    values: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 32,
        "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "sliding_window": WINDOW,
        "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "compress_ratios": (0, 2, 2, 1, 1), "kv_source_layer_ids": (1, 3), "index_source_layer_ids": (1, 3, 4),
        "index_n_heads": 32, "index_topk": 4,
        "candidate_source_layer_id": 3, "candidate_topk_blocks": 3, "candidate_block_size": 4, "hc_sinkhorn_iters": 1,
        "engram_layer_ids": (1,), "release_decode_keys": False,
    }  # fmt: skip
    return DeepseekV41Config.miniature(**{**values, **changes})


def token_rows() -> Tensor:
    """Three unlike sequences, int64 [3, 40]."""
    row = torch.arange(LENGTH)
    return torch.stack((row * 7 % 64, (row.flip(0) * 5 + 3) % 64, (row * row + 11) % 64))


IDS = token_rows()


class Both(NamedTuple):
    """The model and its compiled form."""

    eager: DeepseekV41ForCausalLM
    compiled: Any

    def new_cache(self) -> DeepseekV41Cache:
        return self.eager.new_cache(BATCH, CAPACITY)

    def feed(self, ids: Tensor, sizes: Sequence[int], cache: DeepseekV41Cache | None = None, start: int = 0) -> Tensor:
        """Logits of ids [3, sum of sizes] at positions from `start` on, in chunks, compiled."""
        cache = cache or self.new_cache()
        return torch.cat([self.call(part, p, cache) for part, p in chunks(ids, sizes, start)], 1)

    def call(self, ids: Tensor, positions: Tensor, cache: DeepseekV41Cache) -> Tensor:
        ids, positions = ids.clone(), positions.clone()
        mark_length_dynamic(ids, positions)
        return self.compiled(ids, positions, cache)


def chunks(ids: Tensor, sizes: Sequence[int], start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    assert sum(sizes) == ids.shape[1]
    for part in ids.split(list(sizes), 1):
        yield part, torch.arange(start, start + part.shape[1]).repeat(len(ids), 1)
        start += part.shape[1]


def pools(cache: DeepseekV41Cache) -> list[Tensor]:
    """Every pool, its scratch row at the end."""
    assert cache.tokens is not None
    found = [*cache.window.values(), *cache.compressed.values(), *cache.index_keys.values()]
    return [*found, *cache.open_groups.values(), cache.tokens]


def assert_same_pools(mine: DeepseekV41Cache, theirs: DeepseekV41Cache) -> None:
    """Equal rows, but for what the last place of a product can do: one code in a hundred. Scratch rows do not count."""
    for a, b in zip(pools(mine), pools(theirs), strict=True):
        a, b = a[:-1], b[:-1]
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        else:
            assert (a != b).float().mean() <= 0.01


@pytest.fixture(scope="module")
def v41(dsv4: Callable[..., Any]) -> Both:
    torch.manual_seed(0)
    model = DeepseekV41ForCausalLM(make_config())
    return Both(model, dsv4(model))


@pytest.fixture(scope="module")
def one_shot(v41: Both) -> Tensor:
    """Eager logits of everything at once."""
    with torch.no_grad():
        return v41.eager(IDS, torch.arange(LENGTH).repeat(BATCH, 1), v41.new_cache())


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


# -- chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9])
def test_short_prompts(v41: Both, one_shot: Tensor, length: int) -> None:
    """R06. Below, on and above the first boundary: no compressed row at all for one token of ratio 2."""
    close(v41.feed(IDS[:, :length], [length]), one_shot[:, :length])


@pytest.mark.parametrize(
    "sizes",
    [
        [40],
        [3, 5, 1, 7, 8, 16],
        [24, 16],
        [39, 1],
        [7, 1, 1, 1, 30],
        [5, 35],  # R09: more than four windows at once
        [1] * 9 + [31],
        [5, 4, 2, 3, 5, 21],  # R12: several tokens at once in the middle
        [8] + [1] * 32,  # R08
    ],
    ids=lambda sizes: "-".join(map(str, sizes[:6])),
)
def test_any_split_equals_one_shot(v41: Both, one_shot: Tensor, sizes: list[int]) -> None:
    """R07. Logits and every stored row."""
    cache, whole = v41.new_cache(), v41.new_cache()
    close(v41.feed(IDS, sizes, cache), one_shot)
    v41.eager(IDS, torch.arange(LENGTH).repeat(BATCH, 1), whole)
    assert_same_pools(cache, whole)


@pytest.mark.parametrize("sizes", [[40], [5, 35], [13, 2, 2, 2, 21], [16] + [1] * 24])
@pytest.mark.parametrize("changed", [16, 17, 39])
def test_a_token_changes_nothing_before_it(v41: Both, one_shot: Tensor, sizes: list[int], changed: int) -> None:
    """R09, R10. In its own sequence from itself on, in the others never."""
    ids = IDS.clone()
    ids[1, changed] += 1
    got = v41.feed(ids, sizes)
    close(got[:, :changed], one_shot[:, :changed])
    close(got[[0, 2]], one_shot[[0, 2]])
    assert (got[1, changed] - one_shot[1, changed]).abs().max() > 0.01


def test_rows_that_are_not_visible_may_hold_anything(v41: Both, one_shot: Tensor) -> None:
    """R10, R13. Chunks and steps read whole pools: bytes of rows not yet written are set to all ones, NaN included."""
    cache = v41.new_cache()
    start = v41.feed(IDS[:, :13], [13], cache)
    for by_layer in (cache.compressed, cache.index_keys):
        for layer, pool in by_layer.items():
            pool[:-1].unflatten(0, (BATCH, -1))[:, 13 // cache.ratios[layer] :] = 255
    rest = v41.feed(IDS[:, 13:], [1, 1, 4, 1, 20], cache, start=13)
    close(torch.cat((start, rest), 1), one_shot)


# -- padding and companies ---------------------------------------------------------------------------------------------


def test_rows_at_different_positions_with_an_idle_one(v41: Both, one_shot: Tensor) -> None:
    """R13. Sequence 0 goes on from 9 with 4 tokens, 1 is idle, 2 starts; then all decode, each where it is."""
    cache = v41.new_cache()
    steps = torch.arange(9)
    v41.call(IDS[:, :9], torch.where(torch.tensor([[True], [False], [False]]), steps, -1), cache)
    rows = [pool[:-1].unflatten(0, (BATCH, -1)) for pool in pools(cache)]
    untouched = [row[1].clone() for row in rows]
    ids = torch.stack((IDS[0, 9:18], IDS[1, :9], IDS[2, :9]))
    positions = torch.stack((torch.where(steps < 4, steps + 9, -1), torch.full((9,), -1), steps))
    got = v41.call(ids, positions, cache)
    assert got.isfinite().all()
    close(got[0, :4], one_shot[0, 9:13])
    close(got[2], one_shot[2, :9])
    for step in range(6):
        ids = torch.stack((IDS[0, 13 + step], IDS[1, 0], IDS[2, 9 + step])).unsqueeze(1)
        got = v41.call(ids, torch.tensor([[13 + step], [-1], [9 + step]]), cache)
        assert got.isfinite().all()
        close(got[[0, 2], 0], torch.stack((one_shot[0, 13 + step], one_shot[2, 9 + step])))
    assert all(row[1].equal(before) for row, before in zip(rows, untouched, strict=True))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_batch_of_nothing_but_padding(v41: Both, tokens: int) -> None:
    """R13. All lengths zero: returns, finite, and nothing is stored."""
    cache = v41.new_cache()
    v41.feed(IDS[:, :10], [10], cache)
    before = [pool[:-1].clone() for pool in pools(cache)]
    got = v41.call(IDS[:, :tokens], torch.full((BATCH, tokens), -1), cache)
    assert got.isfinite().all()
    assert all(pool[:-1].equal(old) for pool, old in zip(pools(cache), before, strict=True))


def guarded(cache: DeepseekV41Cache) -> tuple[DeepseekV41Cache, list[Tensor]]:
    """The cache with every pool between guard rows, and the buffers around the pools."""
    buffers: list[Tensor] = []

    def inside(pool: Tensor) -> Tensor:
        buffer = torch.full((len(pool) + 8, *pool.shape[1:]), 77, dtype=pool.dtype)
        buffers.append(buffer)
        buffer[4:-4] = pool
        return buffer[4:-4]

    assert cache.tokens is not None
    named = {name: {i: inside(p) for i, p in getattr(cache, name).items()}
             for name in ("window", "compressed", "index_keys", "open_groups")}  # fmt: skip
    return cache._replace(**named, tokens=inside(cache.tokens)), buffers


@pytest.mark.parametrize(
    "bad", [CAPACITY, CAPACITY + 1, 2**31 + 3, 2**32 + 5, 2**40 + 17, 2**62, -1, -2, -CAPACITY, -(2**40), 7, 12]
)
def test_positions_out_of_range_are_never_stored(v41: Both, bad: int) -> None:
    """R04, R05. Past the cache, negative, or out of order: what follows is padding; only rows 10 and 11 are written."""
    right, (mine, buffers) = v41.new_cache(), guarded(v41.new_cache())
    v41.feed(IDS[:, :12], [10, 2], right)
    v41.feed(IDS[:, :10], [10], mine)
    positions = torch.tensor([10, 11, bad, bad + 1]).repeat(BATCH, 1)
    if bad == 12:  # in order and in range: then it is the token after it that is wrong
        positions = torch.tensor([10, 11, 13, 12]).repeat(BATCH, 1)
    got = v41.call(IDS[:, 10:14], positions, mine)
    assert got.isfinite().all()
    assert all((buffer[:4] == 77).all() and (buffer[-4:] == 77).all() for buffer in buffers)
    assert_same_pools(mine, right)


def test_the_whole_capacity_is_usable_and_no_more(v41: Both) -> None:
    """R05. The last position is stored, the next is not, and no pool grows a row."""
    ids = IDS.repeat(1, 2)
    mine, buffers = guarded(v41.new_cache())
    theirs = v41.new_cache()
    v41.feed(ids[:, :CAPACITY], [40, 20, 1, 1, 1, 1], mine)
    for part, positions in chunks(ids[:, :CAPACITY], [40, 24]):
        v41.eager(part, positions, theirs)
    assert_same_pools(mine, theirs)
    before = [pool[:-1].clone() for pool in pools(mine)]
    v41.call(ids[:, :1], torch.full((BATCH, 1), CAPACITY), mine)
    assert all(pool[:-1].equal(old) for pool, old in zip(pools(mine), before, strict=True))
    assert all((buffer[:4] == 77).all() and (buffer[-4:] == 77).all() for buffer in buffers)


# -- memory, ties, graphs ----------------------------------------------------------------------------------------------


def spoil_free_memory() -> None:
    """Fill and free blocks of many sizes, so that memory taken next is full of NaN."""
    blocks = [torch.full((size,), NAN) for size in (64, 256, 1024, 3072, 4096, 8192, 16384, 65536) for _ in range(6)]
    del blocks


def test_recycled_memory_never_shows(v41: Both, one_shot: Tensor) -> None:
    """R18, R16. Twenty runs with NaN in all memory that was freed: bitwise the same, nothing left of the last step."""
    first = None
    for _ in range(20):
        cache = v41.new_cache()
        got = [v41.feed(IDS[:, :9], [9], cache)]
        spoil_free_memory()
        got.append(v41.feed(IDS[:, 9:11], [1, 1], cache, start=9))
        spoil_free_memory()
        whole = torch.cat(got, 1)
        first = whole if first is None else first
        assert whole.equal(first)
    close(first, one_shot[:, :11])


def test_one_cache_object_serves_another_after_it(v41: Both, one_shot: Tensor) -> None:
    """R16, R23. A used cache, not cleared: rows of the sequence before are never selected."""
    cache = v41.new_cache()
    v41.feed(IDS.flip(1), [33, 7], cache)
    close(v41.feed(IDS, [9, 1, 30], cache), one_shot)


def test_degenerate_scores_choose_as_eager_does(v41: Both) -> None:
    """R11. All index scores zero: the rule for ties (the newest row wins) is the model's and is kept."""
    indexers = [layer.indexer for layer in v41.eager.layers if hasattr(layer, "indexer")]
    saved = [indexer.weights_proj.weight.clone() for indexer in indexers]
    try:
        for indexer in indexers:
            indexer.weights_proj.weight.zero_()
        want = v41.eager(IDS, torch.arange(LENGTH).repeat(BATCH, 1), v41.new_cache())
        close(v41.feed(IDS, [40]), want)
        close(v41.feed(IDS, [11, 1, 1, 27]), want)
    finally:
        for indexer, weight in zip(indexers, saved, strict=True):
            indexer.weights_proj.weight.copy_(weight)


def test_two_graphs_in_all_with_everything_recognised(v41: Both, one_shot: Tensor) -> None:
    """R21, R23. After 34 more steps there is one graph for chunks and one for single tokens; both are complete."""
    close(v41.feed(IDS, [6] + [1] * 34), one_shot)
    graphs = v41.compiled.report.graphs
    assert len(graphs) == 2
    config = v41.eager.config
    layers = config.num_hidden_layers
    kinds = [config.kind(layer) for layer in range(layers)]
    full, reindex = kinds.count("full"), kinds.count("reindex")
    pooled = sum(config.ratio(layer) > 1 for layer in config.kv_source_layer_ids)
    want = {
        "attention": layers, "output": layers, "router": layers, "experts": layers, "compressor": pooled,
        "indexer": full + reindex, "engram": len(config.engram_layer_ids),
        "mhc": 6 * layers,  # each sublayer: sinkhorn, what goes in, what comes out
        # The n-gram tokens; a window row each; with ratio > 1 the open group; a Full layer also row and index key.
        "store": 1 + layers + pooled + 2 * full,
    }  # fmt: skip
    for graph in graphs:
        assert {family: graph.counts().get(family, 0) for family in want} == want
        assert not graph.misses and not graph.gaps, graph.misses
