"""Weights of experts on their way between ranks, as bytes: one row holds an expert's part of every stack of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dscompile.distributed.layers import ExpertLayer
from dscompile.distributed.placement import Placement, copies


def move_weights(layer: ExpertLayer, new: Placement, group: Any) -> None:
    """Weights of one layer into the slots of `new`, in place; the layer keeps its placement. Every rank calls it.

    Everything that leaves or changes its slot is read before anything is written.
    """
    old, rank, each = layer.placement, layer.rank, layer.placement.slots_per_rank
    todo = copies(old, new)
    held = {expert: slot for slot, expert in reversed(list(enumerate(old.on_rank(rank))))}
    sending = sorted((copy.slot // each, copy.slot, copy.expert) for copy in todo if copy.source == rank)
    arriving = sorted((copy.source, copy.slot) for copy in todo if copy.slot // each == rank)
    row = sum(_bytes(tensor, 0).numel() for tensor in layer.weights)
    empty = layer.weights[0].new_empty((0, row), dtype=torch.uint8)
    staged = [torch.cat([_bytes(tensor, held[expert]) for tensor in layer.weights]) for _, _, expert in sending]
    received = empty.new_empty((len(arriving), row))
    dist.all_to_all_single(
        received, torch.stack(staged) if staged else empty,
        [sum(source == other for source, _ in arriving) for other in range(old.ranks)],
        [sum(home == other for home, _, _ in sending) for other in range(old.ranks)],
        group=group,
    )  # fmt: skip
    writes = [(slot - rank * each, values) for (_, slot), values in zip(arriving, received)]
    coming = {slot for slot, _ in writes}
    for slot, (before, after) in enumerate(zip(old.on_rank(rank), new.on_rank(rank))):
        if before != after and slot not in coming:
            writes.append((slot, torch.cat([_bytes(tensor, held[after]) for tensor in layer.weights])))
    for slot, values in writes:
        _write(layer.weights, slot, values)


def _bytes(tensor: Tensor, slot: int) -> Tensor:
    """One expert of a stack as uint8 [bytes], whatever its dtype."""
    return tensor.detach()[slot].contiguous().reshape(-1).view(torch.uint8)


def _write(stacks: Sequence[Tensor], slot: int, values: Tensor) -> None:
    """uint8 [bytes] of one expert into a slot of every stack."""
    start = 0
    for stack in stacks:
        into = stack.detach()[slot]
        size = into.numel() * into.element_size()
        # A copy, as a view of wider elements needs them aligned.
        into.copy_(values[start : start + size].clone().view(stack.dtype).view(into.shape))
        start += size
