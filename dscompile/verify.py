"""Translation validation: the rewritten graph against the graph it came from, on the user's own inputs.

With `options={"verify": True}` the first call of every compiled graph also runs the untouched functional graph eagerly
on copies of what the graph writes to. Outputs and written inputs must agree; otherwise the graphs kept after each pass
are run in turn and the error names the first pass that changed the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dscompile.report import GraphReport


class VerificationError(AssertionError):
    """The rewritten graph and the original disagree; the message names value, error, tolerance and pass."""


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted relative error of a floating-point tensor, as ||a - b|| / ||b|| in float64.

    flips: where values are rounded to few bits on the way, a sum in another order can move one that lies next to a
    rounding boundary by a whole code, and what follows from it too. So many of the bytes may then differ, and of a
    float32 tensor the median error counts, as long as the relative one stays below `half`. 0: no such allowance.
    """

    float32: float = 1e-4
    half: float = 0.15
    flips: float = 0.0

    def of(self, dtype: torch.dtype) -> float:
        return self.half if dtype in (torch.bfloat16, torch.float16) else self.float32


@dataclass(frozen=True)
class Difference:
    name: str
    error: float
    allowed: float


FLIPS = 0.01


def rounds(graph: fx.GraphModule) -> bool:
    """Whether the graph, or a region of it, rounds values to few bits."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float8_e4m3fn, torch.uint8):
            return True
        inner = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule) and rounds(inner):
            return True
    return False


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy that owns its graphs, subgraphs included; parameters, buffers and constants stay shared."""
    copied: dict[int, fx.GraphModule] = {}
    return _copy(graph, copied)


def _copy(graph: fx.GraphModule, copied: dict[int, fx.GraphModule]) -> fx.GraphModule:
    if id(graph) in copied:
        return copied[id(graph)]
    copy = fx.GraphModule(graph, graph.graph)
    copy.graph = fx.Graph()
    copy.graph.output(copy.graph.graph_copy(graph.graph, {}))
    copy.graph._codegen = graph.graph._codegen
    copied[id(graph)] = copy
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, str(node.target))
        setattr(copy, str(node.target), _copy(value, copied) if isinstance(value, fx.GraphModule) else value)
    copy.recompile()
    return copy


def written_inputs(graph: fx.GraphModule) -> list[int]:
    """Positions of the placeholders that the graph writes to through its closing `copy_` nodes."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {node.args[0] for node in copies}
    return [index for index, node in enumerate(placeholders) if node in written]


def compare(
    expected: Sequence[Any], actual: Sequence[Any], tolerance: Tolerance = Tolerance(), prefix: str = "output"
) -> Difference | None:
    """The first pair of tensors that disagree, or None. Integer and bool tensors must be equal."""
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(want, torch.Tensor):
            continue
        difference = _difference(f"{prefix} {index}", want, got, tolerance)
        if difference is not None:
            return difference
    return None


def _difference(name: str, want: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> Difference | None:
    if want.shape != got.shape or want.dtype != got.dtype:
        return Difference(f"{name} ({want.dtype} {tuple(want.shape)} became {got.dtype} {tuple(got.shape)})", 1.0, 0.0)
    if not want.dtype.is_floating_point:
        wrong = (want != got).double().mean().item() if want.numel() else 0.0
        share = tolerance.flips if want.dtype == torch.uint8 else 0.0
        return Difference(f"{name} (share of unequal values)", wrong, share) if wrong > share else None
    allowed = tolerance.of(want.dtype)
    a, b = got.double().flatten(), want.double().flatten()
    if not torch.equal(a.isnan(), b.isnan()):
        return Difference(f"{name} (NaN in other places)", float("inf"), allowed)
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return Difference(f"{name} (infinities in other places)", float("inf"), allowed)
    scale = b[finite].norm().item()
    error = (a[finite] - b[finite]).norm().item() / max(scale, 1e-30)
    if tolerance.flips and allowed < error <= tolerance.half:
        size = scale / max(finite.sum().item(), 1) ** 0.5
        error = (a[finite] - b[finite]).abs().median().item() / max(size, 1e-30)
    return Difference(name, error, allowed) if error > allowed else None


def run_eagerly(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Runs a copy-safe eager pass: returns outputs and the values of written inputs; `inputs` stay untouched."""
    written = written_inputs(graph)
    arguments = [x.clone() if index in written else x for index, x in enumerate(inputs)]
    outputs = graph(*arguments)
    return list(outputs), [arguments[index] for index in written]


def checked(
    original: fx.GraphModule,
    snapshots: Sequence[tuple[str, fx.GraphModule]],
    run: Callable[..., Any],
    entry: GraphReport,
    tolerance: Tolerance | None = None,
) -> Callable[..., Any]:
    """Wraps `run` so that its first call is verified; later calls go straight through.

    snapshots: (pass name, graph after that pass), in order. tolerance: None allows flips if `original` rounds.
    """
    pending = [True]
    tolerance = tolerance or Tolerance(flips=FLIPS if rounds(original) else 0.0)

    def verified(*inputs: Any) -> Any:
        if not pending:
            return run(*inputs)
        pending.clear()
        outputs, writes = run_eagerly(original, inputs)
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        results = run(*inputs)
        written = [inputs[index] for index in written_inputs(original)]
        difference = compare(outputs, list(results), tolerance) or compare(
            writes, written, tolerance, prefix="written input"
        )
        if difference is None:
            entry.notes.append("verified against the unchanged graph on the first call")
            return results
        culprit = bisect(original, snapshots, before, tolerance)
        where = f"pass {culprit}" if culprit else "lowering or Inductor (every pass agrees)"
        raise VerificationError(
            f"{difference.name} differs from the unchanged graph: relative error {difference.error:.3g}, "
            f"allowed {difference.allowed:.3g}; first wrong after: {where}"
        )

    return verified


def bisect(
    original: fx.GraphModule,
    snapshots: Sequence[tuple[str, fx.GraphModule]],
    inputs: Sequence[Any],
    tolerance: Tolerance = Tolerance(),
) -> str | None:
    """The name of the first pass after which the graph's result differs from the original's, or None."""
    outputs, writes = run_eagerly(original, inputs)
    for name, graph in snapshots:
        results, written = run_eagerly(graph, inputs)
        if compare(outputs, results, tolerance) or compare(writes, written, tolerance):
            return name
    return None
