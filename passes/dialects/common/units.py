"""Patterns for batches or steps of one: `torch.einsum` leaves axes of size 1 out, so its trace looks different."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dscompile.passes.engine import Pattern


def with_unit_sizes(pattern: Pattern, axes: tuple[str, ...] = ("b", "t")) -> Iterator[Pattern]:
    """`pattern`, and `pattern` for every combination of `axes` being 1."""
    yield pattern
    for choice in range(1, 1 << len(axes)):
        ones = [axis for place, axis in enumerate(axes) if choice >> place & 1]
        name = f"{pattern.name}.{''.join(f'{axis}1' for axis in ones)}"
        yield replace(pattern, name=name, sizes={**pattern.sizes, **dict.fromkeys(ones, 1)})
