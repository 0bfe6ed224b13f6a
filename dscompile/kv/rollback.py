"""Taking back tokens that were stored and then not accepted.

Compressed rows beyond the length are simply not seen, and are written again later. Rings with spare rows (open groups,
the n-gram tail) still hold what the accepted length needs. The attention window has no spare rows: a token replaces the
one `sliding_window` before it, so those rows are saved first and put back for what was not accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dscompile.kv.cache import PagedCache
from dscompile.kv.layout import PoolSpec


@dataclass(frozen=True)
class Saved:
    """Rows that the next tokens will replace. `rows` [sum of counts, row] by pool, in order of request and position."""

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    slots: dict[str, Tensor]
    rows: dict[str, Tensor]


def save(cache: PagedCache, numbers: Sequence[int], counts: Sequence[int]) -> Saved:
    """Before `counts` more tokens of each request are run: what they replace. ValueError for more than can go back."""
    starts = tuple(cache.request(number).length for number in numbers)
    slots: dict[str, Tensor] = {}
    for spec in cache.layout.pools:
        if not spec.in_state or not _loses(spec, max(counts, default=0)):
            continue
        if max(counts) > spec.rows or spec.rows > spec.width:
            raise ValueError(f"{spec.name}: {max(counts)} tokens at once, allowed: up to {_most(spec)} to go back")
        ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        parts = [cache.slots(number, spec, places) for number, places in zip(numbers, ranges)]
        slots[spec.name] = torch.cat(parts).to(cache.device)
    rows = {name: cache.pools[name][index] for name, index in slots.items()}
    return Saved(tuple(numbers), starts, tuple(counts), slots, rows)


def restore(cache: PagedCache, saved: Saved, accepted: Sequence[int]) -> None:
    """Keep the first `accepted` of each request's tokens; decoding then reads what it would read without the others."""
    for number, count, kept in zip(saved.numbers, saved.counts, accepted, strict=True):
        if not isinstance(kept, int) or not 0 <= kept <= count:
            raise ValueError(f"request {number}: {kept} accepted, allowed: 0 to {count}")
    back = torch.tensor(
        [place >= kept for count, kept in zip(saved.counts, accepted) for place in range(count)], dtype=torch.bool
    ).to(cache.device)
    for name, index in saved.slots.items():
        cache.pools[name][index[back]] = saved.rows[name][back]
    for number, start, kept in zip(saved.numbers, saved.starts, accepted):
        cache.commit(number, start + kept)


def _most(spec: PoolSpec) -> int:
    return spec.rows if spec.rows == spec.width else spec.rows - spec.width


def _loses(spec: PoolSpec, count: int) -> bool:
    """Whether `count` tokens replace rows that an earlier length reads."""
    return count + spec.width > spec.rows
