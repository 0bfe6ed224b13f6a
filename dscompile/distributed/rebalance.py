"""Experts move to other ranks between two steps, so that busy ones are spread evenly; nothing is compiled anew.

Weights move within the tensors that compiled code reads, and the table of slots changes in place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from dscompile import compat
from dscompile.distributed import agreement
from dscompile.distributed.balancer import rebalanced
from dscompile.distributed.failure import named_failures
from dscompile.distributed.layers import ExpertLayer
from dscompile.distributed.moving import move_weights
from dscompile.distributed.placement import Placement, PlacementError, copies
from dscompile.distributed.sharding import ShardedExperts

Placements = Mapping[str, Placement]


@dataclass(frozen=True)
class LayerMove:
    """What a new placement costs one layer: experts' weights copied from rank to rank, and their bytes, on all ranks
    together. before, after: mean over maximum tokens per rank for the measured load; 1 is even.
    """

    name: str
    copies: int
    bytes: int
    before: float = 1.0
    after: float = 1.0


@dataclass(frozen=True)
class RebalanceReport:
    """One re-placement. tokens: how many choices of an expert the load counts. seconds: how long steps stood still."""

    step: int
    tokens: int
    layers: tuple[LayerMove, ...]
    seconds: float

    @property
    def copies(self) -> int:
        return sum(layer.copies for layer in self.layers)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def before(self) -> float:
        """Mean over layers of mean over maximum tokens per rank, with the placement that was left."""
        return sum(layer.before for layer in self.layers) / len(self.layers)

    @property
    def after(self) -> float:
        """The same with the placement that was taken."""
        return sum(layer.after for layer in self.layers) / len(self.layers)

    def __str__(self) -> str:
        return (
            f"step {self.step}: balance {self.before:.3f} -> {self.after:.3f} over {self.tokens} choices, "
            f"{self.copies} experts copied, {self.bytes / 1e6:.1f} MB, {self.seconds:.2f} s"
        )


def gathered_loads(experts: ShardedExperts) -> Tensor:
    """int64 [layers, experts]: tokens that chose each expert on any rank. Every rank calls it."""
    loads = experts.loads()
    dist.all_reduce(loads, group=compat.process_group(experts.ranks.group))
    return loads


def moves(experts: ShardedExperts, placements: Placements, loads: Tensor | None = None) -> tuple[LayerMove, ...]:
    """What `apply` would move, layer by layer. Layers that are not named stay.

    loads: int64 [layers, experts], for the balance before and after.

    Raises:
        PlacementError: as `apply`.
    """
    _check(experts, placements)
    found = []
    for place, layer in enumerate(experts.layers):
        new = placements.get(layer.name, layer.placement)
        count = len(copies(layer.placement, new))
        balance = (1.0, 1.0)
        if loads is not None:
            load = loads[place].double().cpu().numpy()
            balance = layer.placement.balance(load), new.balance(load)
        found.append(LayerMove(layer.name, count, count * expert_bytes(layer), *balance))
    return tuple(found)


def expert_bytes(layer: ExpertLayer) -> int:
    """Bytes of one expert's weights in a layer."""
    return layer.held_bytes // layer.placement.slots_per_rank


def apply(experts: ShardedExperts, placements: Placements) -> tuple[LayerMove, ...]:
    """Move weights to where `placements` (by the layer's name) want them. Every rank calls it, between two steps.

    One layer at a time, so that the memory needed beside the weights is what one layer sends and receives on this rank.

    Raises:
        PlacementError: an unknown layer; a model that holds every expert; other experts, slots or ranks than before;
            more replicas of an expert than the table has room for. Nothing has moved then.
        AgreementError: ranks with different placements, before or after. Nothing has moved.
        ExchangeError: a rank is gone. Weights are then partly old and partly new.
    """
    todo = moves(experts, placements)
    ranks = experts.ranks
    with named_failures(ranks.group, ranks.rank, "moving experts"):
        _agree(experts, {f"the new placement of {name}": new.fingerprint for name, new in placements.items()})
        for layer in experts.layers:
            new = placements.get(layer.name, layer.placement)
            if new != layer.placement:
                move_weights(layer, new, compat.process_group(ranks.group))
                layer.move(new)
    return todo


class Rebalancer:
    """Follows the load: every `every` steps experts are placed anew for the tokens counted since the last time.

    An engine calls `tick` on every rank once before each step. When a re-placement is due, rank 0 writes at the group's
    store which step it will happen before, `margin` steps ahead, and every rank reads that in time: a step exchanges
    tokens with all ranks, so no rank finishes step t before rank 0 has begun it. Before step t + 1 a rank therefore
    sees whatever rank 0 wrote before step t, one step after it was written at the latest. `margin` is 2: one step for
    that, one to spare. A host that starts steps on a GPU without waiting for their results may be further ahead of
    other hosts; `margin` then has to be larger than that many steps by one. Should a rank still be late, or its
    placement another one, all ranks are told so where they compare notes before anything moves.

    Compile with options={"expert_load": True}, else no load is counted and nothing ever moves.
    """

    def __init__(
        self, experts: ShardedExperts, every: int, most_copies: int | None = None, nodes: int = 1, margin: int = 2
    ) -> None:
        """Every rank calls it.

        Args:
            every: steps from one re-placement to the announcement of the next.
            most_copies: of experts' weights, in a layer each time; None for any number.
            nodes: as for `balanced`; ranks come in as many equal groups, which an expert's replicas do not leave.

        Raises:
            ValueError: a number that is not allowed.
            AgreementError: ranks with different numbers.
        """
        for name, value, least in (("every", every, 1), ("margin", margin, 1), ("most_copies", most_copies or 0, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: {value!r}, allowed: a whole number >= {least}")
        if whole := [layer.name for layer in experts.layers if layer.whole]:
            raise ValueError(f"{whole[0]}: every rank holds all of its experts, allowed: layers of shard_experts")
        ranks, numbers = experts.ranks, {layer.placement.experts for layer in experts.layers}
        if nodes < 1 or ranks.size % nodes or any(number % nodes for number in numbers):
            raise PlacementError(
                f"{nodes} nodes for {ranks.size} ranks and {sorted(numbers)} experts, allowed: a divisor of both"
            )
        self._experts, self._every, self._margin = experts, every, margin
        self._most_copies, self._nodes = most_copies, nodes
        self._store: Any = compat.group_store(compat.process_group(ranks.group))
        number = _MADE[ranks.group] = _MADE.get(ranks.group, 0) + 1
        self._key, self._done = f"dsv4/replace/{number}", 0
        self._last: int | None = None
        self._due = self._at = 0  # steps: when rank 0 may announce; what it announced, 0 for nothing yet
        _agree(
            experts,
            {"every": every, "margin": margin, "most_copies": most_copies, "nodes": nodes, "rebalancer": number},
        )

    def tick(self, step: int) -> RebalanceReport | None:
        """Call before each step, on every rank. What was done if experts were placed anew, else None.

        Raises:
            ValueError: a step that does not come after the last one.
            AgreementError: ranks are at different steps or have different placements; on every rank, nothing has moved.
            ExchangeError: as `apply`.
        """
        if self._last is None:
            self._due = step + self._every
        elif step <= self._last:
            raise ValueError(f"step {step} after step {self._last}, allowed: a later one")
        self._last = step
        if not self._at and step >= self._due:
            self._at = self._announced(step)
        if not self._at or step < self._at:
            return None
        report = self._replace(step)
        self._due, self._at, self._done = step + self._every, 0, self._done + 1
        return report

    def _announced(self, step: int) -> int:
        """The step that rank 0 has chosen, 0 if it has not."""
        key = f"{self._key}/{self._done}"
        if self._experts.ranks.rank == 0:
            self._store.set(key, str(step + self._margin))
            return step + self._margin
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _replace(self, step: int) -> RebalanceReport:
        start = time.perf_counter()
        experts, ranks = self._experts, self._experts.ranks
        with named_failures(ranks.group, ranks.rank, "re-placement of experts"):
            _agree(experts, {"the step before which experts move": step})
            loads = gathered_loads(experts)
            placements = self._placements(loads)
            done = moves(experts, placements, loads)
            apply(experts, placements)
        for layer in experts.layers:
            layer.load.zero_()
        return RebalanceReport(step, int(loads.sum()), done, time.perf_counter() - start)

    def _placements(self, loads: Tensor) -> Placements:
        """Ranks share the layers out: faster, and rounding that differs between machines cannot matter."""
        ranks, layers = self._experts.ranks, self._experts.layers
        mine = {}
        for layer, load in list(zip(layers, loads.double().cpu().numpy()))[ranks.rank :: ranks.size]:
            mine[layer.name] = self._placement(layer, load).slots
        everyone: list[Any] = [None] * ranks.size
        dist.all_gather_object(everyone, mine, group=compat.process_group(ranks.group))
        slots = {name: each for part in everyone for name, each in part.items()}
        return {
            layer.name: Placement(slots[layer.name], layer.placement.experts, layer.placement.ranks)
            for layer in layers
        }  # fmt: skip

    def _placement(self, layer: ExpertLayer, load: Any) -> Placement:
        if not np.any(load):
            return layer.placement
        return rebalanced(layer.placement, load, self._most_copies, self._nodes, layer.width)


_MADE: dict[str, int] = {}  # rebalancers of each group, so that none reads what another announced


def _check(experts: ShardedExperts, placements: Placements) -> None:
    known = {layer.name: layer for layer in experts.layers}
    if unknown := sorted(set(placements) - set(known)):
        raise PlacementError(f"placements for {', '.join(unknown)}, allowed: {', '.join(known)}")
    for name, new in placements.items():
        layer = known[name]
        if layer.whole:
            raise PlacementError(f"{name}: this model holds every expert, allowed: one given to shard_experts")
        layer.check(new)


def _agree(experts: ShardedExperts, facts: Mapping[str, Any]) -> None:
    """Compare facts and placements between ranks; AgreementError on all if they differ."""
    group = compat.process_group(experts.ranks.group)
    where = {f"the placement of {layer.name}": layer.placement.fingerprint for layer in experts.layers}
    everyone: list[Any] = [None] * experts.ranks.size
    dist.all_gather_object(everyone, {**{name: str(fact) for name, fact in facts.items()}, **where}, group=group)
    if message := agreement.difference(everyone):
        raise agreement.AgreementError(message)
