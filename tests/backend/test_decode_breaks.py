"""The role "decode" where a step is more than one graph, or leaves other tensors behind than it has read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dscompile
from dscompile.passes.decoding import Decoding
from dscompile.rewriting import StrictError

W = torch.eye(3)
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
CAN = "decode: can be captured, one graph in which the host reads nothing and no size depends on values"


def run(step: Callable[..., Any], *calls: Tensor, strict: bool = False) -> list[Decoding]:
    """Under torch's defaults; the record of every graph."""
    torch._dynamo.reset()
    with torch.no_grad(), dscompile.collect() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(step, backend="dsv4", options={"role": "decode", "strict": strict, "inductor": False})
        for x in calls or (X, X, X):
            compiled(x)
    found = [graph.decoding for graph in report.graphs if graph.decoding is not None]
    assert found
    return found


def refused(step: Callable[..., Any]) -> str:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(step, strict=True)
    assert isinstance(caught.value.inner_exception, StrictError)
    return str(caught.value.inner_exception)


def item(x: Tensor) -> Tensor:
    h = x @ W
    return h + 1 if h.sum().item() > 0 else h - 1


def branch(x: Tensor) -> Tensor:
    h = x @ W
    if h.sum() > 0:
        h = h + 1
    return h * 2


def mask(x: Tensor) -> Tensor:
    h = x @ W
    return h[h > 2] + 1


def unique(x: Tensor) -> Tensor:
    return torch.unique(x @ W) + 1


def listed(x: Tensor) -> Tensor:
    h = x @ W
    return x + h.tolist()[0][0]


def equal(x: Tensor) -> Tensor:
    h = x @ W
    return h + 1 if torch.equal(h, x) else h - 1


@torch.compiler.disable
def on_the_host(x: Tensor) -> Tensor:
    return x


def in_front(x: Tensor) -> Tensor:
    x = on_the_host(x)
    return x @ W + 1


def layer(x: Tensor) -> Tensor:
    return x @ W + 1


def loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = layer(x)
        if x.sum().item() > 100:
            break
    return x


BREAKS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "item": (item, ["it breaks here (Dynamo: Unsupported Tensor.item() call", "follows a break in item"]),
    "branch": (branch, ["it breaks here (a branch on a tensor's value)", "follows a break in branch"]),
    "mask": (mask, ["it breaks here (Dynamo: Dynamic shape operator: Operator `aten.nonzero", "a break in mask"]),
    "unique": (unique, ["it breaks here (Dynamo: ", "follows a break in unique"]),
    "listed": (listed, ["it breaks here (Dynamo: Tensor.tolist()", "follows a break in listed"]),
    "equal": (equal, ["it breaks here (Dynamo: Data dependent operator", "follows a break in equal"]),
    "in front": (in_front, ["this is what follows a break in in_front"]),
    "loop": (loop, ["this is a part that loop calls, which runs eagerly"]),
}


@pytest.mark.parametrize("case", BREAKS)
def test_pieces_of_a_step(case: str) -> None:
    """Each of them says so, with the user's line; the first that is compiled is an error where that is asked for."""
    step, reasons = BREAKS[case]
    for record, reason in zip(run(step), reasons, strict=False):
        assert not record.captured
        line = record.lines()[1]
        assert line.startswith("decode: cannot be captured, test_decode_breaks.py:") and reason in line
    assert reasons[0] in refused(step)


class Grow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv = torch.zeros(0, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.kv = torch.cat((self.kv, x @ W))
        return self.kv.sum(0)


class Held(nn.Module):
    """State in a buffer, a list, a tuple and another object."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.rows, self.pair = [torch.zeros(2, 3)], (torch.zeros(2, 3), torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.rows[0] = self.rows[0] + x
        self.pair = (self.pair[1] * 2, self.pair[0] + x)
        return self.count + self.rows[0] + self.pair[1]


class InPlace(nn.Module):
    """What stays where it is, and what nobody reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.kv, self.rows, self.last = torch.zeros(2, 3), [torch.zeros(2, 3)], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count.add_(1)
        self.kv += x
        self.rows[0].copy_(x)
        self.last = x * 2
        return self.count + self.kv + self.rows[0]


def test_state_that_a_step_replaces() -> None:
    """Already in the first graph, when its size has not changed yet."""
    words = "kv is another tensor after the step: a recorded step reads the first one again"
    for record in run(Grow()):
        (obstacle,) = record.obstacles
        assert obstacle.reason.startswith(words) and "self.kv = torch.cat(" in obstacle.source
    assert words in refused(Grow())
    (held,) = run(Held())
    names = {obstacle.reason.split(" is another")[0] for obstacle in held.obstacles}
    assert names == {"count", "rows.0", "pair.0", "pair.1"}
    (kept,) = run(InPlace(), strict=True)
    assert kept.lines()[1] == CAN


def test_what_is_one_graph_stays_quiet() -> None:
    """A graph for each batch size, several models, regions, wrappers of the libraries."""
    first, second = run(layer, X, torch.ones(5, 3), torch.ones(7, 3), strict=True)
    assert first.lines()[1] == CAN and second.lines()[1] == f"{CAN}, once for each size of x"
    region = torch.compiler.nested_compile_region(layer)
    for step in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), InPlace()), torch.no_grad()(layer), region):
        (record,) = run(step, strict=True)
        assert record.captured
    torch._dynamo.reset()
    with torch.no_grad(), dscompile.collect() as report:
        models = [torch.compile(nn.Linear(3, 3), backend="dsv4", options={"role": "decode", "strict": True,
                  "inductor": False}) for _ in range(2)]  # fmt: skip
        for model in (*models, *models):
            model(X)
    assert all(graph.decoding is not None and graph.decoding.captured for graph in report.graphs)
