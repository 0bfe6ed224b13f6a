"""Patterns applied to a function's graph, for tests of the engine."""

from __future__ import annotations

import torch

from dscompile.passes.engine import PatternPass, normalise
from dscompile.passes.engine.passes import PassContext
from dscompile.passes.engine.testing import functional_graph, run_flat


def apply(patterns, fn, *inputs, **kwargs):
    gm = functional_graph(fn, *inputs)
    before = run_flat(gm)
    normalise(gm)
    patterns = patterns if isinstance(patterns, tuple) else (patterns,)
    result = PatternPass("test", patterns, **kwargs).run(gm, PassContext())
    for a, b in zip(run_flat(gm), before):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    return gm, result


def reason(result):
    assert not result.matches and len(result.near_misses) == 1, result
    return result.near_misses[0].reason
