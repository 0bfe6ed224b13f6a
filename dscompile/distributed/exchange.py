"""Tokens to their experts and back, the exact form: counts first, then just the rows that are needed.

route -> dispatch -> local experts -> combine. A token goes once to each distinct rank that holds one of its experts,
with the slots that it wants there and their weights; what comes back is that rank's share of its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from dscompile.distributed.placement import Placement
from dscompile.formats import FORMATS

PAYLOAD = "fp8_g32_ue8m0"


@dataclass(frozen=True)
class Route:
    """Where a rank's tokens go. S rows are sent, sorted by destination and then by token.

    token: int64 [S], the token of each row. slots, weights: [S, k] of that token, as slots of the destination, -1 for
    experts that are elsewhere. counts: int64 [ranks], rows for each. place: int64 [N, ranks], the row of each token for
    each destination, -1 for none.
    """

    token: Tensor
    slots: Tensor
    weights: Tensor
    counts: Tensor
    place: Tensor


def route(indices: Tensor, weights: Tensor, placement: Placement, rank: int) -> Route:
    """indices int [N, k] of experts (-1: none) and weights [N, k] of rank `rank` -> where its tokens go.

    Replicas of an expert take turns by token, and start at another one on every rank. Raises IndexError for an expert
    that is none.
    """
    if indices.numel() and not bool(((indices >= -1) & (indices < placement.experts)).all()):
        worst = int(indices.max() if int(indices.max()) >= placement.experts else indices.min())
        raise IndexError(f"expert {worst}, allowed: -1 to {placement.experts - 1}")
    device, ranks, per_rank = indices.device, placement.ranks, placement.slots_per_rank
    table = torch.as_tensor(placement.slots_of, device=device)
    replicas = torch.as_tensor(placement.replicas, device=device)
    there = indices >= 0
    expert = indices.clamp(min=0).long()
    turn = (torch.arange(indices.shape[0], device=device).unsqueeze(1) + rank) % replicas[expert]
    slot = torch.where(there, table[expert, turn], -1)
    home = torch.where(there, slot // per_rank, -1)
    wanted = (home.unsqueeze(-1) == torch.arange(ranks, device=device)).any(1)  # [N, ranks]
    destination, token = wanted.t().nonzero(as_tuple=True)
    place = torch.full((ranks, indices.shape[0]), -1, dtype=torch.int64, device=device)
    place[destination, token] = torch.arange(len(token), device=device)
    mine = home[token] == destination.unsqueeze(-1)
    local = torch.where(mine, slot[token] - destination.unsqueeze(-1) * per_rank, -1)
    return Route(token, local, weights[token], wanted.sum(0), place.t().contiguous())


def exchange_experts(
    x: Tensor, indices: Tensor, weights: Tensor, placement: Placement, group: dist.ProcessGroup,
    experts: Callable[[Tensor, Tensor, Tensor], Tensor], payload: str = "plain",
) -> Tensor:  # fmt: skip
    """The routed experts of this rank's tokens, wherever the experts are: x [N, D] -> fp32 [N, D].

    Every rank of `group` calls it, with as many tokens as it has, 0 included. experts: (x [M, D], slots int64 [M, k] or
    -1, weights [M, k]) -> [M, D], the sum over a row's slots on this rank. payload: "plain" sends rows as they are,
    "fp8" in format fp8_g32_ue8m0 (D + D / 32 bytes; D divides by 32). Sums come back in x.dtype, and are added up in
    fp32 in order of ranks.

    Raises:
        ValueError: a placement for another number of ranks than the group's, or an unknown payload.
        IndexError: as `route`.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if placement.ranks != ranks:
        raise ValueError(f"a placement for {placement.ranks} ranks in a group of {ranks}, allowed: the same number")
    if payload not in ("plain", "fp8"):
        raise ValueError(f"payload: {payload!r}, allowed: 'plain' or 'fp8'")
    way = route(indices, weights, placement, rank)
    arriving = wait_tensor(all_to_all_single(way.counts, None, None, group))
    out, back = way.counts.tolist(), arriving.tolist()

    def swap(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return wait_tensor(all_to_all_single(rows.contiguous(), received, sent, group))

    if payload == "fp8":
        packed = swap(torch.ops.dsv4.pack_rows(x, way.token, PAYLOAD), out, back)
        given = FORMATS[PAYLOAD].unpack(packed, x.shape[1], x.dtype)
    else:
        given = swap(x[way.token], out, back)
    slots, shares = swap(way.slots, out, back), swap(way.weights, out, back)
    sums = experts(given, slots, shares).to(x.dtype)
    returned = swap(sums, back, out)
    total: Tensor = torch.ops.dsv4.combine_rows(returned, way.place, None)
    return total


def bytes_of(way: Route, rank: int, hidden: int, value_bytes: int, payload: str = "plain") -> tuple[int, int]:
    """(sent, got back): bytes of the rows of a route that leave the rank and of their sums, indices left out."""
    remote = int(way.counts.sum() - way.counts[rank])
    row = FORMATS[PAYLOAD].row_bytes(hidden) if payload == "fp8" else hidden * value_bytes
    return remote * row, remote * hidden * value_bytes
