"""Parts that a recognised DeepSeek layer must have and that were not recognised in it.

A near miss needs something that looks like its pattern. Where the spelling changed so much that nothing does, a count
falls to zero without a word; the other parts of the layer still show that it should not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from dscompile.report import Match

#: Families that every layer of V4 and V4.1 has.
PARTS = ("mhc", "attention", "output", "router", "experts")

#: So many of them in one layer make it a DeepSeek layer: more than a block compiled on its own has.
ENOUGH = 3


def gaps(matches: Iterable[Match], disabled: Collection[str] = ()) -> list[str]:
    """One line for every layer in which most of `PARTS` were recognised and some were not.

    disabled: passes that the user switched off; families of that name are not expected.
    """
    families: dict[str, set[str]] = defaultdict(set)
    for match in matches:
        families[match.layer].add(match.family)
    lines = []
    for layer, there in families.items():
        found = [part for part in PARTS if part in there]
        absent = [part for part in PARTS if part not in there and part not in disabled]
        if absent and len(found) >= ENOUGH:
            where = layer or "outside layers"
            lines.append(f"{where}: no {', no '.join(absent)} recognised, though {', '.join(found)} were")
    return lines
