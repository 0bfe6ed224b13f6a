"""The paged model under `torch.compile(..., backend="dsv4")`: recognised whole, one graph whatever the pages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.report import GraphReport, collect
from support.paged import Ids, greedy, scattered


def assert_complete(graph: GraphReport, config: DeepseekV41Config) -> None:
    """Every family in every layer that has it, as with the dense cache."""
    counts = graph.counts()
    layers, sources = config.num_hidden_layers, len(config.kv_source_layer_ids)
    indexers = len(config.index_source_layer_ids)
    for family in ("attention", "router", "experts", "output"):
        assert counts[family] == layers, family
    assert counts["indexer"] == indexers
    assert counts["compressor"] == sum(config.ratio(layer) > 1 for layer in config.kv_source_layer_ids)
    assert counts["mhc"] == 6 * layers
    stores: dict[str, int] = {}
    for match in graph.matches:
        if match.family == "store":
            name = match.pattern.split(".")[0]
            stores[name] = stores.get(name, 0) + 1
    assert stores["norm_rope_store"] == layers + sources and stores["rope_store"] == sources
    assert not graph.misses and not graph.gaps


def compiled(model: DeepseekV41ForCausalLM, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="dsv4", fullgraph=True, options={"inductor": False, **options})


def test_one_decode_graph_for_any_pages(prompt: Callable[..., Ids], alone: Callable[..., Ids]) -> None:
    """Three caches with other pages, other positions, rows idle or not: one graph, recognised whole."""
    model = v41_model(torch.float32, engram_layer_ids=(1,), hc_sinkhorn_iters=2)  # a graph of half the size
    forward, prompts = compiled(model), [prompt(20, 1), prompt(9, 2), prompt(33, 3)]
    with collect() as report:
        for skip, rows in enumerate(([0, 1, 2], [2], [1, 0])):
            cache = scattered(model, 3, 300, skip)
            eager, steps = (PagedModel(model, cache, 3, 64, call) for call in (None, forward))
            chosen = [prompts[row] for row in rows]
            numbers = [cache.open(len(each)) for each in chosen]
            tokens = greedy(steps, numbers, eager.prefill(numbers, chosen), 5)
            assert tokens == [alone(model, each, 5) for each in chosen]
    (graph,) = report.graphs
    assert_complete(graph, model.config)


def test_one_packed_graph_for_any_mix(prompt: Callable[..., Ids], alone: Callable[..., Ids]) -> None:
    """Requests with several rows, one or none: one graph, recognised whole, in which nothing is left out."""
    model = v41_model(torch.float32, engram_layer_ids=(1,), hc_sinkhorn_iters=2)
    forward, prompts = compiled(model, role="prefill", elide="exact"), [prompt(20, 1), prompt(9, 2), prompt(33, 3)]
    cache = scattered(model, 3, 300)
    eager, run = (PagedModel(model, cache, rows, 64, call) for rows, call in ((3, None), (8, forward)))
    numbers = [cache.open(len(each)) for each in prompts]
    with collect() as report:
        run.pack(numbers[2:], [prompts[2][:17]], 8)
        logits = run.pack(numbers, [*prompts[:2], prompts[2][17:]], 8)
    assert greedy(eager, numbers, logits, 4) == [alone(model, each, 4) for each in prompts]
    (graph,) = report.graphs
    assert_complete(graph, model.config)
    assert graph.elision is not None and "stores rows of all tokens" in graph.elision.reason


@pytest.mark.slow
def test_one_graph_for_every_longer_call(
    model: DeepseekV41ForCausalLM, prompt: Callable[..., Ids], alone: Callable[..., Ids]
) -> None:
    """Prompts of any length, chunks, and verification of several tokens."""
    forward, prompts = compiled(model), [prompt(20, 1), prompt(33, 3)]
    with collect() as report:
        for skip, chunk in enumerate((None, 7)):
            cache = scattered(model, 2, 300, skip)
            eager, run = (PagedModel(model, cache, 2, 64, call) for call in (None, forward))
            numbers = [cache.open(len(each)) for each in prompts]
            logits = run.prefill(numbers, prompts, chunk)
            assert greedy(eager, numbers, logits, 4) == [alone(model, each, 4) for each in prompts]
            run.verify(numbers, [[1, 2, 3], [4, 5]])
    (graph,) = report.graphs
    assert_complete(graph, model.config)
