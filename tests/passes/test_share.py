"""Shared work leaves the regions, by data flow alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dscompile.capture import functionalise
from dscompile.passes.regions import region_calls, region_module, restore_region_mutation
from dscompile.passes.share import Shared, hoist_shared

WIDTH, ROWS = 6, 11


class Source(nn.Module):
    """Writes rows into a pool and reads them back, unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        pool[slots] = self.linear(x)
        return x + torch.exp(pool * 0.1).sum(0)


class Reader(nn.Module):
    """Reads a source's rows; the unpacking depends on the pool alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, pool: Tensor) -> Tensor:
        return self.linear(x) * torch.exp(pool * 0.1).sum(0)


class Model(nn.Module):
    """plan: (layer, index of the pool it uses), in order."""

    def __init__(self, plan: list[tuple[str, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plan = plan
        self.layers = nn.ModuleList([Source() if kind == "source" else Reader() for kind, _ in plan])

    def forward(self, x: Tensor, pools: list[Tensor], slots: Tensor) -> Tensor:
        for layer, (kind, pool) in zip(self.layers, self.plan, strict=True):
            x = layer(x, pools[pool], slots) if kind == "source" else layer(x, pools[pool])
        return x


def run(plan: list[tuple[str, int]]) -> tuple[fx.GraphModule, list[Shared]]:
    """Compiles with sharing alone, checks the result against eager, returns the rewritten graph and what moved."""
    seen: dict[str, Any] = {}

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def inner(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            restore_region_mutation(graph)
            seen["shared"] = hoist_shared(graph)
            seen["graph"] = graph
            return graph.forward

        return functionalise(gm, inputs, inner)

    torch._dynamo.reset()
    model = Model(plan).eval()
    x, slots = torch.randn(4, WIDTH), torch.tensor([1, 3, 5, 7])
    pools = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    copies = [pool.clone() for pool in pools]
    with torch.no_grad():
        expected = model(x, copies, slots)
        actual = torch.compile(model, backend=backend, fullgraph=True)(x, pools, slots)
    torch.testing.assert_close(actual, expected)
    for pool, copy in zip(pools, copies, strict=True):
        torch.testing.assert_close(pool, copy)
    return seen["graph"], seen["shared"]


def exps(graph: fx.GraphModule) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default))


def test_readers_of_one_pool_share_and_take_the_source_s_value() -> None:
    plan = [("source", 0), ("reader", 0), ("reader", 0), ("source", 1), ("reader", 1)]
    graph, shared = run(plan)
    assert exps(graph) == 0, "the sources already compute it, so the parent needs none of its own"
    source = region_module(graph, region_calls(graph)[0])
    assert exps(source) == 1
    assert len(source.graph.output_node().args[0]) == 2
    assert [(s.calls, s.runs) for s in shared] == [(3, 2), (2, 1), (2, 1)]


def test_a_source_that_is_no_region_serves_its_readers() -> None:
    graph, shared = run([("source", 0), ("reader", 0), ("reader", 0), ("reader", 0)])
    assert [(s.calls, s.runs) for s in shared] == [(3, 1)]


def test_readers_of_unwritten_pools_share_per_pool() -> None:
    graph, shared = run([("reader", 1), ("reader", 1), ("reader", 2), ("reader", 1)])
    assert exps(graph) == 2
    assert [(s.calls, s.runs) for s in shared] == [(4, 2)]


def test_a_write_in_between_separates_readers() -> None:
    plan = [("reader", 0), ("reader", 0), ("source", 0), ("reader", 0), ("reader", 0), ("source", 0)]
    graph, shared = run(plan)
    assert [(s.calls, s.runs) for s in shared][0] == (4, 2)
    assert exps(graph) == 1, "before the write once in the parent, after it the source's own value"


@pytest.mark.parametrize("plan", [[("source", 0), ("source", 1)], [("reader", 0), ("reader", 1), ("reader", 2)]])
def test_nothing_moves_where_nothing_is_shared(plan: list[tuple[str, int]]) -> None:
    graph, shared = run(plan)
    assert shared == []
    assert exps(graph) == 0, "the work stayed inside the regions"


def test_two_sources_in_turn_each_serve_their_readers() -> None:
    plan = [("source", 0), ("reader", 0), ("reader", 0), ("source", 1), ("reader", 1), ("reader", 1)]
    graph, shared = run(plan)
    assert exps(graph) == 0
    assert (shared[0].calls, shared[0].runs) == (4, 2)
