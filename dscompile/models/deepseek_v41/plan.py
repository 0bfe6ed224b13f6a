"""Where the tokens of one forward come from and go to in the caches: integer tensors, computed once for all layers.

A pool holds the rows of all sequences of a batch, flat, and one more row at its end: the scratch row. What must not be
stored (padding, positions out of range, a group that is not complete) is stored there, so that a store is one indexed
write without a branch. Nothing that is read from the scratch row reaches a result.

Without more, sequence b of a batch has the b-th run of rows of a pool. In a paged cache (`paged.py`) `Pages` says which
run it has, and the rows of growing pools come from a block table. There a request may also have several rows of the
batch, one behind the other: what comes before such a row stands in the rows in front of it, not in a pool.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    """Which run of rows of a pool each sequence has as its ring."""

    number: Tensor  # int64 [B]; run n is rows n * rows .. n * rows + rows - 1; -1 = none, nothing is stored
    rows: int  # of a run; >= the width of the ring: more keep positions that a rollback may need again
    scratch: int  # the pool's scratch row
    first_row: Tensor | None = None  # int64 [B]: the row of the batch that a row's request begins with; None: its own


class WindowPlan(NamedTuple):
    """A ring of `width` rows per sequence: row `pos % width` holds position `pos`."""

    read: Tensor  # int64 [B, width]: rows of `width` positions, oldest first; which ones, says who made the plan.
    # Where requests have several rows int64 [B, width, 3]: the pool's row, and the row of the batch and its token that
    # are at this position (-1, 0 if it is before the batch, in the pool)
    write: Tensor  # int64 [B * T]: row of each token; scratch unless it is among its request's last `width`


class GroupPlan(NamedTuple):
    """Groups of `ratio` tokens that the chunk touches, the open one from before included: G of them per sequence."""

    members: Tensor  # int64 [B, G, ratio]: indices into [ratio - 1 tokens before the chunk, the chunk]
    write: Tensor  # int64 [B * G]: row of each group; scratch unless the chunk completes it
    start: Tensor  # int64 [B, G]: position of each group's first token


def clean_positions(positions: Tensor, max_tokens: int | Tensor) -> Tensor:
    """int64 [B, T] -> the same with -1 for every token that must not be stored or attended to.

    Kept are the tokens of a row up to the first that breaks the rule: the first position is >= 0, each next one is one
    more, and all are below `max_tokens` (a number, or int64 [B, 1] for a limit of each row's own).
    """
    steps = torch.arange(positions.shape[1], device=positions.device)
    follows = (positions == positions[:, :1] + steps) & (positions >= 0) & (positions < max_tokens)
    kept = follows.long().cumprod(1) == 1
    return torch.where(kept, positions, -1)


def joined_positions(positions: Tensor, max_tokens: Tensor, first_row: Tensor, page: Tensor) -> Tensor:
    """`clean_positions` where requests have several rows: `first_row` and `page` int64 [B] of each row's request.

    A row goes on where the one in front of it ends, which is full and of the same request; a row that does not, and
    those behind it, are padding.
    """
    row = torch.arange(positions.shape[0], device=positions.device)
    start = positions[:, 0]
    cleaned = clean_positions(positions, max_tokens)
    begins = first_row == row
    goes_on = (first_row == first_row.roll(1)) & (page == page.roll(1)) & (cleaned[:, -1] >= 0).roll(1)
    goes_on = goes_on & (start == start.roll(1) + positions.shape[1])
    breaks = (~(begins | goes_on)).long().cumsum(0)
    whole = (first_row >= 0) & (first_row <= row) & (breaks == breaks[known_rows(first_row)])
    return clean_positions(torch.where(whole.unsqueeze(1), positions, -1), max_tokens)


def known_rows(first_row: Tensor) -> Tensor:
    """int64 [B] with the own row for a number that is none of the batch; such a row is padding (`joined_positions`)."""
    row = torch.arange(first_row.shape[0], device=first_row.device)
    return torch.where((first_row >= 0) & (first_row < first_row.shape[0]), first_row, row)


def plan_window(positions: Tensor, width: int, pages: Pages | None = None) -> WindowPlan:
    """Clean positions [B, T] -> the plan of a ring of `width` rows per sequence.

    The pool has B * width + 1 rows, or with `pages` a run of `pages.rows` for each page. `read` names the positions
    before the chunk.
    """
    back = torch.arange(-width, 0, device=positions.device)
    return _plan_ring(positions, positions[:, :1] + back, width, pages)


def plan_window_rows(positions: Tensor, width: int, pages: Pages | None = None) -> WindowPlan:
    """The plan of the attention window, a ring like `plan_window`'s.

    A single token sees what the ring holds once the token is stored: then `read` names the last `width` positions, the
    token's own included. A chunk's early tokens see rows that its later ones replace: `read` is of what was before it.
    """
    if positions.shape[1] > 1:
        return plan_window(positions, width, pages)
    return _plan_ring(positions, positions + torch.arange(1 - width, 1, device=positions.device), width, pages)


def _plan_ring(positions: Tensor, read: Tensor, width: int, pages: Pages | None) -> WindowPlan:
    """Clean positions [B, T] to store and positions to read [B, width] -> where they are."""
    batch = positions.shape[0]
    last = positions.amax(1, keepdim=True)
    if pages is None:
        base = torch.arange(batch, device=positions.device).unsqueeze(1) * width
        kept = (positions >= 0) & (positions > last - width)
        write = torch.where(kept, base + torch.remainder(positions, width), batch * width)
        return WindowPlan(base + torch.remainder(read, width), write.flatten())
    number = pages.number.unsqueeze(1)
    base = number * pages.rows
    if pages.first_row is not None:
        together = pages.first_row.unsqueeze(1) == pages.first_row
        last = torch.where(together, last.squeeze(1), -1).amax(1, keepdim=True)
    kept = (positions >= 0) & (positions > last - pages.rows) & (number >= 0)
    write = torch.where(kept, base + torch.remainder(positions, pages.rows), pages.scratch)
    rows = torch.where(number >= 0, base + torch.remainder(read, pages.rows), pages.scratch)
    if pages.first_row is not None:
        rows = torch.stack((rows, *_in_batch(read, positions, pages.first_row)), -1)
    return WindowPlan(rows, write.flatten())


def _in_batch(read: Tensor, positions: Tensor, first_row: Tensor) -> tuple[Tensor, Tensor]:
    """Positions to read [B, n] of each row's request -> row of the batch and token there, -1 and 0 for none."""
    begin, length = positions[:, :1][first_row], positions.shape[1]
    there = (begin >= 0) & (read >= begin)
    after = torch.where(there, read - begin, 0)
    return torch.where(there, first_row.unsqueeze(1) + after // length, -1), after % length


def plan_groups(
    positions: Tensor,
    ratio: int,
    capacity: int,
    rows: Tensor | None = None,
    scratch: int = 0,
    write_from: Tensor | None = None,
) -> GroupPlan:
    """Clean positions [B, T] -> the plan of groups of `ratio` tokens (pool of B * capacity + 1 rows).

    With `rows` int64 [B, capacity] the pool's row of every group is looked up there (`scratch` for none), and groups
    that begin before position `write_from` int64 [B] are not stored: they are there already, and may be shared.
    """
    batch, length = positions.shape
    first, last = positions[:, :1], positions.amax(1, keepdim=True)
    count = (length + ratio - 2) // ratio + 1  # one to spare: more than one for any chunk, so that no graph is special
    group = first // ratio + torch.arange(count, device=positions.device)
    start = group * ratio
    places = (start - first + ratio - 1).unsqueeze(-1) + torch.arange(ratio, device=positions.device)
    complete = (group >= 0) & (group < capacity) & (start + ratio <= last + 1)
    if rows is None:
        base = torch.arange(batch, device=positions.device).unsqueeze(1) * capacity
        write = torch.where(complete, base + group, batch * capacity)
    else:
        if write_from is not None:
            complete = complete & (start >= write_from.unsqueeze(1))
        write = torch.where(complete, rows.gather(1, group.clamp(0, capacity - 1)), scratch)
    return GroupPlan(places.clamp(0, length + ratio - 2), write.flatten(), start)


def page_rows(table: Tensor, rows: int, scratch: int) -> Tensor:
    """Block table int64 [B, P] of page numbers (-1 = none) -> int64 [B, P * rows]: the pool's row of every row.

    Page n is rows n * rows .. n * rows + rows - 1 of a pool whose last row is `scratch`; what has no page is there.
    """
    page = table.unsqueeze(-1)
    row = page * rows + torch.arange(rows, device=table.device)
    return torch.where(page >= 0, row, scratch).flatten(1)


def read_rows(pool: Tensor, rows: Tensor) -> Tensor:
    """pool [S, R], rows int64 [B, n] -> [B, n, R]."""
    return pool[rows]


def read_history(pool: Tensor, rows: Tensor, chunk: Tensor) -> Tensor:
    """The rows in front of a chunk: pool [S, R], `rows` of a `WindowPlan`, chunk [B, T, R] -> [B, n, R]."""
    if rows.dim() == 2:
        return read_rows(pool, rows)
    stored, row, token = rows.unbind(-1)
    before = read_rows(pool, stored)
    return torch.where((row >= 0).unsqueeze(-1), chunk[row.clamp(min=0), token], before)


def store_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write values [B, n, R] to the rows int64 [B * n] of pool [S, R], in place."""
    pool.index_put_((rows,), values.flatten(0, 1))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """values [B, S, D], index int64 [B, ...] (all >= 0) -> [B, ..., D]: rows of the same sequence."""
    batch = torch.arange(values.shape[0], device=values.device)
    return values[batch.view(-1, *(1,) * (index.dim() - 1)), index]
