"""Writes by a mask and constants of a step, in every role: what runs, and what a CUDA graph cannot record of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dscompile
from dscompile.passes.capturable import obstacles
from dscompile.passes.decoding import Decoding

BY_MASK = "aten.index_put.default by a mask"


def compiled(work: Callable[..., Any], *inputs: Tensor, role: str | None = "decode") -> Decoding | None:
    """Runs a step compiled and eagerly; the record of its only graph."""
    torch._dynamo.reset()
    with torch.no_grad(), dscompile.collect() as report:
        step = torch.compile(work, backend="dsv4", fullgraph=True, options={"role": role, "inductor": False})
        torch.testing.assert_close(step(*inputs), work(*inputs))
    (graph,) = report.graphs
    return graph.decoding


def write(x: Tensor) -> Tensor:
    h = (x * 2).clone()
    h[h > 0] = 0.0
    return h


@pytest.mark.parametrize("role", ["prefill", "decode", None])
def test_a_number_written_by_a_mask(role: str | None) -> None:
    record = compiled(write, torch.arange(-3.0, 3.0).view(2, 3), role=role)
    assert (record is not None) is (role == "decode")
    if record is not None:
        (obstacle,) = record.obstacles
        assert obstacle.reason.startswith(BY_MASK) and "test_decode_writes.py" in obstacle.source


@pytest.mark.parametrize(
    "work",
    [lambda x: x + torch.from_numpy(x.numpy() * 2), lambda x: x * torch.tensor(2.5), lambda x: x + torch.tensor(True)],
)
def test_constants_are_read_while_compiling(work: Callable[[Tensor], Tensor]) -> None:
    """The host reads them once, not in a step."""
    record = compiled(work, torch.arange(-3.0, 3.0).view(2, 3))
    assert record is not None and record.captured


def reasons(work: Callable[..., Any], device: str, inductor: bool) -> list[str]:
    """For a graph on a device that does not have to be here."""
    with FakeTensorMode(), torch.no_grad():
        graph = make_fx(work)(torch.empty(2, 3, device=device))
    assert isinstance(graph, fx.GraphModule)
    return [each.reason for each in obstacles(graph, lambda node: "", {}, inductor)]


def test_where_one_number_counts_nothing() -> None:
    """Inductor chooses between two values in every place; torch does so for a number of the host."""

    def of_the_host(x: Tensor) -> Tensor:
        return x.index_put((x > 0,), torch.zeros(()))

    def of_the_device(x: Tensor) -> Tensor:
        return x.index_put((x > 0,), x.new_zeros(()))

    def rows(x: Tensor) -> Tensor:
        return x.index_put((x.select(1, 0) > 0,), x.select(0, 0))

    def mixed(x: Tensor) -> Tensor:
        return x.index_put((x.select(1, 0) > 0, torch.zeros(1, dtype=torch.int64, device=x.device)), x.new_zeros(()))

    for work, inductor, fine in (
        (of_the_host, False, True), (of_the_host, True, True), (of_the_device, False, False),
        (of_the_device, True, True), (rows, True, False), (mixed, True, False),
    ):  # fmt: skip
        found = reasons(work, "cuda", inductor)
        assert (not found) if fine else any(each.startswith(BY_MASK) for each in found), (work, inductor, found)
