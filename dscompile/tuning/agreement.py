"""How far orders of configs agree: the cost model's with those that single facts of the machine code would give.

Neither side is measured. Where they disagree the model rests on what the facts do not show, and may be wrong; where
they agree both may be. It shows on which templates a measurement is worth most.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dscompile.targets import Target
from dscompile.tuning.build import Built
from dscompile.tuning.predict import bytes_in_flight, issued, predict, trips


def _instructions(built: Sequence[Built], target: Target) -> float:
    return sum(issued(each, _mains(built)) for each in built)


def _starved(built: Sequence[Built], target: Target) -> float:
    return -min(bytes_in_flight(each, target) for each in built if each.main)


def _products(built: Sequence[Built], target: Target) -> float:
    found = 0.0
    for each in built:
        blocks = math.prod(each.grid)
        found += sum(each.facts.tensor_core.values()) * blocks * each.kernel.warps * trips(each, _mains(built))
    return found


def _mains(built: Sequence[Built]) -> int:
    return sum(each.main for each in built)


#: Name -> what should be small, from the kernels of a call.
FACTS: dict[str, Callable[[Sequence[Built], Target], float]] = {
    "instructions": _instructions,
    "bytes in flight": _starved,
    "tensor core": _products,
    "spills": lambda built, target: float(sum(each.facts.spills for each in built)),
}


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two lists of equal length: 1 for one order, -1 for opposite ones; None if all tie."""
    if len(first) != len(second):
        raise ValueError(f"lists of {len(first)} and {len(second)} numbers, allowed: equal lengths")
    score, ties = 0, [0, 0]
    pairs = list(itertools.combinations(range(len(first)), 2))
    for i, j in pairs:
        a, b = _sign(first[i] - first[j]), _sign(second[i] - second[j])
        score += a * b
        ties[0] += a == 0
        ties[1] += b == 0
    below = math.sqrt((len(pairs) - ties[0]) * (len(pairs) - ties[1]))
    return score / below if below else None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


@dataclass(frozen=True)
class Agreement:
    """Of one call. tau: by the names of `FACTS`; spread: slowest predicted time over the quickest; bounds: what bounds
    its configs; loops: configs with a loop whose rounds the model cannot tell."""

    template: str
    call: str
    configs: int
    spread: float
    bounds: tuple[str, ...]
    loops: int
    tau: dict[str, float | None]


def agreements(results: Iterable[list[Built]], target: Target) -> list[Agreement]:
    """One for each call with at least three configs that fit. results: the kernels of each job."""
    calls: dict[tuple[str, str], list[list[Built]]] = defaultdict(list)
    for built in results:
        if built:
            calls[built[0].job.template, str(built[0].job.call)].append(built)
    found = []
    for (template, call), configs in calls.items():
        times, bounds, kept = [], [], []
        for built in configs:
            try:
                prediction = predict(built, target)
            except ValueError:  # does not fit
                continue
            times.append(prediction.time_us)
            bounds.append(prediction.bound)
            kept.append(built)
        if len(kept) < 3:
            continue
        tau = {name: kendall(times, [fact(built, target) for built in kept]) for name, fact in FACTS.items()}
        loops = sum(any(b.facts.loop_instructions and not b.facts.loop_bytes for b in built) for built in kept)
        found.append(Agreement(template, call, len(kept), max(times) / min(times), tuple(bounds), loops, tau))
    return found
