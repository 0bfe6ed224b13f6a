"""Choosing and instantiating a template for each op of a rewritten graph."""

from __future__ import annotations

from torch import fx

from dscompile.lowering import cpu, gpu
from dscompile.lowering.template import CpuTemplate, LoweringRecord
from dscompile.targets import Target

__all__ = ["CpuTemplate", "LoweringRecord", "lower_graph"]


def lower_graph(gm: fx.GraphModule, target: Target, *, nested: bool = True) -> list[LoweringRecord]:
    """Replace every `dsv4::` op of a functional ATen graph by a template for `target`; changes `gm`.

    nested: also in the graphs of its layer regions. Returns one record per op, in the order of the graph.
    """
    if target.device_type == "cpu":
        return cpu.lower_graph(gm, nested=nested)
    return gpu.lower_graph(gm, target, nested=nested)
