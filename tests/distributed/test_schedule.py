"""Work lies between exchanges and their waits, in the graph and in what Inductor makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import dscompile
from dscompile.distributed.imagined import imagined_ranks
from dscompile.distributed.mesh import MeshError
from dscompile.passes.ordering import dependencies, list_schedule, reorder
from dscompile.passes.schedule import schedule, timeline
from tests.support.expert_blocks import Blocks, tokens

ep = torch.ops.dsv4_ep
aten = torch.ops.aten


@pytest.fixture
def ranks() -> Iterator[Any]:
    torch._dynamo.reset()
    with imagined_ranks(4) as group:
        yield group


def compiled(group: Any, **options: Any) -> tuple[Any, torch.Tensor]:
    model = Blocks(2)
    return torch.compile(model, backend="dsv4", options={"mesh": group, **options}), tokens(
        model.config, 0, (2, 3), torch.float32
    )


@torch.no_grad()
def test_the_shared_expert_runs_while_rows_travel(ranks: Any) -> None:
    model, x = compiled(ranks, inductor=False)
    with dscompile.collect() as report:
        model(x)
    found = report.graphs[0].schedule
    assert found is not None and found.halves == 1
    assert [cover.exchange for cover in found.covers] == [
        f"{what} layers.{layer}" for layer in range(2) for what in ("dispatch", "combine")
    ]
    for cover in found.covers:
        work = ", ".join(found.rows[row].what for row in cover.work)
        assert ("mm" in work and "silu" in work) if cover.exchange.startswith("dispatch") else not work
    assert found.bare == [found.covers[1], found.covers[3]]
    assert "schedule: 4 exchanges, 2 with nothing that runs meanwhile" in str(report)
    assert report.to_dict()["graphs"][0]["schedule"]["covers"][0]["work"] == found.covers[0].work


@torch.no_grad()
def test_the_step_can_be_switched_off(ranks: Any) -> None:
    model, x = compiled(ranks, inductor=False, disable="schedule")
    with dscompile.collect() as report:
        model(x)
    found = report.graphs[0].schedule
    assert found is not None and len(found.bare) == 4


@torch.no_grad()
def test_inductor_keeps_the_order(ranks: Any) -> None:
    from torch._inductor.utils import run_and_get_code

    model, x = compiled(ranks)
    _, code = run_and_get_code(model, x)
    order = re.findall(r"dsv4_ep\.(\w+)\.default\(|extern_kernels\.(\w+)\(", "\n".join(code))
    names = [own or extern for own, extern in order]
    start, wait = names.index("dispatch"), names.index("dispatch_wait")
    assert names[start + 1 : wait] == ["mm", "mm", "mm"], names  # the shared expert's, none joined with a later sum
    assert names[wait + 1 :][:2] == ["combine", "combine_wait"]


def test_imagined_ranks_want_a_process_of_their_own(ranks: Any) -> None:
    with pytest.raises(MeshError, match="allowed: before init_process_group"), imagined_ranks(2):
        pass


class Hand(fx.Graph):
    """A graph written by hand; values are of one shape."""

    def add(self, target: Any, *args: Any) -> fx.Node:
        node = self.call_function(target, args)
        node.meta["val"] = torch.empty(4, device="meta")
        return node

    def given(self, name: str) -> fx.Node:
        node = self.placeholder(name)
        node.meta["val"] = torch.empty(4, device="meta")
        return node

    def exchange(self, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        ticket = self.add(ep.combine.default, x, x, None)
        return ticket, self.add(ep.combine_wait.default, ticket, x, torch.float32)


def module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph)


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


def test_two_chains_cover_each_other() -> None:
    graph = Hand()
    x, y = graph.given("x"), graph.given("y")
    out = []
    for value in (x, y):
        for _ in range(3):
            value = graph.add(aten.sin.default, value)
            value = graph.exchange(value)[1]
        out.append(value)
    graph.output(tuple(out))
    gm = module(graph)
    schedule(gm)
    found = timeline(gm, lambda node: "")
    # Only the end of the pipeline has nothing: the second chain's first work covers the first exchange.
    assert found.bare == found.covers[-1:]
    waits = [name for name in names(gm) if name.startswith("combine_wait")]
    assert waits == ["combine_wait_default", "combine_wait_default_3"] + [
        f"combine_wait_default_{n}" for n in (1, 4, 2, 5)
    ]


def test_writes_and_reads_of_one_memory_keep_their_order() -> None:
    graph = Hand()
    x, pool = graph.given("x"), graph.given("pool")
    before = graph.add(aten.sin.default, pool)
    written = graph.add(aten.add.Tensor, pool, x)
    graph.add(aten.copy_.default, pool, written)
    after = graph.add(aten.cos.default, pool)
    _, got = graph.exchange(x)
    graph.output((graph.add(aten.mul.Tensor, got, before), graph.add(aten.mul.Tensor, got, after)))
    gm = module(graph)
    reorder(gm, list_schedule(gm, dependencies(gm)))
    order = names(gm)
    assert order[0] == "combine_default"
    assert order.index("sin_default") < order.index("copy__default") < order.index("cos_default")
    assert order.index("copy__default") < order.index("combine_wait_default")


def test_random_operations_keep_their_order() -> None:
    graph = Hand()
    x = graph.given("x")
    _, got = graph.exchange(x)
    late = graph.add(aten.rand_like.default, got)
    early = graph.add(aten.rand_like.default, x)
    graph.output((late, early))
    gm = module(graph)
    schedule(gm)
    assert names(gm)[-2:] == ["rand_like_default", "rand_like_default_1"]


def test_work_of_later_layers_is_left_for_them() -> None:
    graph = Hand()
    x, weight = graph.given("x"), graph.given("weight")
    value, prepared = x, []
    for _ in range(4):
        value = graph.exchange(value)[1]
        prepared.append(graph.add(aten.neg.default, weight))
        value = graph.add(aten.mul.Tensor, value, prepared[-1])
    graph.output((value,))
    gm = module(graph)
    schedule(gm)
    order = names(gm)
    waits = [order.index(f"combine_wait_default{end}") for end in ("", "_1", "_2", "_3")]
    prepared_at = [order.index(node.name) for node in prepared]
    assert prepared_at[3] > waits[1], order
