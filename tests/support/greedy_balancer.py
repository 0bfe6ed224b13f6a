"""The published greedy balancer, written down independently in plain Python: the peer of `distributed.balancer`.

Replicas one by one to the expert whose replicas carry most; then the heaviest slot to the lightest rank with room.
"""

from __future__ import annotations

from collections.abc import Sequence


def greedy_placement(load: Sequence[float], ranks: int, slots_per_rank: int) -> list[list[int]]:
    """The experts of every rank."""
    count = [1] * len(load)
    slots = list(range(len(load)))
    while len(slots) < ranks * slots_per_rank:
        expert = max(range(len(load)), key=lambda e: load[e] / count[e])
        count[expert] += 1
        slots.append(expert)
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for expert in sorted(slots, key=lambda e: -load[e] / count[e]):
        rank = min((r for r in range(ranks) if len(held[r]) < slots_per_rank), key=lambda r: totals[r])
        held[rank].append(expert)
        totals[rank] += load[expert] / count[expert]
    return held
