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

#: What surrounds the attention in every layer. The attention alone, compiled on its own, has none of it: another part
#: must be there as well.
AROUND_ATTENTION = ("norm", "rope")

#: Pools of overlapping groups in one layer: where there are two, one of them pools the keys of an index.
OVERLAPPING = "compress.overlap."


def gaps(matches: Iterable[Match], disabled: Collection[str] = ()) -> list[str]:
    """One line for every layer in which parts were recognised and others that belong to them were not.

    disabled: passes that the user switched off; families of that name are not expected.
    """
    layers: dict[str, list[Match]] = defaultdict(list)
    for match in matches:
        layers[match.layer].append(match)
    lines = []
    for layer, inside in layers.items():
        there = {match.family for match in inside}
        absent = [family for family in _expected(inside) if family not in there and family not in disabled]
        if absent:
            found = [part for part in (*PARTS, "compressor") if part in there]
            where = layer or "outside layers"
            lines.append(f"{where}: no {', no '.join(absent)} recognised, though {', '.join(found)} were")
    return lines


def _expected(inside: list[Match]) -> list[str]:
    """Families that a layer with these matches has."""
    there = {match.family for match in inside}
    found = sum(part in there for part in PARTS)
    expected: list[str] = []
    if found >= ENOUGH:
        expected += PARTS
    if found >= ENOUGH or "attention" in there and found > 1:
        expected += AROUND_ATTENTION
    if sum(match.pattern.startswith(OVERLAPPING) for match in inside) > 1:
        expected.append("indexer")
    return expected
