"""Which templates exist, and which one serves a call."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

from dscompile.templates import cpu, triton
from dscompile.templates.cpu.record import CpuTemplate, Meta
from dscompile.templates.triton.record import TritonTemplate

__all__ = ["Choice", "CpuTemplate", "LoweringRecord", "choose", "cpu_templates", "triton_templates"]


@dataclass(frozen=True)
class LoweringRecord:
    """What became of one op of a graph.

    op: as it was, `dsv4::router`. template: the name of the template that serves it, "reference (inlined)" or
    "reference (called)" if none does. node: name of the node in the graph before lowering. reason: why this template,
    or why none; one line.
    """

    op: str
    template: str
    node: str
    reason: str


T = TypeVar("T", CpuTemplate, TritonTemplate)


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A template, or None, and why."""

    template: T | None
    reason: str


@functools.cache
def cpu_templates() -> dict[str, tuple[CpuTemplate, ...]]:
    """Every CPU template by the op that it serves, in order of preference."""
    return _templates_in(cpu)


@functools.cache
def triton_templates() -> dict[str, tuple[TritonTemplate, ...]]:
    """Every Triton template by the op that it serves, in order of preference."""
    return _templates_in(triton)


def _templates_in(package: ModuleType) -> dict[str, tuple[Any, ...]]:
    """A file of the package that defines `TEMPLATES` takes part. Two templates of one name raise ValueError."""
    found: dict[str, list[Any]] = {}
    names: set[str] = set()
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        for template in getattr(loaded, "TEMPLATES", ()):
            if template.name in names:
                raise ValueError(f"{package.__name__} has two templates called {template.name!r}")
            names.add(template.name)
            found.setdefault(template.op, []).append(template)
    return {op: tuple(templates) for op, templates in found.items()}


def choose(templates: Iterable[T], meta: Meta) -> Choice[T]:
    """The first template that fits the arguments in `meta`, else the reasons why none does."""
    refusals: list[str] = []
    for template in templates:
        refusal = template.applies(meta)
        if refusal is None:
            return Choice(template, "; ".join((*refusals, "fits")) if refusals else "fits")
        refusals.append(f"{template.name}: {refusal}")
    return Choice(None, "; ".join(refusals) or "no template for this op")
