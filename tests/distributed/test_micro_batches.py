"""A batch in two halves, each of which computes while the other's tokens travel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import dscompile
from dscompile import backend
from dscompile.distributed import operators
from dscompile.distributed.imagined import imagined_ranks
from dscompile.halves import mark_batch
from dscompile.kv.deepseek_v41 import PagedModel
from dscompile.miniatures import v41_model
from dscompile.option_errors import OptionError
from dscompile.options import Options
from dscompile.passes.regions import HOP, region_calls, region_module
from tests.support.expert_blocks import Blocks, tokens
from tests.support.paged import scattered
from tests.support.ranks import run_ranks


@pytest.fixture
def ranks() -> Iterator[Any]:
    torch._dynamo.reset()
    with imagined_ranks(4) as group:
        yield group


@torch.no_grad()
def explained(model: nn.Module, group: Any, *inputs: Any, **options: Any) -> Any:
    with dscompile.collect() as report:
        torch.compile(model, backend="dsv4", options={"mesh": group, "micro_batches": 2, "inductor": False, **options})(
            *inputs
        )
    return report.graphs[-1]


def batch(model: Blocks, size: int, rank: int = 0) -> Tensor:
    x = tokens(model.config, rank, (size, 3), torch.float32)
    mark_batch(x)
    return x


def order_of_starts(graph: fx.GraphModule) -> list[str]:
    """What starts to send, in order; regions stand for what they start."""
    found = []
    for node in graph.graph.nodes:
        inner = region_module(graph, node).graph.nodes if node in region_calls(graph) else [node]
        for each in inner:
            if each.target in (torch.ops.dsv4_ep.dispatch.default, torch.ops.dsv4_ep.combine.default):
                found.append(f"{each.target._schema.name} {node.meta['custom']['dsv4_half']}")
    return found


def test_every_wait_has_work_of_the_other_half(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[fx.GraphModule] = []
    compile_graph = backend._compile

    def keep(graph: fx.GraphModule, *rest: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return compile_graph(graph, *rest)

    monkeypatch.setattr(backend, "_compile", keep)
    model = Blocks(2)
    entry = explained(model, ranks, batch(model, 4))
    found = entry.schedule
    assert found.halves == 2 and len(found.covers) == 8 and not entry.notes
    for cover in found.covers:
        others = [found.rows[row] for row in cover.work if found.rows[row].half != cover.half]
        assert others, cover
    # Work that lies behind a start does not need it: nothing but its own wait takes the ticket.
    (graph,) = graphs
    calls = region_calls(graph)
    assert len({region_module(graph, call) for call in calls}) == 3 and len(calls) == 2 * 2 * 3
    turns = [f"dsv4_ep::{what} {half}" for what in ("dispatch", "combine") for half in (0, 1)]
    assert order_of_starts(graph) == turns * 2
    assert_chained(graph)
    # Another batch size gives other shapes and the same order.
    torch._dynamo.reset()
    explained(model, ranks, batch(model, 6))
    assert order_of_starts(graphs[-1]) == turns * 2


def assert_chained(graph: fx.GraphModule) -> None:
    """Each start takes the ticket of the one before."""
    before = None
    for call in graph.graph.find_nodes(op="call_function", target=HOP.invoke_subgraph):
        inside = region_module(graph, call).graph
        places = inside.find_nodes(op="placeholder")
        for start in inside.nodes:
            if start.target in (torch.ops.dsv4_ep.dispatch.default, torch.ops.dsv4_ep.combine.default):
                after = start.args[5 if "dispatch" in start.target._schema.name else 2]
                ticket = call.args[2 + places.index(after)]
                if before is not None:
                    assert ticket.target is operator.getitem and ticket.args[0] is before
                before = call


@pytest.mark.parametrize(
    "size, reason", [(6, ""), (5, "an odd batch of 5"), (2, "a batch of 2, needed: 4 or more"), (1, "x: a batch of 1")]
)
def test_batches_that_are_not_split_say_why(size: int, reason: str, ranks: Any) -> None:
    model = Blocks(2)
    entry = explained(model, ranks, batch(model, size))
    assert entry.notes == ([f"the batch is not split: {reason}"] if reason else [])
    # Other ranks may have split theirs: as many exchanges, half of them without tokens.
    assert entry.schedule.halves == (1 if reason else 2) and len(entry.schedule.covers) == 8
    assert entry.counts()["experts"] == 2 and len(entry.exchanges) == 2


class Around(nn.Module):
    """Blocks with something in front or behind that has to do with the batch."""

    def __init__(self, what: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.what = Blocks(2), what

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.what(self.blocks(x), other)


def count(y: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1)
    return y


def store(y: Tensor, pool: Tensor) -> Tensor:
    pool.index_copy_(0, y[:, 0, 0].abs().long().clamp(max=6), y[:, 0])
    return y


@pytest.mark.parametrize(
    "what, other, reason",
    [
        (lambda y, other: y.sum(), torch.ones(7), "output 0 [] cannot be joined: its first dimension is not the batch"),
        (lambda y, other: (y, y.flatten(0, 1)), torch.ones(7), "output 1 [3*s"),
        (count, torch.zeros(7), "other is shared and written by aten.add"),
        (store, torch.zeros(7, 128), ""),
    ],
)
def test_graphs_that_cannot_be_split_say_why(what: Any, other: Tensor, reason: str, ranks: Any) -> None:
    model = Around(what)
    x = batch(model.blocks, 4)
    entry = explained(model, ranks, x, other)
    assert [note for note in entry.notes if reason in note] if reason else not entry.notes, entry.notes
    if what is count:
        assert torch.equal(other, torch.ones(7))


def test_inputs_that_are_not_marked(ranks: Any) -> None:
    model = Around(lambda y, other: y + other)
    x, other = batch(model.blocks, 4), torch.ones(4, 1, 1)
    torch._dynamo.mark_dynamic(other, 0)
    (note,) = explained(model, ranks, x, other).notes
    assert "other [s" in note and "is not marked" in note
    torch._dynamo.reset()
    static = torch.ones(4, 1, 1)
    model = Around(lambda y, other: y * 2)
    (note,) = explained(model, ranks, static.expand(4, 3, 128).contiguous(), other).notes
    assert note == "the batch is not split: no input of this graph is marked with dscompile.mark_batch"


def test_the_option_is_checked() -> None:
    with pytest.raises(OptionError, match="'micro_batches' is 3 .*allowed: 1 or 2"):
        Options(micro_batches=3)
    with pytest.raises(OptionError, match="'micro_batches' is 2 .*allowed: 1 without the option 'mesh'"):
        Options(micro_batches=2)
    with pytest.raises(ValueError, match="without dimensions, allowed: one row a sequence"):
        mark_batch(torch.tensor(1))


def decode(rank: int) -> tuple[list[float], list[str], int, int]:
    """V4.1 on pages, 2 steps of 4 requests: differences to eager, notes, halves, exchanges with nothing beside them."""
    model = v41_model(torch.float32)
    prompts = [[5, 9, 11, 3, 7, 2, 8], [4, 4, 1, 9, 12, 30, 2, 6, 5], [50, 3, 2], list(range(7, 18))]
    settings = {"mesh": dist.group.WORLD, "micro_batches": 2, "inductor": False}
    compiled = torch.compile(model, backend="dsv4", options=settings)

    def halved(ids: Tensor, positions: Tensor, view: Any) -> Any:
        given = {name: value for name, value in view._asdict().items() if isinstance(value, Tensor)}
        mark_batch(ids, positions, *(value for name, value in given.items() if name != "tokens"))
        return compiled(ids, positions, view)

    results = []
    with torch.no_grad(), dscompile.collect() as report:
        for forward in (None, halved):
            cache = scattered(model, 4, 300, 1)
            numbers = [cache.open(len(prompt)) for prompt in prompts]
            PagedModel(model, cache, 4, 64).prefill(numbers, prompts)
            steps = PagedModel(model, cache, 4, 64, forward)
            results.append([steps.step(numbers, [[token + row] for row in range(4)]) for token in (3, 17)])
    (graph,) = report.graphs
    errors = [float((split - whole).abs().max()) for whole, split in zip(*results)]
    return errors, graph.notes, graph.schedule.halves, len(graph.schedule.bare)


@pytest.mark.slow
def test_the_whole_model_decodes_in_halves(tmp_path: Path) -> None:
    """Pools that layers share are read by one half while the other one writes to them."""
    ((errors, notes, halves, bare),) = run_ranks(decode, 1, tmp_path, seconds=240)
    assert max(errors) <= 1e-5 and not notes and halves == 2 and not bare


BATCHES = ((4, 6), (4, 3), (1, 4))


def work(rank: int, inductor: bool) -> tuple[list[float], list[int], int]:
    """Differences to the unsplit run for each pair of batches, halves of its graphs, exchanges left over."""
    model = Blocks(2)
    dscompile.shard_experts(model, dist.group.WORLD)
    results: list[list[Tensor]] = []
    halves: list[int] = []
    for parts in (1, 2):
        torch._dynamo.reset()
        settings = {"mesh": dist.group.WORLD, "micro_batches": parts, "inductor": inductor}
        compiled = torch.compile(model, backend="dsv4", options=settings)
        with torch.no_grad(), dscompile.collect() as report:
            results.append([compiled(batch(model, sizes[rank], rank)) for sizes in BATCHES])
        halves = [graph.schedule.halves for graph in report.graphs]
    errors = [float((split - whole).abs().max()) for whole, split in zip(*results)]
    return errors, halves, operators.pending_exchanges()


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_equal_to_the_whole_batch_on_real_ranks(inductor: bool, tmp_path: Path) -> None:
    """Ranks with other batches, some of which one rank splits and the other does not."""
    found = run_ranks(work, 2, tmp_path, inductor, seconds=240)
    for errors, _, left in found:
        assert max(errors) <= 1e-5 and left == 0
    assert found[0][1] == [2, 1] and found[1][1] == [2, 1]
