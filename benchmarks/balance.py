"""How evenly experts lie on ranks, next to the published greedy balancer; prints a table.

python benchmarks/balance.py [--intervals 9] [--copies 16] [--markdown]

Every placement is made for the load of one interval and judged on the next one: mean over maximum tokens per rank, 1 is
even. Greedy places from nothing in each interval, as `balanced` does; the two `rebalanced` start from what was there.
Copies are experts' weights that change ranks, of one layer with 384 experts, per interval.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dscompile.distributed.balancer import balanced, rebalanced
from dscompile.distributed.placement import Placement, copies

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("greedy", "balanced", "rebalanced", "bounded")


@dataclass
class Measured:
    """Of one way of placing: balance on the load it was made for and on the next, copies, one number an interval."""

    same: list[float] = field(default_factory=list)
    following: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)


def compared(loads: list[Any], ranks: int, redundant: int, most_copies: int) -> dict[str, Measured]:
    """Every way over a sequence of loads. All start from `balanced` for the first one, but for greedy."""
    from support.greedy_balancer import greedy_placement

    experts = len(loads[0])
    slots = (experts + redundant) // ranks

    def place(way: str, old: Placement, load: Any) -> Placement:
        if way == "greedy":
            return Placement.of_ranks(greedy_placement(load.tolist(), ranks, slots), experts)
        if way == "balanced":
            return balanced(load, ranks, slots)
        return rebalanced(old, load, most_copies if way == "bounded" else None)

    first = balanced(loads[0], ranks, slots)
    now = {way: place(way, first, loads[0]) if way == "greedy" else first for way in WAYS}
    found = {way: Measured() for way in WAYS}
    for load, following in zip(loads[1:], loads[2:]):
        for way, measured in found.items():
            new = place(way, now[way], load)
            measured.copies.append(len(copies(now[way], new)))
            measured.same.append(new.balance(load))
            measured.following.append(new.balance(following))
            now[way] = new
    return found


def rows(intervals: int, most_copies: int) -> list[list[str]]:
    """Lines of the table, as text."""
    from support.expert_loads import KINDS, drifting, shapes

    lines = []
    for kind in KINDS:
        for ranks, redundant in shapes():
            loads = drifting(np.random.default_rng(100 * ranks + redundant), kind, intervals + 2)
            found = compared(loads, ranks, redundant, most_copies)
            line = [kind, str(ranks), str(redundant)]
            line += [f"{np.mean(found[way].same):.3f}" for way in ("greedy", "balanced")]
            line += [f"{np.mean(found[way].following):.3f}" for way in WAYS if way != "rebalanced"]
            lines.append(line + [f"{np.mean(found[way].copies):.0f}" for way in WAYS])
    return lines


HEADER = [
    "load", "ranks", "redundant", "same load: greedy", "ours", "next load: greedy", "ours", "ours bounded",
    "copies: greedy", "ours", "ours settled", "ours bounded",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals", type=int, default=9, help="placements for each line")
    parser.add_argument("--copies", type=int, default=16, help="most copies of the bounded way")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.intervals < 1 or options.copies < 0:
        parser.error(f"--intervals {options.intervals} --copies {options.copies}, allowed: >= 1 and >= 0")
    sys.path.insert(0, str(ROOT / "tests"))  # where the other balancer and the loads are
    lines = rows(options.intervals, options.copies)
    if options.markdown:
        print("\n".join("| " + " | ".join(line) + " |" for line in [HEADER, ["---"] * len(HEADER), *lines]))
        return
    table = Table(*HEADER)
    for line in lines:
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    main()
