"""Which layers of a prefill run on the tail, read off the graph: sources, windows and rings decide, nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import dscompile
from dscompile.capture import functionalise
from dscompile.miniatures import token_ids, v41_model
from dscompile.options import Options
from dscompile.passes.default import default_pipeline
from dscompile.passes.elide import ElisionError, elide
from dscompile.passes.elision import Elision
from dscompile.passes.regions import region_calls
from dscompile.report import GraphReport
from dscompile.rewriting import Snapshots, rewrite
from dscompile.verify import copy_graph
from support.elision import WINDOW, small_model


def captured(model: torch.nn.Module, *args: Any) -> fx.GraphModule:
    """The graph of one call as `rewrite` gets it; nothing runs."""
    seen: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def inner(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            seen.append(graph)
            return lambda *_: [torch.zeros(1) for _ in graph.graph.output_node().args[0]]  # type: ignore[union-attr]

        return functionalise(gm, inputs, inner)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    return seen[0]


def prompt(model: Any, tokens: int) -> tuple[Any, ...]:
    return token_ids(tokens), torch.arange(tokens)[None], model.new_cache(1, 128)


@functools.cache
def _captured(tokens: int, window: int) -> fx.GraphModule:
    model = small_model(sliding_window=window)
    return captured(model, *prompt(model, tokens))


@functools.cache
def _recognised(tokens: int, window: int) -> fx.GraphModule:
    graph = copy_graph(_captured(tokens, window))
    default_pipeline().run(graph)
    return graph


def recognised(tokens: int = 40, window: int = WINDOW) -> fx.GraphModule:
    """A graph of the small model after recognition, to be changed by the test."""
    return copy_graph(_recognised(tokens, window))


def label(node: fx.Node) -> str:
    return node.name


def report_of(model: Any, tokens: int, **options: Any) -> Elision:
    """What the report says of a prompt: with the layers' own names."""
    torch._dynamo.reset()
    settings = {"inductor": False, "lower": False, "role": "prefill", "elide": "exact", **options}
    with dscompile.collect() as report, torch.no_grad():
        torch.compile(model, backend="dsv4", options=settings, fullgraph=True)(*prompt(model, tokens))
    found = report.graphs[-1].elision
    assert found is not None
    return found


def chain(layers: int, window: int) -> int:
    """Tokens that the first of so many layers needs."""
    return window + (layers - 1) * (window - 1)


def test_everything_behind_the_last_source_of_the_miniature_runs_on_its_tail() -> None:
    """Layer 4 is the last source: its rows and keys take all tokens, the rest of it a tail."""
    found = report_of(v41_model(torch.float32, hc_sinkhorn_iters=2), 80)
    after = {f"layers.{layer}": chain(8 - layer, 16) for layer in (4, 5, 6, 7)}
    assert found.layers == after and found.partial == ("layers.4",)
    assert (found.tail, found.needed, found.window, found.exact) == (chain(4, 16), chain(4, 16), 16, True)


@pytest.mark.slow
def test_a_source_that_is_one_of_several_calls_of_a_region_runs_on_all_tokens() -> None:
    model = small_model(
        compress_ratios=(0, 2, 2, 2, 2, 2), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3),
        candidate_source_layer_id=None,
    )  # fmt: skip
    found = report_of(model, 40)
    assert found.layers == {"layers.4": chain(2, WINDOW), "layers.5": WINDOW} and found.partial == ()


@pytest.mark.slow
def test_a_model_whose_last_layer_is_a_source_keeps_only_that_layers_rows_from_all_tokens() -> None:
    model = small_model(
        num_hidden_layers=4, compress_ratios=(0, 2, 2, 1), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3),
        candidate_source_layer_id=None,
    )  # fmt: skip
    found = report_of(model, 40)
    assert found.layers == {"layers.3": WINDOW} and found.partial == ("layers.3",)


@pytest.mark.slow
def test_the_window_of_the_graph_decides() -> None:
    found = elide(recognised(window=5), "exact", None, label)
    assert found.window == 5 and found.needed == chain(4, 5)


def test_nothing_of_v4_is_left_out() -> None:
    """Every layer there compresses, the last one too."""
    pytest.importorskip("transformers")
    from dscompile.miniatures import v4_model

    torch._dynamo.reset()
    with dscompile.collect() as report, torch.no_grad():
        options = {"inductor": False, "lower": False, "role": "prefill", "elide": "exact"}
        torch.compile(v4_model(), backend="dsv4", options=options)(token_ids(64), use_cache=False)
    found = report.graphs[-1].elision
    assert found is not None and found.tail is None and found.layers == {} and found.exact
    assert "layers.2" in found.reason and "all layers run on all tokens" in str(report)


def test_a_graph_without_attention_says_so() -> None:
    graph = captured(torch.nn.Linear(3, 4), torch.ones(2, 3))
    assert elide(graph, "exact", None, label).reason == "no attention was recognised"


@pytest.mark.slow
def test_a_prompt_as_short_as_the_tail_keeps_all_its_tokens() -> None:
    graph = recognised(29)
    before = str(graph.graph)
    assert "prompts of up to 29 tokens" in elide(graph, "exact", None, label).reason
    assert str(graph.graph) == before


def test_without_the_proof_that_positions_rise_nothing_is_left_out() -> None:
    graph = recognised()
    for node in graph.graph.nodes:
        node.meta.pop("dsv4_contiguous_positions", None)
    before = str(graph.graph)
    found = elide(graph, "exact", None, label)
    assert found.tail is None and "not proven to rise by one" in found.reason and str(graph.graph) == before


def test_a_tail_shorter_than_a_ring_is_an_error_with_the_numbers() -> None:
    graph = recognised()
    with pytest.raises(ElisionError, match=r"'elide_tail' is 7; allowed: >= 8"):
        elide(graph, "bounded", 7, label)


@pytest.mark.parametrize(("tail", "runs", "exact"), [(None, 8, False), (12, 12, False), (29, 29, True), (35, 29, True)])
def test_bounded_is_approximate_unless_its_tail_is_long_enough(tail: int | None, runs: int, exact: bool) -> None:
    found = elide(recognised(), "bounded", tail, label)
    assert (found.tail, found.exact, found.needed) == (runs, exact, 29)
    assert ("APPROXIMATE, exact from 29 tokens on" in found.lines()[0]) != exact


def test_layers_of_a_kind_still_share_one_region() -> None:
    """Layers 3 and 5 run one shortened region; what ran on all tokens is gone."""
    graph = recognised()
    before = len(region_calls(graph))
    elide(graph, "exact", None, label)
    calls = region_calls(graph)
    assert len(calls) == before == 2
    assert len({str(call.kwargs["subgraph"].target) for call in calls}) == 1  # type: ignore[union-attr]
    assert len([name for name, _ in graph.named_children() if name.endswith(f"_tail{chain(3, WINDOW)}")]) == 1


def test_a_graph_for_a_gpu_is_fused_and_lowered_after_it() -> None:
    entries = [GraphReport("graph") for _ in range(2)]
    for entry, mode in zip(entries, (None, "exact"), strict=True):
        options = Options(target="sm_103a", role="prefill", elide=mode)
        rewrite(copy_graph(_captured(40, WINDOW)), [], options, entry, Snapshots())
    assert entries[1].elision is not None and entries[1].elision.tail == 29
    assert entries[0].kernel_counts().keys() == entries[1].kernel_counts().keys()


def test_the_report_holds_it_as_data() -> None:
    graph, entry = copy_graph(_captured(40, WINDOW)), GraphReport("graph")
    rewrite(graph, [], Options(lower=False, role="prefill", elide="bounded"), entry, Snapshots())
    data = dscompile.Report([entry]).to_dict()["graphs"][0]["elision"]
    assert data["mode"] == "bounded" and data["tail"] == WINDOW and data["exact"] is False and data["needed"] == 29
