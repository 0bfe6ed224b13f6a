"""Where tokens go: a token travels once to each distinct rank that holds one of its experts.

Pure functions of tensors. In the padded form nothing depends on values, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dscompile.distributed.placement import Placement

PAYLOADS = ("plain", "fp8")


@dataclass(frozen=True)
class Spec:
    """One exchange, the same on every rank but for `rank`.

    group: name of the process group. ranks: its size. rank: this one's place in it. slots: experts on each rank.
    capacity: rows for each pair of ranks, 0 for the exact form. overflow: "error", or "exact": a step in which some
    rank has more rows for another than `capacity` takes the exact form (every step then costs a flag from all ranks).
    payload: "plain" (rows as they are) or "fp8" (format fp8_g32_ue8m0).
    """

    group: str
    ranks: int
    rank: int
    slots: int
    capacity: int = 0
    overflow: str = "error"
    payload: str = "plain"

    @property
    def fixed(self) -> bool:
        """Whether the number of rows that arrive is known beforehand."""
        return self.capacity > 0 and self.overflow == "error"


@dataclass(frozen=True)
class Route:
    """Where a rank's tokens go: S rows, sorted by destination and then by token.

    token: int64 [S], the token of each row, -1 for a row that is not used. slots: int64 [S, k], slots of the
    destination, -1 for experts that are elsewhere. place: int64 [N, ranks], the row of each token for each
    destination, -1 for none.
    """

    token: Tensor
    slots: Tensor
    place: Tensor


def slot_table(placement: Placement, width: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [experts, 1 + width]: number of replicas, then their slots, -1 behind the last.

    `width` is at least the most replicas: it stays when placements change, and so does the compiled code.
    """
    most = int(placement.replicas.max())
    if most > width:
        raise ValueError(f"an expert with {most} replicas in a table for {width}, allowed: up to {width}")
    table = torch.full((placement.experts, 1 + width), -1, dtype=torch.int64)
    table[:, 0] = torch.from_numpy(placement.replicas)
    table[:, 1 : 1 + most] = torch.from_numpy(placement.slots_of)
    return table.to(device)


def chosen_slots(indices: Tensor, table: Tensor, rank: int) -> Tensor:
    """indices int [N, k] of experts (-1: none) -> int64 [N, k] of slots, -1 for none.

    Replicas of an expert take turns by token, and start at another one on every rank.
    """
    there = indices >= 0
    expert = indices.clamp(min=0).long()
    token = torch.arange(indices.shape[0], device=indices.device).unsqueeze(1)
    turn = (token + rank) % table[expert, 0]
    return torch.where(there, table[expert, 1 + turn], -1)


def destinations(slot: Tensor, spec: Spec) -> Tensor:
    """Slots int64 [N, k] -> bool [N, ranks]: which ranks a token travels to."""
    home = torch.where(slot >= 0, slot // spec.slots, -1)
    ranks = torch.arange(spec.ranks, device=slot.device)
    return (home.unsqueeze(-1) == ranks).any(1)


def route(slot: Tensor, wanted: Tensor, spec: Spec, counts: list[int] | None) -> Route:
    """Slots int64 [N, k] and their `destinations` -> rows.

    counts: rows for each rank (the exact form); None takes `spec.capacity` rows for each, which must be enough.
    """
    device, tokens = slot.device, slot.shape[0]
    if counts is None:
        base = torch.arange(spec.ranks, device=device) * spec.capacity
        total = spec.ranks * spec.capacity
    else:
        given = torch.tensor(counts, dtype=torch.int64, device=device)
        base, total = given.cumsum(0) - given, sum(counts)
    place = torch.where(wanted, base + wanted.long().cumsum(0) - 1, -1)
    # One row more, for the places that are none: no shape then depends on how many there are.
    token = torch.full((total + 1,), -1, dtype=torch.int64, device=device)
    numbers = torch.arange(tokens, device=device).unsqueeze(1).expand(tokens, spec.ranks)
    token.scatter_(0, torch.where(wanted, place, total).flatten(), numbers.flatten())
    token = token[:-1]
    home = torch.searchsorted(base, torch.arange(total, device=device), right=True) - 1
    if counts is not None:  # ranks without rows share their base with the next one
        home = torch.repeat_interleave(torch.arange(spec.ranks, device=device), given, output_size=total)
    if tokens == 0:
        return Route(token, slot.new_full((total, slot.shape[1]), -1), place)
    local = slot[token.clamp(min=0)] - home.unsqueeze(1) * spec.slots
    here = (local >= 0) & (local < spec.slots) & (token >= 0).unsqueeze(1)
    return Route(token, torch.where(here, local, -1), place)
