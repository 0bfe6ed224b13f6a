"""The experts of one layer as a rank knows them: which lie here, where the others are, how busy each was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dscompile.distributed.placement import Placement, PlacementError
from dscompile.distributed.routing import slot_table

_MARK = "_dsv4_expert_layer"


class ExpertLayer:
    """State of one layer's exchange. Compiled graphs read its tensors, so they change in place only.

    name: the layer's module path. rank: this one's place in the group, whose members (global ranks) are `members`, if
    they are known. weights: tensors [slots or experts, ...] stacked by expert. whole: they hold every expert, in order,
    and not just this rank's slots. table: `slot_table`. load: int64 [experts], tokens that chose each expert on this
    rank since it was last zeroed.
    """

    def __init__(
        self, name: str, placement: Placement, rank: int, weights: Sequence[Tensor], whole: bool, width: int = 1,
        members: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        device = weights[0].device
        held = placement.experts if whole else placement.slots_per_rank
        for tensor in weights:
            if tensor.shape[0] != held:
                raise PlacementError(f"{name}: {tensor.shape[0]} experts in a tensor of weights, allowed: {held}")
        if whole and placement != Placement.contiguous(placement.experts, placement.ranks):
            raise PlacementError(
                f"{name}: a placement of its own for a model that holds every expert, allowed: shard_experts first"
            )
        self.name, self.rank, self.whole, self.members = name, rank, whole, members
        self.placement = placement
        self.weights = tuple(weights)
        self.width = max(width, int(placement.replicas.max()))
        self.table = slot_table(placement, self.width, device)
        self.load = torch.zeros(placement.experts, dtype=torch.int64, device=device)
        for tensor in self.weights:
            setattr(tensor, _MARK, self)

    @property
    def kind(self) -> tuple[int, int, int, int, bool, int]:
        """What compiled code takes for granted of a layer."""
        where = self.placement
        return (where.experts, where.ranks, where.slots_per_rank, self.rank, self.whole, self.width)

    @property
    def held(self) -> tuple[int, ...]:
        """The experts of this rank, in order of its slots."""
        return self.placement.on_rank(self.rank)

    @property
    def held_bytes(self) -> int:
        """Bytes of this layer's experts in this rank's memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.weights)

    def check(self, placement: Placement) -> None:
        """Whether `move` could take a placement.

        Raises:
            PlacementError: other numbers than before, or more replicas of an expert than the table has room for.
        """
        old = self.placement
        if (placement.experts, placement.ranks, len(placement.slots)) != (old.experts, old.ranks, len(old.slots)):
            raise PlacementError(
                f"{self.name}: {placement.experts} experts in {len(placement.slots)} slots on {placement.ranks} ranks, "
                f"allowed: {old.experts}, {len(old.slots)} and {old.ranks}, as before"
            )
        most = int(placement.replicas.max())
        if most > self.width:
            raise PlacementError(f"{self.name}: an expert with {most} replicas, allowed: up to {self.width}")

    def move(self, placement: Placement) -> None:
        """Take another placement, whose weights are in place already. PlacementError as `check`."""
        self.check(placement)
        self.table.copy_(slot_table(placement, self.width, self.table.device))
        self.placement = placement


def layer_of(tensor: Any) -> ExpertLayer | None:
    """The layer that a weight belongs to; None for any other tensor."""
    return getattr(tensor, _MARK, None)


def unmark(layer: ExpertLayer) -> None:
    """Make the layer's weights plain tensors again."""
    for tensor in layer.weights:
        if hasattr(tensor, _MARK):
            delattr(tensor, _MARK)
