"""transformers' V4 with the static cache, compiled, in chunks of every kind (cases R04 to R13, R18, R21, R23).

Two sequences at a time. Five lengths of chunk, a graph each: one token, fewer than a group of 4, one group, inside a
group of 8, and more than four windows. Other lengths: `test_other_lengths_share_graphs`, slow.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dscompile.integrations.transformers import StaticV4Cache, prepare
from support.v4 import tiny

TOLERANCE = 1e-4
BATCH, LENGTH = 2, 40
IDS = torch.stack((torch.arange(LENGTH) * 7 % 64, (torch.arange(LENGTH).flip(0) * 5 + 3) % 64))
LENGTHS = (1, 3, 4, 5, 35)


class Both(NamedTuple):
    """The prepared model and its compiled form."""

    eager: Any
    compiled: Any

    def new_cache(self, max_tokens: int = LENGTH) -> StaticV4Cache:
        return StaticV4Cache(self.eager.config, BATCH, max_tokens, self.eager.dtype)

    def feed(self, ids: Tensor, sizes: Sequence[int], cache: StaticV4Cache | None = None) -> Tensor:
        """Logits of ids [2, sum of sizes], in chunks, compiled.

        Chunks are copies: where a slice begins in memory is something that torch makes graphs for.
        """
        assert sum(sizes) == ids.shape[1]
        cache = cache or self.new_cache()
        parts = [part.clone() for part in ids.split(list(sizes), 1)]
        return torch.cat([self.compiled(part, cache=cache).logits for part in parts], 1)


@pytest.fixture(scope="module")
def v4(dsv4: Callable[..., Any]) -> Both:
    model = prepare(tiny(hc_sinkhorn_iters=1))
    return Both(model, dsv4(model, dynamic=False))


@pytest.fixture(scope="module")
def one_shot(v4: Both) -> Tensor:
    """Eager logits of everything at once, without a cache."""
    with torch.no_grad():
        return v4.eager(IDS, use_cache=False).logits


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


SPLITS = [
    [5, 35],  # R09: a chunk of more than four windows
    [35, 5],
    [35, 4, 1],
    [3, 4, 1, 5, 3, 5, 5, 5, 4, 5],  # R07: edges inside a group of 4, on it, inside and on a group of 8
    [5, 3] + [1] * 32,  # R08: from 8 on token by token
    [1] * 13 + [5, 4, 5, 4, 5, 4],  # R12: several tokens at once after single ones
]


@pytest.mark.parametrize("sizes", SPLITS, ids=lambda sizes: "-".join(map(str, sizes[:6])))
def test_any_split_equals_one_shot(v4: Both, one_shot: Tensor, sizes: list[int]) -> None:
    """R06 to R09 and R12: logits, and the cache that eager leaves behind."""
    mine, theirs = v4.new_cache(), v4.new_cache()
    close(v4.feed(IDS, sizes, mine), one_shot)
    for part in IDS.split(sizes, 1):
        v4.eager(part, cache=theirs)
    for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [[5, 35], [35, 4, 1], [4, 5, 1, 3, 5, 1, 1, 5, 5, 5, 5]])
@pytest.mark.parametrize("changed", [16, 17, 39])
def test_a_token_changes_nothing_before_it(v4: Both, one_shot: Tensor, sizes: list[int], changed: int) -> None:
    """R09, R10. In its own sequence from itself on, in the other never."""
    ids = IDS.clone()
    ids[1, changed] = (ids[1, changed] + 1) % 64
    got = v4.feed(ids, sizes)
    close(got[:, :changed], one_shot[:, :changed])
    close(got[0], one_shot[0])
    assert (got[1, changed] - one_shot[1, changed]).abs().max() > 0.01


def test_rows_that_are_not_visible_may_hold_anything(v4: Both, one_shot: Tensor) -> None:
    """R10, R13. Steps read whole pools and rings: rows that are not visible yet are filled with huge numbers."""
    cache = v4.new_cache()
    start = v4.feed(IDS[:, :13], [5, 3, 5], cache)
    for layer in cache.layers[1:]:
        for pool in layer.pool.values():
            pool.view(BATCH, layer.capacity, -1)[:, 13 // layer.compress_rate :] = 1e4
    rest = v4.feed(IDS[:, 13:], [1, 1, 4, 1, 5, 5, 5, 5], cache)
    close(torch.cat((start, rest), 1), one_shot)


def test_one_cache_object_serves_another_after_it(v4: Both, one_shot: Tensor) -> None:
    """R16, R23. Nothing of the sequences before is left after `reset`."""
    cache = v4.new_cache()
    v4.feed(IDS.flip(1), [35, 5], cache)
    cache.reset()
    close(v4.feed(IDS, [35, 1, 4], cache), one_shot)


def test_a_token_too_many_is_an_error_and_reaches_no_other_sequence(v4: Both) -> None:
    """R05. Rows past a pool's end would be the next sequence's, or outside."""
    cache = v4.new_cache()
    v4.feed(IDS, [35, 5], cache)
    kept = [pool.clone() for layer in cache.layers[1:] for pool in layer.pool.values()]
    with pytest.raises(IndexError):
        v4.feed(IDS[:, :1], [1], cache)
    assert all(a.equal(b) for a, b in zip(kept, (p for la in cache.layers[1:] for p in la.pool.values()), strict=True))


def test_recycled_memory_never_shows(v4: Both) -> None:
    """R18. Memory that is freed between calls is full of NaN: twenty runs are bitwise the same."""
    cache, first = v4.new_cache(), None
    for _ in range(20):
        cache.reset()
        got = v4.feed(IDS[:, :9], [5, 1, 3], cache)
        blocks = [torch.full((n,), float("nan")) for n in (64, 256, 640, 1024, 4096, 8192, 65536) for _ in range(6)]
        del blocks
        first = got if first is None else first
        assert got.equal(first)


def expected_counts(config: Any, cached: bool) -> dict[str, int]:
    """What the structure of the model says must be recognised, by family."""
    layers, kinds = config.num_hidden_layers, list(config.layer_types)
    ratio4, ratio8 = kinds.count("compressed_sparse_attention"), kinds.count("heavily_compressed_attention")
    compressors = 2 * ratio4 + ratio8  # a ratio-4 layer compresses for its index as well
    counts = {
        "attention": layers, "router": layers, "experts": layers, "output": layers, "indexer": ratio4,
        "compressor": compressors,
        "mhc": 6 * layers + 1,  # each sublayer: sinkhorn, what goes in, what comes out; the head
    }  # fmt: skip
    # A window each; every compressor's open group (values and gates) and pool; overlap of the two at ratio 4.
    return {**counts, "store": layers + 3 * compressors + 4 * ratio4} if cached else counts


def assert_complete(graph: Any, config: Any, cached: bool) -> None:
    want = expected_counts(config, cached)
    assert {family: graph.counts().get(family, 0) for family in want} == want, graph.inputs
    assert not graph.misses and not graph.gaps, graph.misses


def test_everything_is_recognised_in_every_graph(v4: Both, one_shot: Tensor) -> None:
    """R21, R23. One graph a length, whatever was asked before, and each of them complete."""
    for size in (35, 5, 4, 3):
        v4.feed(IDS[:, :size], [size])
    close(v4.feed(IDS, [5, 1] + [1] * 34), one_shot)
    assert len(v4.compiled.report.graphs) == len(LENGTHS)
    for graph in v4.compiled.report.graphs:
        assert_complete(graph, v4.eager.config, cached=True)


@pytest.mark.slow
def test_other_lengths_share_graphs(v4: Both, one_shot: Tensor, dsv4: Callable[..., Any]) -> None:
    """R06, R07, R12, R21, R23. The reported split and all short prompts, with lengths that are not fixed; strict."""
    torch._dynamo.reset()
    flexible = Both(v4.eager, dsv4(v4.eager, strict=True))
    for sizes in ([3, 5, 1, 7, 8, 16], [24, 16], [39, 1], [7, 1, 1, 1, 30], [5, 2, 33], [5, 4, 2, 3, 26]):
        close(flexible.feed(IDS, sizes), one_shot)
    for length in (1, 2, 3, 4, 5, 7, 8, 9):
        close(flexible.feed(IDS[:, :length], [length]), one_shot[:, :length])
    graphs = flexible.compiled.report.graphs
    assert len(graphs) == 5  # the first length on its own; one token; up to 4, up to 8, and more
    for graph in graphs:
        assert_complete(graph, v4.eager.config, cached=True)
