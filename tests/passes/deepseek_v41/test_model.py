"""The project's own V4.1 miniature: every family recognised in every layer, results unchanged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.passes.default import default_pipeline
from dscompile.passes.engine import PassResult
from dscompile.passes.engine.graphs import find, subgraphs
from dscompile.passes.engine.testing import functional_graph, run_flat

CONFIG = DeepseekV41Config.miniature()
# Sinkhorn iterations are traced one by one, in both halves of every layer: one case has as many as the release.
CASES = {
    "prefill fp32": (torch.float32, 2, 9, False, 2),
    "prefill bf16 dynamic": (torch.bfloat16, 1, 11, True, 2),
    "decode fp32": (torch.float32, 1, 1, False, CONFIG.hc_sinkhorn_iters),
    "decode bf16": (torch.bfloat16, 2, 1, False, 2),
}


@dataclass
class Rewritten:
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    graph: fx.GraphModule
    results: list[PassResult]
    dtype: torch.dtype

    @property
    def counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for result in self.results:
            for match in result.matches:
                total[match.pattern.split(".")[0]] += match.count
        return total


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def rewritten(request: pytest.FixtureRequest) -> Rewritten:
    dtype, batch, length, dynamic, iterations = CASES[request.param]
    torch.manual_seed(0)
    config = CONFIG.with_changes(hc_sinkhorn_iters=iterations)
    model = DeepseekV41ForCausalLM(config, dtype=dtype).eval()
    cache = model.new_cache(batch, 64)
    ids = torch.randint(0, CONFIG.vocab_size, (batch, length))
    positions = torch.arange(length).expand(batch, length).contiguous()
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
        torch._dynamo.mark_dynamic(positions, 1)
    graph = functional_graph(lambda i, p: model(i, p, cache), ids, positions, dynamic=None if dynamic else False)
    before = run_flat(graph)
    results = default_pipeline().run(graph)
    return Rewritten(before, run_flat(graph), graph, results, dtype)


def test_counts_follow_from_the_configuration(rewritten: Rewritten) -> None:
    layers = CONFIG.num_hidden_layers
    sources, indexers = len(CONFIG.kv_source_layer_ids), len(CONFIG.index_source_layer_ids)
    pooled = sum(CONFIG.ratio(layer) > 1 for layer in CONFIG.kv_source_layer_ids)
    counts = rewritten.counts
    assert counts["hc_pre"] == counts["hc_post"] == counts["sinkhorn"] == 2 * layers
    assert counts["attention"] == counts["router"] == counts["experts"] == counts["output"] == layers
    assert counts["index_topk"] == counts["fake_quant"] == indexers
    assert counts["compress"] == pooled
    assert counts["norm_rope_store"] == layers + sources, "window rows, and index keys of every source"
    assert counts["rope_store"] == sources, "compressed rows"
    assert counts["quant_pack"] == layers + 2 * sources
    assert not [miss for result in rewritten.results for miss in result.near_misses]


def test_results_are_unchanged(rewritten: Rewritten) -> None:
    for before, after in zip(rewritten.before, rewritten.after, strict=True):
        assert before.dtype == after.dtype and before.shape == after.shape
        if not before.dtype.is_floating_point:
            assert torch.equal(before, after)
        else:
            # the same roundings in bf16; another order of sums in fp32
            torch.testing.assert_close(
                after, before, rtol=2e-4 if rewritten.dtype == torch.float32 else 2e-2, atol=2e-4
            )


def test_attention_reads_packed_rows_and_rotates_inside(rewritten: Rewritten) -> None:
    seen = 0
    for sub in subgraphs(rewritten.graph):
        for node in find(sub.gm.graph, torch.ops.dsv4.sparse_attention.default):
            seen += sub.calls
            window_format, comp_format, rope_q = node.args[13], node.args[14], node.args[12]
            assert window_format == "fp8_g32_ue8m0" and rope_q is True
            assert comp_format == ("fp4_g16_e4m3" if node.args[5] is not None else "none")
    assert seen == CONFIG.num_hidden_layers
    left = Counter(
        str(node.target)
        for sub in subgraphs(rewritten.graph)
        for node in sub.gm.graph.nodes
        if node.op == "call_function"
    )
    assert not left["aten.bmm.default"] and not left["aten._softmax.default"] and not left["aten.topk.default"]


def test_pools_are_written_in_place(rewritten: Rewritten) -> None:
    for sub in subgraphs(rewritten.graph):
        for node in sub.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            assert not str(node.args[1].target).startswith("aten.index_put"), "a pool is copied back whole"
