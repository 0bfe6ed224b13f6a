"""Two promises of the canonical form: reads stay in front of writes, and sizes do not hang on inner values."""

from __future__ import annotations

import operator

import torch

from dscompile.passes.engine import graphs, normalise
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
