"""Two promises of the canonical form: reads stay in front of writes, and sizes do not hang on inner values."""

from __future__ import annotations

import operator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dscompile.passes.engine import PassContext, Pattern, PatternPass, graphs, normalise
from dscompile.passes.engine.testing import functional_graph, run_flat

aten = torch.ops.aten


def test_a_copied_counter_keeps_its_old_value() -> None:
    """``start`` gets what ``length`` was before it grew, though both are written back at the end."""

    def step(start: torch.Tensor, length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        start.copy_(length)
        length.add_(3)
        return x + start

    gm = functional_graph(step, torch.tensor(1), torch.tensor(5), torch.ones(2))
    before = run_flat(gm)
    normalise(gm)
    after = run_flat(gm)
    assert [t.tolist() for t in after] == [t.tolist() for t in before]
    assert after[0].tolist() == [6, 6]


def test_a_size_made_of_known_sizes_is_computed_from_them() -> None:
    """Nothing asks an inner tensor for its size: that would be a use of it outside every match."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x * 2)).reshape(-1).unsqueeze(-1) + 1

    gm = functional_graph(double, torch.ones(6, 4), dynamic=True)
    normalise(gm)
    assert not [n for n in graphs.find(gm.graph, aten.sym_size.int) if n.args[0].op != "placeholder"]
    assert graphs.find(gm.graph, operator.mul)
    assert torch.equal(run_flat(gm)[0], double(torch.ones(6, 4)))


def test_slices_of_symbolic_size_have_bounds_like_static_ones() -> None:
    """Ends that are left out or count from the back become sizes, so a pattern's ``n`` and ``n - 1`` bind to them."""

    def shift(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[1:] = x[:-1]
        return out * 2

    def search(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[1:] = x[:-1]
        return out

    pattern = Pattern("shift", "test", "test", search, lambda x: x.roll(1, 0), {"x": "f32[n D]"})
    gm = functional_graph(shift, torch.ones(6, 4), dynamic=True)
    normalise(gm)
    result = PatternPass("shift", (pattern,)).run(gm, PassContext())
    assert result.counts == {"test": 1}, result.near_misses


def test_a_symbolic_scalar_reaches_the_replacement() -> None:
    """``min(k, rows)`` with symbolic rows is no number, but it binds as one."""

    def best(x: torch.Tensor) -> torch.Tensor:
        return x.topk(min(5, x.shape[0]), 0).values + 1

    pattern = Pattern(
        "topk", "test", "test", lambda x, k: x.topk(k, 0).values, lambda x, k: x.sort(0, True).values[:k],
        {"x": "f32[n D]"}, scalars={"k": 113},
    )  # fmt: skip
    gm = functional_graph(best, torch.rand(9, 4), dynamic=True)
    before = run_flat(gm)
    normalise(gm)
    assert PatternPass("topk", (pattern,)).run(gm, PassContext()).counts == {"test": 1}
    assert torch.equal(run_flat(gm)[0], before[0])


def test_a_constant_of_symbolic_value_is_a_full() -> None:
    gm = functional_graph(
        lambda x: torch.full_like(x, x.shape[0]) + x, torch.ones(6, 4, dtype=torch.int64), dynamic=True
    )
    normalise(gm)
    assert graphs.find(gm.graph, aten.full.default) and not graphs.find(gm.graph, aten.full_like.default)
    assert run_flat(gm)[0].unique().tolist() == [7]


def test_constants_are_read_under_a_fake_mode() -> None:
    """As it is on around a backend; their values are real."""

    def fill(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(2.5)

    gm = functional_graph(fill, torch.ones(2))
    assert [n.op for n in gm.graph.nodes].count("get_attr") == 1
    with FakeTensorMode():
        normalise(gm)
    assert 2.5 in [arg for node in gm.graph.nodes for arg in node.args]
    assert run_flat(gm)[0].tolist() == [2.5, 2.5]
