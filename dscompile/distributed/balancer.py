"""Placements that follow the load: replicas for the busiest experts, ranks filled evenly, few copies.

Greedy first (a replica where a replica carries most, then the heaviest slot to the lightest rank that has room), then
exchanges of two slots as long as the busiest rank gets lighter. The exchanges never make it worse, so the result is at
least as even as the greedy one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dscompile.distributed.placement import Placement, PlacementError, checked_load, copies

Load = NDArray[np.floating[Any]]
_ROUNDS = 2000  # far more exchanges than any placement was seen to need


def balanced(
    load: Load, ranks: int, slots_per_rank: int, nodes: int = 1, most_replicas: int | None = None
) -> Placement:
    """A placement for a load.

    Args:
        load: [experts], tokens that each expert got; all 0 counts as even.
        ranks, slots_per_rank: devices, and experts on each; together at least the experts.
        nodes: ranks come in as many equal groups. With more than one, experts are first spread over nodes, each to one
            node, so that a token's copies to several replicas never leave it; that is less even than without.
        most_replicas: slots that one expert may have; None for any number.

    Raises:
        PlacementError: numbers that do not go together.
    """
    values = checked_load(load, np.asarray(load).shape[0] if np.asarray(load).ndim else 0)
    experts, total = len(values), ranks * slots_per_rank
    if ranks < 1 or slots_per_rank < 1 or total < experts or not experts:
        raise PlacementError(f"{experts} experts in {ranks} x {slots_per_rank} slots, allowed: 1 to {max(total, 1)}")
    if nodes < 1 or ranks % nodes or experts % nodes:
        raise PlacementError(f"{nodes} nodes for {ranks} ranks and {experts} experts, allowed: a divisor of both")
    if most_replicas is not None and most_replicas * experts < total:
        raise PlacementError(
            f"most_replicas: {most_replicas} for {experts} experts in {total} slots, allowed: >= {-(-total // experts)}"
        )
    if not values.any():
        values = np.ones(experts)
    of_node = _packed(values, nodes, experts // nodes)
    per_node = ranks // nodes
    held: list[list[int]] = []
    for members in of_node:
        here = values[members]
        slots = _replicated(here, per_node * slots_per_rank, most_replicas)
        each = here / np.bincount(slots, minlength=len(here))
        groups = [[int(slots[i]) for i in group] for group in _packed(each[slots], per_node, slots_per_rank)]
        _exchange(groups, each)
        held += [[int(members[i]) for i in group] for group in groups]
    return Placement.of_ranks(held, experts)


def rebalanced(
    old: Placement, load: Load, most_copies: int | None = None, nodes: int = 1, most_replicas: int | None = None
) -> Placement:
    """A placement for a new load that is reached from `old` with few copies.

    most_copies: how many expert weights may be copied between ranks; None for any number, then it is `balanced` with
    ranks and slots named so that as much as possible stays where it is. With a limit, single steps are taken from
    `old`: an exchange of two slots, or another expert in place of a replica, the one that helps most first.
    nodes, most_replicas: as for `balanced`.

    Raises:
        PlacementError: as `balanced`; a negative limit.
    """
    values = checked_load(load, old.experts)
    if most_copies is None:
        return settled(old, balanced(values, old.ranks, old.slots_per_rank, nodes, most_replicas), nodes)
    if most_copies < 0:
        raise PlacementError(f"most_copies: {most_copies}, allowed: >= 0, or None for any number")
    if not values.any():
        return old
    groups = [list(old.on_rank(rank)) for rank in range(old.ranks)]
    found = old
    while True:
        step = _best_step(groups, values, old.ranks // nodes, most_replicas)
        if step is None:
            return found
        for rank, place, expert in step:
            groups[rank][place] = expert
        candidate = settled(old, Placement.of_ranks(groups, old.experts), nodes)
        if len(copies(old, candidate)) > most_copies:
            return found
        found = candidate


def settled(old: Placement, new: Placement, nodes: int = 1) -> Placement:
    """`new` with nodes, their ranks, and slots within ranks renamed, so that experts stay where `old` has them if they
    can. Pairs are made greedily by how many experts they have in common.
    """
    per_node = old.ranks // nodes
    homes = [range(node * per_node, (node + 1) * per_node) for node in range(nodes)]
    held = [[{e for rank in home for e in p.on_rank(rank)} for home in homes] for p in (old, new)]
    slots: list[int] = []
    for mine, theirs in enumerate(_paired(*held)):
        ranks = [[p.on_rank(rank) for rank in homes[home]] for p, home in ((old, mine), (new, theirs))]
        for place, other in enumerate(_paired(*([set(rank) for rank in side] for side in ranks))):
            left = list(ranks[1][other])
            line: list[int | None] = []
            for expert in ranks[0][place]:
                line.append(expert if expert in left else None)
                if expert in left:
                    left.remove(expert)
            slots += [left.pop(0) if expert is None else expert for expert in line]
    return Placement(tuple(slots), old.experts, old.ranks)


def _paired(mine: list[set[int]], theirs: list[set[int]]) -> list[int]:
    """For each of `mine` one of `theirs`, those with most in common first."""
    common = np.array([[len(a & b) for b in theirs] for a in mine])
    chosen = [-1] * len(mine)
    for place in np.argsort(-common, axis=None, kind="stable"):
        first, second = divmod(int(place), len(theirs))
        if chosen[first] < 0 and second not in chosen:
            chosen[first] = second
    return chosen


def _replicated(load: NDArray[np.float64], slots: int, most: int | None) -> NDArray[np.int64]:
    """[slots]: each item once, then again and again the one whose replicas carry most."""
    count = np.ones(len(load), dtype=np.int64)
    chosen = list(range(len(load)))
    for _ in range(slots - len(load)):
        item = int(np.argmax(load / count if most is None else np.where(count < most, load / count, -1.0)))
        count[item] += 1
        chosen.append(item)
    return np.asarray(chosen, dtype=np.int64)


def _packed(weights: NDArray[np.float64], groups: int, size: int) -> list[list[int]]:
    """Items in groups of `size`: the heaviest first, each to the lightest group that has room."""
    totals, found = np.zeros(groups), [[] for _ in range(groups)]  # type: ignore[var-annotated]
    for item in np.argsort(-weights, kind="stable"):
        room = np.array([len(group) < size for group in found])
        lightest = int(np.argmin(np.where(room, totals, np.inf)))
        found[lightest].append(int(item))
        totals[lightest] += weights[item]
    return found


def _exchange(groups: list[list[int]], each: NDArray[np.float64]) -> None:
    """Exchange slots between the busiest group and another one as long as the busier of the two gets lighter."""
    if len(groups) < 2:
        return
    table = np.asarray(groups)
    for _ in range(_ROUNDS):
        weights = each[table]
        totals = weights.sum(1)
        busiest = int(np.argmax(totals))
        less = weights[busiest][None, :, None] - weights[:, None, :]  # [group, its place, other place]
        worst = np.maximum(totals[busiest] - less, totals[:, None, None] + less)
        worst[busiest] = np.inf
        place = int(np.argmin(worst))
        if worst.flat[place] >= totals[busiest] * (1 - 1e-12):
            break
        other, mine, theirs = np.unravel_index(place, worst.shape)
        table[busiest, mine], table[other, theirs] = table[other, theirs], table[busiest, mine]
    for group, line in zip(groups, table.tolist()):
        group[:] = line


Step = list[tuple[int, int, int]]


def _best_step(groups: list[list[int]], load: NDArray[np.float64], per_node: int, most: int | None) -> Step | None:
    """(rank, place, expert) to set for the step that makes the busiest rank lightest; None if none helps."""
    table = np.asarray(groups)
    count = np.bincount(table.ravel(), minlength=len(load))
    totals = (load / count)[table].sum(1)
    busiest = int(np.argmax(totals))
    near = np.arange(len(groups)) // per_node == busiest // per_node
    near[busiest] = False
    steps = [_best_exchange(table, load / count, near, busiest), _best_replica(table, load, count, near, busiest, most)]
    heaviest, step = min((s for s in steps if s is not None), key=lambda s: s[0], default=(np.inf, None))
    return step if heaviest < totals[busiest] * (1 - 1e-9) else None


def _best_exchange(
    table: NDArray[np.int64], each: NDArray[np.float64], near: NDArray[np.bool_], busiest: int
) -> tuple[float, Step] | None:
    weights = each[table]
    totals = weights.sum(1)
    less = weights[busiest][None, :, None] - weights[:, None, :]  # [rank, its place, other place]
    worst = np.maximum(totals[busiest] - less, totals[:, None, None] + less)
    worst[~near] = np.inf
    place = int(np.argmin(worst))
    if not np.isfinite(worst.flat[place]):
        return None
    other, mine, theirs = (int(i) for i in np.unravel_index(place, worst.shape))
    rest = float(np.delete(totals, [busiest, other]).max(initial=0.0))
    step = [(busiest, mine, int(table[other, theirs])), (other, theirs, int(table[busiest, mine]))]
    return max(float(worst.flat[place]), rest), step


def _best_replica(
    table: NDArray[np.int64],
    load: NDArray[np.float64],
    count: NDArray[np.int64],
    near: NDArray[np.bool_],
    busiest: int,
    most: int | None,
) -> tuple[float, Step] | None:
    """One of the busiest rank's heaviest experts in place of some replica on another rank."""
    best: tuple[float, Step] | None = None
    room = [expert for expert in set(table[busiest].tolist()) if most is None or count[expert] < most]
    for expert in sorted(room, key=lambda item: -load[item] / count[item])[:4]:
        for rank, place in zip(*np.nonzero(near[:, None] & (count[table] > 1) & (table != expert))):
            changed, trial = count.copy(), table.copy()
            changed[expert] += 1
            changed[table[rank, place]] -= 1
            trial[rank, place] = expert
            heaviest = float((load / changed)[trial].sum(1).max())
            if best is None or heaviest < best[0]:
                best = heaviest, [(int(rank), int(place), expert)]
    return best
