"""The pipeline: which passes run, in which order.

Progressive raising: small operations first, then what is made of them. Within a level the order does not matter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Collection

import dscompile.ops  # noqa: F401 - registers what the patterns put into graphs
from dscompile.passes import dialects
from dscompile.passes.absorb import Absorb
from dscompile.passes.engine import Normalise, Pass, Pattern, PatternPass, Pipeline

#: Pass name -> families (files of a dialect's folder) whose patterns it applies, level by level.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("positions",),
    ("quant", "norm", "rope", "sinkhorn"),
    ("linear",),
    ("mhc", "compressor", "router", "experts", "indexer", "store", "output", "engram"),
    ("attention",),
)


def default_pipeline(off: Collection[str] = ()) -> Pipeline:
    """The passes that every graph goes through; names in `off` are left out.

    Raises:
        ValueError: `off` names a pass that does not exist; the message lists those that do.
    """
    return Pipeline(_passes()).without(off)


def pass_names() -> tuple[str, ...]:
    """Every pass that can be switched off."""
    return tuple(step.name for step in _passes())


@functools.cache
def _passes() -> tuple[Pass, ...]:
    steps: list[Pass] = [Normalise()]
    for level in LEVELS:
        for family in level:
            patterns, passes = _family(family)
            steps += passes
            if patterns:
                steps.append(PatternPass(family, patterns))
    steps += [Absorb(), Normalise("normalise_again")]
    return tuple(steps)


def _family(family: str) -> tuple[tuple[Pattern, ...], tuple[Pass, ...]]:
    """All dialects' patterns and passes for one family."""
    patterns: list[Pattern] = []
    passes: list[Pass] = []
    for package in dialects.ORDER:
        name = f"{dialects.__name__}.{package}.{family}"
        if importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(name)
        patterns += getattr(module, "PATTERNS", ())
        passes += getattr(module, "PASSES", ())
    return tuple(patterns), tuple(passes)
