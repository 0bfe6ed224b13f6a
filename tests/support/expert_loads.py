"""Loads of 384 experts, tokens of each: skewed, clustered, and sequences that drift from one to the next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EXPERTS = 384
Load = NDArray[np.float64]


def zipf(rng: np.random.Generator, power: float = 1.0) -> Load:
    return rng.permutation((1.0 + np.arange(EXPERTS)) ** -power) * 1e6


def clustered(rng: np.random.Generator) -> Load:
    """A few groups of neighbours are busy together."""
    load = rng.random(EXPERTS) + 0.2
    for start in rng.integers(0, EXPERTS - 12, 6):
        load[start : start + 12] *= rng.uniform(3, 12)
    return load * 1e4


KINDS = {"zipf": zipf, "flat zipf": lambda rng: zipf(rng, 0.4), "clustered": clustered}


def drifting(rng: np.random.Generator, kind: str, steps: int, choices: int = 200_000) -> list[Load]:
    """Loads of `steps` intervals: each expert's popularity wanders by about 15% from one to the next, and `choices`
    choices of an expert are drawn from it.
    """
    start = np.log(KINDS[kind](rng))
    here, found = start, []
    for _ in range(steps):
        here = here + rng.normal(0, 0.15, EXPERTS) + 0.02 * (start - here)
        shares = np.exp(here - here.max())
        found.append(rng.multinomial(choices, shares / shares.sum()).astype(np.float64))
    return found


def shapes() -> list[tuple[int, int]]:
    """(ranks, redundant experts): up to 32 where the slots divide, and the fewest that a rack of 72 needs."""
    plain = [(ranks, more) for ranks in (8, 16, 32, 64) for more in range(33) if (EXPERTS + more) % ranks == 0]
    return [*plain, (64, 64), (72, 48)]
