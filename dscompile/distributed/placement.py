"""Which rank holds which experts. Data only: no process group, no tensors on a device.

A *slot* is room for one expert's weights. Every rank has the same number of slots; slot s is on rank
s // slots_per_rank. An expert may lie in several slots (replicas), so that ranks share its tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PlacementError(ValueError):
    """A placement that cannot be; the message names the numbers and what is allowed."""


@dataclass(frozen=True)
class Placement:
    """slots: the expert in every slot, in order of ranks. experts: how many there are. ranks: how many devices.

    Raises PlacementError: slots that do not divide among the ranks, an expert that does not exist or has no slot.
    """

    slots: tuple[int, ...]
    experts: int
    ranks: int

    def __post_init__(self) -> None:
        for name, value in (("experts", self.experts), ("ranks", self.ranks)):
            if value < 1:
                raise PlacementError(f"{name}: {value}, allowed: >= 1")
        if not self.slots or len(self.slots) % self.ranks:
            raise PlacementError(f"{len(self.slots)} slots on {self.ranks} ranks, allowed: a multiple of the ranks")
        wrong = sorted({expert for expert in self.slots if not 0 <= expert < self.experts})
        if wrong:
            raise PlacementError(f"slots hold experts {_few(wrong)}, allowed: 0 to {self.experts - 1}")
        missing = sorted(set(range(self.experts)) - set(self.slots))
        if missing:
            raise PlacementError(f"experts {_few(missing)} of {self.experts} have no slot, allowed: at least one each")

    @staticmethod
    def contiguous(experts: int, ranks: int) -> Placement:
        """Every expert once, in order: the first ones on rank 0. PlacementError if they do not divide."""
        if ranks < 1 or experts % ranks:
            raise PlacementError(
                f"{experts} experts on {ranks} ranks, allowed without a placement: a number of ranks that divides them"
            )
        return Placement(tuple(range(experts)), experts, ranks)

    @staticmethod
    def of_ranks(held: Iterable[Iterable[int]], experts: int) -> Placement:
        """From the experts of every rank, rank 0 first. PlacementError also for ranks with different numbers."""
        lists = [tuple(rank) for rank in held]
        sizes = sorted({len(rank) for rank in lists})
        if len(sizes) > 1:
            raise PlacementError(f"ranks with {', '.join(map(str, sizes))} slots, allowed: the same number each")
        return Placement(tuple(expert for rank in lists for expert in rank), experts, len(lists))

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots) // self.ranks

    @property
    def redundant(self) -> int:
        """Slots beyond one for each expert."""
        return len(self.slots) - self.experts

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """The experts in the slots of a rank, in order. PlacementError for a rank that is none."""
        if not 0 <= rank < self.ranks:
            raise PlacementError(f"rank {rank}, allowed: 0 to {self.ranks - 1}")
        return self.slots[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    @functools.cached_property
    def replicas(self) -> NDArray[np.int64]:
        """[experts]: in how many slots each expert lies."""
        return np.bincount(np.asarray(self.slots), minlength=self.experts).astype(np.int64)

    @functools.cached_property
    def slots_of(self) -> NDArray[np.int64]:
        """[experts, most replicas]: the slots of each expert, rising; -1 behind the last."""
        table = np.full((self.experts, int(self.replicas.max())), -1, dtype=np.int64)
        filled = [0] * self.experts
        for slot, expert in enumerate(self.slots):
            table[expert, filled[expert]] = slot
            filled[expert] += 1
        return table

    def rank_loads(self, load: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """load [experts] -> [ranks]: of each rank, if replicas share the tokens of an expert equally."""
        each = checked_load(load, self.experts) / self.replicas
        return each[np.asarray(self.slots)].reshape(self.ranks, -1).sum(1)

    def balance(self, load: NDArray[np.floating[Any]]) -> float:
        """Mean over maximum of the ranks' loads: 1 is even, 1 / ranks is all on one."""
        loads = self.rank_loads(load)
        return float(loads.mean() / loads.max()) if loads.max() > 0 else 1.0

    # As text

    def as_data(self) -> dict[str, Any]:
        return {"experts": self.experts, "ranks": self.ranks, "slots": list(self.slots)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Placement:
        """What `as_data` gave. PlacementError names what is missing or of another type."""
        try:
            slots, experts, ranks = data["slots"], data["experts"], data["ranks"]
        except (KeyError, TypeError) as error:
            raise PlacementError(f"a placement needs experts, ranks and slots; {error} is missing") from None
        plain = isinstance(slots, list) and all(type(value) is int for value in (*slots, experts, ranks))
        if not plain:
            raise PlacementError(
                f"experts {experts!r}, ranks {ranks!r}, slots {slots!r}, allowed: ints, a list of ints"
            )
        return Placement(tuple(slots), experts, ranks)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits; equal on ranks that have the same placement."""
        return hashlib.sha256(json.dumps(self.as_data()).encode()).hexdigest()[:16]


def checked_load(load: NDArray[np.floating[Any]], experts: int) -> NDArray[np.float64]:
    """As float64 [experts]. PlacementError for another length, or values that are negative or not finite."""
    values = np.asarray(load, dtype=np.float64)
    if values.shape != (experts,):
        raise PlacementError(f"load of shape {list(values.shape)}, allowed: [{experts}]")
    if not np.isfinite(values).all() or (values < 0).any():
        bad = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
        raise PlacementError(f"load of expert {bad} is {values[bad]}, allowed: finite and >= 0")
    return values


@dataclass(frozen=True)
class Copy:
    """Weights of an expert that have to come into a slot, from a rank that holds them."""

    slot: int
    expert: int
    source: int


def copies(old: Placement, new: Placement) -> list[Copy]:
    """What has to be copied between ranks. An expert that its rank had already, in whichever slot, is not in it.

    Raises PlacementError: placements of different experts, ranks or numbers of slots.
    """
    if (old.experts, old.ranks, len(old.slots)) != (new.experts, new.ranks, len(new.slots)):
        raise PlacementError(
            f"{new.experts} experts in {len(new.slots)} slots on {new.ranks} ranks, allowed: the same numbers as "
            f"before, {old.experts}, {len(old.slots)} and {old.ranks}"
        )
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old.slots):
        holders.setdefault(expert, []).append(slot // old.slots_per_rank)
    found: list[Copy] = []
    asked: dict[int, int] = {}  # per expert, so that its holders take turns
    for slot, expert in enumerate(new.slots):
        if slot // new.slots_per_rank in holders[expert]:
            continue
        turn = asked.get(expert, 0)
        asked[expert] = turn + 1
        found.append(Copy(slot, expert, holders[expert][turn % len(holders[expert])]))
    return found


def _few(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown + (", ..." if len(values) > 8 else "")
