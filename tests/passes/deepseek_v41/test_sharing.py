"""Layers that read the same rows with the same selection: decoding happens once per source, no cache is copied."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

import dscompile
from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.passes.engine.graphs import subgraphs

#: Two sources with three readers each: layers 1 and 5 are Full, the others Reuse.
CONFIG = DeepseekV41Config.miniature(
    num_hidden_layers=9,
    compress_ratios=(0, 1, 1, 1, 1, 1, 1, 1, 1),
    kv_source_layer_ids=(1, 5),
    index_source_layer_ids=(1, 5),
    candidate_source_layer_id=None,
    hc_sinkhorn_iters=2,
)


def decoding(graph: fx.GraphModule) -> dict[str, Counter[str]]:
    """Graph path -> how many operations that decode compressed rows stand in it."""
    names = ("dsv4.gather_rows.default", "dsv4.unpack_used.default")
    return {
        sub.path: Counter(str(node.target) for node in sub.gm.graph.nodes if str(node.target) in names)
        for sub in subgraphs(graph)
    }


@pytest.mark.parametrize("length", [1, 6])
def test_rows_are_decoded_once_per_source(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[fx.GraphModule] = []
    from dscompile import backend

    compile_ = backend._compile
    monkeypatch.setattr(backend, "_compile", lambda graph, *rest: kept.append(graph) or compile_(graph, *rest))
    torch.manual_seed(0)
    model = DeepseekV41ForCausalLM(CONFIG, dtype=torch.float32).eval()
    caches = [model.new_cache(1, 32) for _ in range(2)]
    ids = torch.randint(0, CONFIG.vocab_size, (1, 12))
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :6], torch.arange(6)[None], cache)
        positions = torch.arange(6, 6 + length)[None]
        expected = model(ids[:, 6 : 6 + length], positions, caches[0])
        report = dscompile.explain(model, ids[:, 6 : 6 + length], positions, caches[1], options={"lower": False})
    (graph,) = kept
    name = "dsv4.gather_rows.default" if length == 1 else "dsv4.unpack_used.default"
    places = decoding(graph)
    regions = {path: counts for path, counts in places.items() if path}
    readers = [path for path, counts in regions.items() if not counts]
    assert readers, "the readers' region decodes nothing itself"
    total = sum(counts[name] * max(1, len(_calls(graph, path))) for path, counts in places.items())
    assert total == len(CONFIG.kv_source_layer_ids), f"{places}: once per source"
    assert any(name.split(".")[1] in line for line in report.graphs[0].shared)
    assert report.counts()["attention"] == CONFIG.num_hidden_layers
    for a, b in zip(caches[0].window.values(), caches[1].window.values(), strict=True):
        assert torch.equal(a[:-1], b[:-1])
    assert expected.isfinite().all()


def _calls(graph: fx.GraphModule, path: str) -> tuple[fx.Node, ...]:
    return next(sub.sites for sub in subgraphs(graph) if sub.path == path)
