"""Layers that use what an earlier one chose, with the model cut anywhere between them (case R16).

Four layers, sources [0, 0, 2, 2]. Each half is compiled on its own, as the stages of a pipeline would be; the index
list of the latest source goes from one to the other through one buffer that is used again in every step.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dscompile.miniatures import token_ids, v41_model
from dscompile.models.deepseek_v41 import DeepseekV41Cache, DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.hyper import hc_collapse
from dscompile.models.deepseek_v41.plan import clean_positions, plan_window_rows
from dscompile.models.deepseek_v41.rope import rope_table

BATCH, CAPACITY = 2, 32
IDS = token_ids(20, BATCH)
IDS[1] = IDS[1].flip(0)
SOURCES = {
    "num_hidden_layers": 4, "compress_ratios": (2, 2, 1, 1), "kv_source_layer_ids": (0, 2),
    "index_source_layer_ids": (0, 2), "candidate_source_layer_id": None, "hc_sinkhorn_iters": 1, "index_n_heads": 16,
    "release_decode_keys": False,
}  # fmt: skip


class Stage(nn.Module):
    """Layers `first` .. `last` - 1 of the model; hands over streams, pre and, in `chosen`, the latest index list."""

    def __init__(self, model: DeepseekV41ForCausalLM, first: int, last: int) -> None:
        super().__init__()
        self.model, self.span = model, range(first, last)

    def forward(
        self, streams: Tensor, pre: Tensor, positions: Tensor, cache: DeepseekV41Cache, chosen: Tensor
    ) -> tuple[Tensor, Tensor]:
        model = self.model
        positions = clean_positions(positions, cache.max_tokens)
        window = plan_window_rows(positions, model.config.sliding_window)
        far = rope_table(positions, model.compressed_frequencies)
        groups = {ratio: model.plan_ratio(positions, ratio, cache) for ratio in (1, 2)}
        indices = chosen
        for i in self.span:
            common = (streams, pre, positions, cache.window[i], *window, *far)
            source = model.config.kv_source(i)
            if model.kinds[i] == "full":
                plan = groups[cache.ratios[i]]
                opened = (None, cache.open_groups[i], *plan.open_group) if cache.ratios[i] > 1 else ()
                streams, pre, indices = model.layers[i](
                    *common, cache.compressed[i], cache.index_keys[i], *plan.store, *opened
                )
            else:
                streams, pre = model.layers[i](*common, cache.compressed[source], indices)
        if indices is not chosen:
            chosen.copy_(indices)
        return streams, pre


@pytest.fixture(scope="module")
def model() -> DeepseekV41ForCausalLM:
    return v41_model(torch.float32, **SOURCES)


@pytest.mark.parametrize(("cut", "chunks"), [(1, True), (3, False)])
def test_a_cut_changes_nothing_and_nothing_comes_from_the_last_step(
    dsv4: Callable[..., Any], model: DeepseekV41ForCausalLM, cut: int, chunks: bool
) -> None:
    """After layer 0 or 2 the second half begins with a reuse layer. The buffer is poisoned before every step."""
    torch._dynamo.reset()
    plain = [Stage(model, 0, cut), Stage(model, cut, 4)]
    halves = [dsv4(half, dynamic=False) for half in plain]
    mine, theirs = model.new_cache(BATCH, CAPACITY), model.new_cache(BATCH, CAPACITY)
    # Both sources choose the same number of rows, so that one buffer serves.
    buffers = {tokens: torch.empty(BATCH, tokens, model.config.index_topk, dtype=torch.int64) for tokens in (6, 1)}
    for start, end in [(0, 6), (6, 7), (7, 8), (8, 14), (14, 15)]:
        ids, positions = IDS[:, start:end], torch.arange(start, end).repeat(BATCH, 1)
        want = model(ids, positions, theirs)
        streams = model.embed(ids).unsqueeze(2).repeat(1, 1, model.config.hc_mult, 1)
        pre = torch.eye(model.config.hc_mult)[0].repeat(*ids.shape, 1)
        chosen = buffers[end - start]
        chosen.fill_(10**9)  # read by mistake, this is an index out of range
        for half in halves if chunks or end - start == 1 else plain:
            streams, pre = half(streams, pre, positions, mine, chosen)
        got = model.head(model.norm(hc_collapse(streams, pre)).float())
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        visible = positions + 1  # rows of the later source, which has ratio 1
        assert ((chosen >= 0).sum(-1) == visible.clamp(max=model.config.index_topk)).all()
    for half, layers, indexers in zip(halves, (cut, 4 - cut), (1, 1) if cut == 1 else (2, 0), strict=True):
        assert len(half.report.graphs) == 1 + chunks
        for graph in half.report.graphs:
            found = graph.counts()
            assert found["attention"] == found["experts"] == layers and found.get("indexer", 0) == indexers
            assert not graph.misses, graph.misses


def test_layers_of_one_source_share_its_rows_and_list(dsv4: Callable[..., Any], model: DeepseekV41ForCausalLM) -> None:
    """Layer 1 uses what layer 0 stored and chose, layer 3 what layer 2 did: each pool changes its own pair only."""
    torch._dynamo.reset()
    compiled = dsv4(model, dynamic=False)
    positions = torch.arange(6).repeat(BATCH, 1)
    reached = {}
    for source in (0, 2):
        inputs: list[list[Tensor]] = []
        for spoiled in (False, True):
            cache = model.new_cache(BATCH, CAPACITY)
            compiled(IDS[:, :6], positions, cache)
            if spoiled:
                cache.compressed[source][:-1] ^= 0x15
            step = torch.full((BATCH, 1), 6)
            before = {layer: pool.clone() for layer, pool in cache.window.items()}
            compiled(IDS[:, 6:7], step, cache)
            inputs.append([cache.window[layer] - before[layer] for layer in range(4)])
        # A layer's window row is made of the layer's input: it changes from the first layer behind a spoiled one on.
        reached[source] = [not a.equal(b) for a, b in zip(*inputs, strict=True)]
    assert reached == {0: [False, True, True, True], 2: [False, False, False, True]}


def test_a_reuse_layer_without_a_source_is_refused_before_anything_is_compiled() -> None:
    for changes in (
        {"kv_source_layer_ids": (2,), "index_source_layer_ids": (2,)},  # layer 0 would use nothing
        {"kv_source_layer_ids": (), "index_source_layer_ids": ()},
        {"compress_ratios": (2, 2, 2, 1)},  # layer 3 would read rows of another ratio
    ):
        with pytest.raises(ValueError, match=r"no source for layer 0|compress_ratios\[3\]"):
            DeepseekV41Config.miniature(**{**SOURCES, **changes})
