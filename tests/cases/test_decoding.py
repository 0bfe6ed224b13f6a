"""How many graphs a generation takes, and the word before there are too many (case R23). One sequence at a time.

Batches, chunks and their graphs: `test_v4.py`, `test_v41.py`.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from dscompile.backend import DscompileWarning
from dscompile.integrations.transformers import StaticV4Cache, prepare
from dscompile.miniatures import v41_model
from support.v4 import tiny, token_ids

PROMPT, STEPS = 6, 34
IDS = token_ids(PROMPT + STEPS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def recompile_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    messages = [str(w.message) for w in caught if issubclass(w.category, DscompileWarning)]
    return [message for message in messages if "recompile_limit" in message]


def test_v4_with_the_static_cache_decodes_with_one_graph(dsv4: Callable[..., Any]) -> None:
    """And says nothing about limits. Another cache of the same sizes needs no other graph."""
    model = prepare(tiny(hc_sinkhorn_iters=1))
    want = model(IDS, use_cache=False).logits
    compiled = dsv4(model, strict=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            cache = StaticV4Cache(model.config, 1, 64, model.dtype)
            got = [compiled(IDS[:, :PROMPT].clone(), cache=cache).logits]
            got += [compiled(IDS[:, [at]], cache=cache).logits for at in range(PROMPT, PROMPT + STEPS)]
            torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=1e-4)
    assert len(compiled.report.graphs) == 2  # the prompt and every step
    assert compiled.report.counts(0) == compiled.report.counts(1)
    assert not recompile_warnings(caught)


def test_v41_decodes_with_one_graph(dsv4: Callable[..., Any]) -> None:
    """bfloat16, as it is used; window, Full and Reuse layers."""
    model = v41_model(
        num_hidden_layers=3, compress_ratios=(0, 2, 2), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
        candidate_source_layer_id=None, hc_sinkhorn_iters=1,
    )  # fmt: skip
    compiled = dsv4(model, strict=True)
    mine, theirs = model.new_cache(1, 64), model.new_cache(1, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]:
            positions = torch.arange(start, end)[None]
            got = compiled(IDS[:, start:end].clone(), positions, mine)
            want = model(IDS[:, start:end], positions, theirs)
            assert (got - want).norm() < 0.03 * want.norm()
    assert len(compiled.report.graphs) == 2
    counts = compiled.counts
    assert counts == compiled.report.counts(0)
    assert (counts["attention"], counts["router"], counts["experts"], counts["mhc"]) == (3, 3, 3, 18)
    assert (counts["compressor"], counts["indexer"], counts["store"]) == (1, 1, 3 + 3)
    assert not recompile_warnings(caught)


def test_the_models_own_cache_is_warned_about_before_it_is_too_late(dsv4: Callable[..., Any]) -> None:
    """It makes a graph a step. The warning comes before Dynamo gives up, and the numbers stay right after it has."""
    kind = "compressed_sparse_attention"
    model = tiny(num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], hc_sinkhorn_iters=1)
    model.set_experts_implementation("grouped_mm")
    want = model(IDS, use_cache=False).logits
    compiled, cache = dsv4(model, dynamic=False), DynamicCache(config=model.config)
    got = [model(IDS[:, :PROMPT], cache=cache, use_cache=True).logits]
    graphs, warned = [], []
    with torch._dynamo.config.patch(recompile_limit=3):
        for at in range(PROMPT, PROMPT + 7):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got.append(compiled(IDS[:, [at]], cache=cache, use_cache=True).logits)
            graphs.append(len(compiled.report.graphs))
            warned.append(bool(recompile_warnings(caught)))
    torch.testing.assert_close(torch.cat(got, 1), want[:, : PROMPT + 7], rtol=0, atol=1e-4)
    assert graphs[-1] == 3, "the limit of this test was reached"
    first = warned.index(True)
    assert graphs[first] < 3, "told before the last graph"
    notes = [note for graph in compiled.report.graphs for note in graph.notes]
    assert any("recompile_limit" in note and "StaticV4Cache" in note for note in notes)
