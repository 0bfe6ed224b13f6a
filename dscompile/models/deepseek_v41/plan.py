"""Where the tokens of one forward come from and go to in the caches: integer tensors, computed once for all layers.

A pool holds the rows of all sequences of a batch, flat, and one more row at its end: the scratch row. What must not be
stored (padding, positions out of range, a group that is not complete) is stored there, so that a store is one indexed
write without a branch. The scratch row is never read.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class WindowPlan(NamedTuple):
    """A ring of `width` rows per sequence: row `pos % width` holds position `pos`."""

    read: Tensor  # int64 [B, width]: rows of `width` positions, oldest first; which ones, says who made the plan
    write: Tensor  # int64 [B * T]: row of each token; scratch unless it is among its row's last `width`


class GroupPlan(NamedTuple):
    """Groups of `ratio` tokens that the chunk touches, the open one from before included: G of them per sequence."""

    members: Tensor  # int64 [B, G, ratio]: indices into [ratio - 1 tokens before the chunk, the chunk]
    write: Tensor  # int64 [B * G]: row of each group; scratch unless the chunk completes it
    start: Tensor  # int64 [B, G]: position of each group's first token


def clean_positions(positions: Tensor, max_tokens: int) -> Tensor:
    """int64 [B, T] -> the same with -1 for every token that must not be stored or attended to.

    Kept are the tokens of a row up to the first that breaks the rule: the first position is >= 0, each next one is one
    more, and all are below `max_tokens`.
    """
    steps = torch.arange(positions.shape[1], device=positions.device)
    follows = (positions == positions[:, :1] + steps) & (positions >= 0) & (positions < max_tokens)
    kept = follows.long().cumprod(1) == 1
    return torch.where(kept, positions, -1)


def plan_window(positions: Tensor, width: int) -> WindowPlan:
    """Clean positions [B, T] -> the plan of a ring of `width` rows per sequence (pool of B * width + 1 rows).

    `read` names the positions before the chunk.
    """
    batch = positions.shape[0]
    base = torch.arange(batch, device=positions.device).unsqueeze(1) * width
    back = torch.arange(-width, 0, device=positions.device)
    read = base + torch.remainder(positions[:, :1] + back, width)
    last = positions.amax(1, keepdim=True)
    kept = (positions >= 0) & (positions > last - width)
    write = torch.where(kept, base + torch.remainder(positions, width), batch * width)
    return WindowPlan(read, write.flatten())


def plan_window_rows(positions: Tensor, width: int) -> WindowPlan:
    """The plan of the attention window, a ring like `plan_window`'s.

    A single token sees what the ring holds once the token is stored: then `read` names the last `width` positions, the
    token's own included. A chunk's early tokens see rows that its later ones replace: `read` is of what was before it.
    """
    plan = plan_window(positions, width)
    if positions.shape[1] > 1:
        return plan
    base = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1) * width
    back = torch.arange(1 - width, 1, device=positions.device)
    return WindowPlan(base + torch.remainder(positions + back, width), plan.write)


def plan_groups(positions: Tensor, ratio: int, capacity: int) -> GroupPlan:
    """Clean positions [B, T] -> the plan of groups of `ratio` tokens (pool of B * capacity + 1 rows)."""
    batch, length = positions.shape
    first, last = positions[:, :1], positions.amax(1, keepdim=True)
    count = (length + ratio - 2) // ratio + 1  # one to spare: more than one for any chunk, so that no graph is special
    group = first // ratio + torch.arange(count, device=positions.device)
    start = group * ratio
    places = (start - first + ratio - 1).unsqueeze(-1) + torch.arange(ratio, device=positions.device)
    complete = (group >= 0) & (group < capacity) & (start + ratio <= last + 1)
    base = torch.arange(batch, device=positions.device).unsqueeze(1) * capacity
    write = torch.where(complete, base + group, batch * capacity)
    return GroupPlan(places.clamp(0, length + ratio - 2), write.flatten(), start)


def read_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """pool [S, R], rows int64 [B, n] -> [B, n, R]."""
    return pool[rows]


def store_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write values [B, n, R] to the rows int64 [B * n] of pool [S, R], in place."""
    pool.index_put_((rows,), values.flatten(0, 1))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """values [B, S, D], index int64 [B, ...] (all >= 0) -> [B, ..., D]: rows of the same sequence."""
    batch = torch.arange(values.shape[0], device=values.device)
    return values[batch.view(-1, *(1,) * (index.dim() - 1)), index]
