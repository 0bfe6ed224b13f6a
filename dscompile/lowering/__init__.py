"""Choosing and instantiating a template for each op of a rewritten graph."""

from dscompile.lowering.cpu import lower_graph
from dscompile.lowering.template import CpuTemplate, LoweringRecord

__all__ = ["CpuTemplate", "LoweringRecord", "lower_graph"]
