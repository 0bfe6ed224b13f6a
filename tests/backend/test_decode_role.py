"""Compiled steps in the role "decode": nothing that a CUDA graph could not record, and one graph for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

import dscompile
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from dscompile.rewriting import StrictError
from support.elision import small_model
from support.expert_blocks import Blocks
from support.paged import scattered
from support.ranks import fake_group

READS = ("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose")
COUNTS = ("nonzero", "masked_select", "unique", "argwhere", "bincount", "repeat_interleave")
ROWS, STEPS = 3, 20


@pytest.fixture(scope="module")
def model() -> DeepseekV41ForCausalLM:
    return small_model()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The finished graphs, in order."""
    from dscompile import backend

    found, real = [], backend._compile

    def compile(graph: fx.GraphModule, *rest: Any) -> Any:
        found.append(graph)
        return real(graph, *rest)

    monkeypatch.setattr(backend, "_compile", compile)
    return found


def compiled(model: Any, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(
        model, backend="dsv4", fullgraph=True, options={"role": "decode", "strict": True, "inductor": False, **options}
    )


def calls(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Every operation of a graph and of the graphs in it."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def assert_capturable(graph: fx.GraphModule) -> set[str]:
    """No host reads and no sizes of values, by the nodes' own names and values -> the operations' names."""
    names = set()
    for node in calls(graph):
        words = str(node.target).split(".")
        names.add(str(node.target))
        assert not set(words) & {*READS, *COUNTS, "cond", "while_loop"}, node.format_node()
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor | torch.SymInt | torch.SymFloat):
                assert not free_unbacked_symbols(value), node.format_node()
        if words[1:2] and words[1] in ("index", "index_put", "_unsafe_index", "index_put_"):
            for index in tree_leaves(node.args[1]):
                assert index is None or index.meta["val"].dtype == torch.int64, node.format_node()
        if words[0] == "dsv4_ep" and words[1] in ("dispatch", "dispatch_wait"):
            given = {arg.name: value for arg, value in zip(node.target._schema.arguments, node.args)}
            assert given["capacity"] == ROWS and given["overflow"] == "error", "the padded form"
    return names


def places(pools: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (pool.data_ptr(), pool.shape, pool.untyped_storage().nbytes()) for name, pool in pools.items()}


def serve(paged: PagedModel, other: PagedModel | None) -> None:
    """20 steps: requests of unlike lengths join and leave, and now and then every row is idle."""
    live: dict[int, tuple[int, int]] = {}
    before = places(paged.cache.pools)
    for step in range(STEPS):
        for number in [number for number, (_, end) in live.items() if end == step]:
            other_number, _ = live.pop(number)
            paged.cache.close(number)
            if other is not None:
                other.cache.close(other_number)
        if step % 9 == 8:
            assert paged.step([], []).shape == (0, 1, paged.model.config.vocab_size)
        while len(live) < ROWS and step % 3 == 0 and step < 16:
            prompt = [(7 * i + step) % 96 for i in range(1 + 5 * len(live) + step)]
            pair = []
            for run in (paged, other):
                if run is not None:
                    pair.append(run.cache.open(len(prompt)))
                    PagedModel(run.model, run.cache, ROWS, 64).prefill(pair[-1:], [prompt]) if other else None
                    run.cache.commit(pair[-1], len(prompt))
            live[pair[0]] = (pair[-1], step + 2 + 3 * len(live))
        tokens = [[(step + number) % 96] for number in live]
        got = paged.step(list(live), tokens)
        if other is not None and live:
            want = other.step([pair[0] for pair in live.values()], tokens)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert places(paged.cache.pools) == before


def test_paged_steps(model: DeepseekV41ForCausalLM, graphs: list[fx.GraphModule]) -> None:
    """Logits are those of the eager model."""
    with dscompile.collect() as report:
        paged = PagedModel(model, scattered(model, ROWS, 200), ROWS, 64, compiled(model))
        serve(paged, PagedModel(model, scattered(model, ROWS, 200, skip=1), ROWS, 64))
    (graph,), (entry,) = graphs, report.graphs
    names = assert_capturable(graph)
    assert any("sparse_attention" in name for name in names)
    assert entry.decoding is not None and entry.decoding.captured
    text = str(report).replace("\n", " ")
    assert "decode: experts by experts x6" in text and "sparse_attention x6" in text and "exchange none" in text
    assert "decode: can be captured" in text and "decode: can be captured" in report.to_html()


def test_steps_with_experts_on_other_ranks(model: DeepseekV41ForCausalLM, graphs: list[fx.GraphModule]) -> None:
    """Only the padded exchange, without being asked for."""
    with fake_group(0, 2) as group, dscompile.collect() as report:
        forward = compiled(model, mesh=group, expert_capacity=ROWS)
        serve(PagedModel(model, scattered(model, ROWS, 200), ROWS, 64, forward), None)
    (graph,), (entry,) = graphs, report.graphs
    names = assert_capturable(graph)
    assert {"dsv4_ep.dispatch.default", "dsv4_ep.combine_wait.default"} <= names
    assert entry.decoding is not None
    assert f"exchange padded to {ROWS} rows between two ranks in 6 layers" in entry.decoding.lines()[0]


@torch.no_grad()
def test_dense_steps(model: DeepseekV41ForCausalLM, graphs: list[fx.GraphModule]) -> None:
    """Rows at positions of their own, that stop and start again."""
    forward = compiled(model)
    caches = [model.new_cache(ROWS, 64) for _ in range(2)]
    fields = {"window", "compressed", "index_keys", "open_groups"}
    pools = {f"{name}.{layer}": pool for name in fields for layer, pool in getattr(caches[0], name).items()}
    before, at = places(pools), torch.tensor([0, 0, 0])
    with dscompile.collect() as report:
        for step in range(STEPS):
            idle = torch.tensor([step % 7 == 6, step < 4, 9 < step < 14])
            if step == 14:
                at[2] = 0  # another request in this row
            positions = torch.where(idle, -1, at).unsqueeze(1)
            ids = torch.tensor([[step], [step + 20], [step + 40]])
            got, want = forward(ids, positions, caches[0]), model(ids, positions, caches[1])
            torch.testing.assert_close(got[~idle], want[~idle], rtol=1e-4, atol=1e-4)
            at += ~idle
    (graph,), (entry,) = graphs, report.graphs
    assert_capturable(graph)
    assert places(pools) == before and entry.decoding is not None and entry.decoding.captured


BAD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "item": (lambda x: x * x.sum().long().item(), "aten._local_scalar_dense.default: the host reads a value"),
    "nonzero": (lambda x: x.nonzero() + 1, "aten.nonzero.default: a size that depends on values"),
    "mask": (lambda x: x[x > 0] * 2, "aten.index.Tensor by a mask"),
    "masked_select": (lambda x: x.masked_select(x > 0) + 1, "aten.masked_select.default: a size"),
    "write": (lambda x: x.index_put((x > 0,), x.new_zeros(())), "aten.index_put.default by a mask"),
    "repeats": (lambda x: x.flatten().repeat_interleave(x.flatten().long().abs()), "aten.repeat_interleave.Tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_captured_is_named(case: str) -> None:
    """With its node, its line and the reason; an error where that is asked for."""
    work, reason = BAD[case]
    x = torch.arange(-2.0, 4.0).view(2, 3)
    changes = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(changes), torch.no_grad(), dscompile.collect() as report:
        torch.testing.assert_close(compiled(work, strict=False, disable="store")(x), work(x))
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
            compiled(work, disable="store")(x)
        torch.testing.assert_close(compiled(work, role="prefill", disable="store")(x), work(x))
    decoding, other = report.graphs[0].decoding, report.graphs[-1].decoding
    assert decoding is not None and not decoding.captured and other is None
    assert any(each.reason.startswith(reason) for each in decoding.obstacles), decoding.lines()
    assert all(each.node and "test_decode_role.py" in each.source for each in decoding.obstacles)
    assert "decode: cannot be captured, outside layers, " in str(report).replace("\n", " ")
    assert isinstance(caught.value.inner_exception, StrictError)
    assert reason in str(caught.value.inner_exception)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"expert_exchange": "exact"}, "exchange in the exact form: the host waits for counts"),
        (
            {"expert_capacity": 4, "expert_overflow": "exact"},
            "exchange with overflow 'exact': the host waits for a flag",
        ),
    ],
)
def test_exchanges_that_the_host_waits_for(options: dict[str, Any], reason: str) -> None:
    model = Blocks(layers=1)
    x = torch.zeros(1, 2, model.config.hidden_size)
    with fake_group(0, 2) as group, torch.no_grad(), dscompile.collect() as report:
        compiled(model, mesh=group, strict=False, **options)(x)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="cannot be captured"):
            compiled(model, mesh=group, **options)(x)
    decoding = report.graphs[0].decoding
    assert decoding is not None
    (obstacle,) = decoding.obstacles
    assert obstacle.reason.startswith(reason) and obstacle.layer == "layers.0"
