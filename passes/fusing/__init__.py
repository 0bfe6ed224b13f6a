"""Joining neighbouring operations of the vocabulary into larger ones, for targets where a kernel's start is dear.

What is fused here has a kernel on GPUs only, so these passes run for GPU targets, after everything is recognised.
"""

from __future__ import annotations

import functools
import importlib

from dscompile.passes.engine import Pass, PatternPass, Pipeline

#: Files of this folder in the order in which they run: each exports PATTERNS or PASSES.
ORDER = ("window", "experts", "streams", "products")


def fusing_pipeline() -> Pipeline:
    """The passes that fuse."""
    return Pipeline(_passes())


@functools.cache
def _passes() -> tuple[Pass, ...]:
    steps: list[Pass] = []
    for name in ORDER:
        module = importlib.import_module(f"{__name__}.{name}")
        steps += getattr(module, "PASSES", ())
        patterns = tuple(getattr(module, "PATTERNS", ()))
        if patterns:
            steps.append(PatternPass(f"fuse_{name}", patterns, near_misses=False))
    return tuple(steps)
