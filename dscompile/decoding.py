"""The role "decode" in a finished graph: which kernels, which exchange, and whether a step can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from dscompile.expert_options import form_of
from dscompile.options import Options
from dscompile.passes.capturable import obstacles
from dscompile.passes.decoding import Decoding, Obstacle
from dscompile.report import GraphReport

#: Operations whose kernels are named in the record: those that have more than one form.
_SHOWN = ("attention", "experts", "index_topk", "store")


def decoding(
    graph: fx.GraphModule, options: Options, entry: GraphReport, label: Callable[[fx.Node], str],
    labels: dict[str, list[str]], input_names: Sequence[str], outside: Sequence[Obstacle] = (),
) -> Decoding:  # fmt: skip
    """The record of a graph after its last step.

    entry: its report, with lowerings and exchanges. label, labels: layers as `passes.capturable.obstacles` takes them.
    input_names: the user's, of the placeholders. outside: what of the step is not in the graph.
    """
    variants: dict[str, list[str]] = {}
    for (operation, kernel), count in entry.kernel_counts().items():
        if any(word in operation for word in _SHOWN):
            variants.setdefault(operation.removeprefix("dsv4::"), []).append(f"{kernel} x{count}")
    named = {operation: " and ".join(kernels) for operation, kernels in variants.items()}
    found = (*outside, *obstacles(graph, label, labels, options.inductor))
    return Decoding(named, _exchange(options, entry), found, tuple(_of_several_sizes(graph, input_names)))


def _of_several_sizes(graph: fx.GraphModule, input_names: Sequence[str]) -> Iterator[str]:
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), input_names, strict=False):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            yield name


def _exchange(options: Options, entry: GraphReport) -> str:
    if not entry.exchanges:
        return ""
    if form_of(options) == "exact":
        return f"exact in {len(entry.exchanges)} layers"
    rows = f"padded to {options.expert_capacity} rows between two ranks"
    more = ", exact where that is not enough" if options.expert_overflow == "exact" else ""
    return f"{rows}{more} in {len(entry.exchanges)} layers"
