"""Which templates exist, and which one serves a call."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass

from dscompile.templates import cpu
from dscompile.templates.cpu.record import CpuTemplate, Meta

__all__ = ["Choice", "CpuTemplate", "LoweringRecord", "choose", "cpu_templates"]


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


@dataclass(frozen=True)
class Choice:
    """A template, or None, and why."""

    template: CpuTemplate | None
    reason: str


@functools.cache
def cpu_templates() -> dict[str, tuple[CpuTemplate, ...]]:
    """Every CPU template by the op that it serves, in order of preference.

    A file of `templates/cpu` that defines `TEMPLATES` takes part. Two templates of one name raise ValueError.
    """
    found: dict[str, list[CpuTemplate]] = {}
    names: set[str] = set()
    for module in pkgutil.iter_modules(cpu.__path__):
        loaded = importlib.import_module(f"{cpu.__name__}.{module.name}")
        for template in getattr(loaded, "TEMPLATES", ()):
            if template.name in names:
                raise ValueError(f"two CPU templates are called {template.name!r}")
            names.add(template.name)
            found.setdefault(template.op, []).append(template)
    return {op: tuple(templates) for op, templates in found.items()}


def choose(templates: Iterable[CpuTemplate], meta: Meta) -> Choice:
    """The first template that fits the arguments in `meta`, else the reasons why none does."""
    refusals: list[str] = []
    for template in templates:
        refusal = template.applies(meta)
        if refusal is None:
            return Choice(template, "; ".join((*refusals, "fits")) if refusals else "fits")
        refusals.append(f"{template.name}: {refusal}")
    return Choice(None, "; ".join(refusals) or "no template for this op")
