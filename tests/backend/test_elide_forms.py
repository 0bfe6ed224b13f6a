"""Tails with other caches, experts elsewhere, and layers that the miniature behind the other tests does not have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dscompile
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.models.deepseek_v41.generate import prefill, prompt_positions
from support.elision import WINDOW, cache_rows, small_model
from support.paged import scattered
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

FEW: dict[str, Any] = {
    "num_hidden_layers": 3, "compress_ratios": (0, 1, 1), "kv_source_layer_ids": (1,), "index_source_layer_ids": (1,),
    "candidate_source_layer_id": None,
}  # fmt: skip


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    settings = {"inductor": False, "role": "prefill", "elide": "exact", **options}
    return torch.compile(model, backend="dsv4", options=settings, fullgraph=True)


def ids_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(96, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(5))


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Pools that differ in more than a few codes, which are rounded to the other side now and then."""
    share = {name: (rows.float() - b[name].float()).abs().gt(1e-3).float().mean() for name, rows in a.items()}
    return [name for name, differs in share.items() if differs > 0.03]


def test_a_paged_cache() -> None:
    """In chunks, of requests of different lengths: the same logits, and the same rows decoded from afterwards."""
    model, lengths = small_model(**FEW), (70, 33, 12)
    prompts = [row[:length].tolist() for row, length in zip(ids_of(lengths), lengths, strict=True)]
    with dscompile.collect() as report:
        caches = [scattered(model, 3, 300, 1) for _ in range(2)]
        runs = [PagedModel(model, cache, 3, 96, call) for cache, call in zip(caches, (None, compiled(model)))]
        logits, steps = [], []
        for run, cache in zip(runs, caches, strict=True):
            numbers = [cache.open(length) for length in lengths]
            logits.append(run.prefill(numbers, prompts, 40))
            run.forward = model
            steps.append([run.step(numbers, [[7], [8], [9]]) for _ in range(WINDOW)])
    torch.testing.assert_close(logits[1], logits[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(steps[1], steps[0], atol=2e-2, rtol=0)
    elision = report.graphs[0].elision
    assert elision is not None and elision.tail is not None, elision


def _on_two_ranks(rank: int, form: str) -> tuple[Any, Any, list[str], int | None]:
    model = small_model(**FEW)
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dscompile.shard_experts(model, mesh, "ep")
    options: dict[str, Any] = {"mesh": mesh, "expert_parallel": "ep", "expert_exchange": form}
    if form == "padded":
        options["expert_capacity"] = 64 * 2
    # One rank's prompt is longer than the tail, the other's is not: its graph has no tails in it.
    length = (60, 12)[rank]
    caches, ids = [each.new_cache(1, 128) for each in (whole, model)], ids_of((length,))
    positions = torch.arange(length)[None]
    want = prefill(whole, ids, positions, caches[0])
    got = prefill(compiled(model, **options), ids, positions, caches[1])
    rows = [cache_rows(cache) for cache in caches]
    elision = dscompile.last_report().graphs[-1].elision
    return got, want, differing(*rows), None if elision is None else elision.tail


@pytest.mark.parametrize("form", ["padded", "exact"])
def test_experts_that_are_spread_over_ranks(form: str, tmp_path: Path) -> None:
    for rank, (got, want, bad, tail) in enumerate(run_ranks(_on_two_ranks, 2, tmp_path, form, seconds=300)):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=0)
        assert bad == [] and tail == (15, None)[rank]


def test_engram_behind_the_source_in_chunks_of_any_length() -> None:
    """Two layers with tables behind the source; one graph for every length above the tail."""
    model = small_model(**{
        **FEW, "num_hidden_layers": 5, "compress_ratios": (0, 1, 1, 1, 1), "index_source_layer_ids": (1, 3),
        "engram_layer_ids": (2, 4),
    })  # fmt: skip
    forward, lengths = compiled(model), (110, 83)
    ids, positions = ids_of(lengths), prompt_positions(torch.tensor(lengths), max(lengths))
    caches = [model.new_cache(2, 128) for _ in range(2)]
    with dscompile.collect() as report, torch.no_grad():
        for begin, end in ((0, 40), (40, 77), (77, 110)):
            given = [value[:, begin:end].contiguous() for value in (ids, positions)]
            for value in given:
                torch._dynamo.mark_dynamic(value, 1)
            got, want = forward(*given, caches[0]), model(*given, caches[1])
            for row, count in enumerate((given[1] >= 0).sum(1).tolist()):
                if count:
                    torch.testing.assert_close(got[row, count - 1], want[row, count - 1], atol=2e-2, rtol=0)
    rows = [cache_rows(cache) for cache in caches]
    assert differing(*rows) == []
    (graph,) = report.graphs
    assert graph.elision is not None and graph.elision.tail is not None
