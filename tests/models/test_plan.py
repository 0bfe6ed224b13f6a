"""Where tokens and groups are read from and stored, against plain Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.models.deepseek_v41.plan import (
    Pages,
    clean_positions,
    page_rows,
    plan_groups,
    plan_window,
    plan_window_rows,
)

MAX_TOKENS = 40

# Per row: the first position (-1 for an idle row) and how many tokens follow, of a chunk of up to 12.
ROWS = st.lists(st.tuples(st.integers(-1, MAX_TOKENS - 1), st.integers(1, 12)), min_size=1, max_size=3)


def positions_of(rows: list[tuple[int, int]], length: int) -> torch.Tensor:
    out = torch.full((len(rows), length), -1)
    for b, (start, count) in enumerate(rows):
        if start >= 0:
            count = min(count, length, MAX_TOKENS - start)
            out[b, :count] = torch.arange(start, start + count)
    return out


@settings(max_examples=60)
@given(ROWS, st.integers(1, 12), st.integers(1, 9))
def test_window(rows: list[tuple[int, int]], length: int, width: int) -> None:
    positions = positions_of(rows, length)
    plan = plan_window(positions, width)
    batch = len(rows)
    held = [{p % width: p for p in range(max(row[0], 0))} for row in positions.tolist()]  # slot -> position
    for b, row in enumerate(positions.tolist()):
        if row[0] >= 0:
            for i, slot in enumerate(plan.read[b].tolist()):
                position = row[0] - width + i
                assert b * width <= slot < (b + 1) * width
                if position >= 0:
                    assert held[b][slot - b * width] == position
    for slots, row in zip(plan.write.view(batch, length).tolist(), positions.tolist()):
        stored = {slot: p for slot, p in zip(slots, row) if slot != batch * width}
        last = max(row)
        assert sorted(stored.values()) == [p for p in row if p >= 0 and p > last - width]
        assert all(slot % width == p % width for slot, p in stored.items())
        assert len(stored) == len([slot for slot in slots if slot != batch * width])


@settings(max_examples=60)
@given(ROWS, st.integers(1, 12), st.integers(1, 4))
def test_groups(rows: list[tuple[int, int]], length: int, ratio: int) -> None:
    positions = positions_of(rows, length)
    capacity = MAX_TOKENS // ratio
    plan = plan_groups(positions, ratio, capacity)
    batch, groups = plan.start.shape
    for b, row in enumerate(positions.tolist()):
        live = [p for p in row if p >= 0]
        first, last = row[0], max(row)
        closed = [p // ratio for p in live if (p + 1) % ratio == 0]
        slots = plan.write.view(batch, groups)[b].tolist()
        assert [s - b * capacity for s in slots if s != batch * capacity] == closed
        for g in range(groups):
            if slots[g] == batch * capacity:
                continue
            group = slots[g] - b * capacity
            assert plan.start[b, g] == group * ratio
            places = [group * ratio + i - first + ratio - 1 for i in range(ratio)]
            assert plan.members[b, g].tolist() == places and group * ratio + ratio - 1 <= last
    assert plan.members.min() >= 0 and plan.members.max() < length + ratio - 1


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(-3, 20), min_size=5, max_size=5), min_size=1, max_size=4))
def test_clean_positions(rows: list[list[int]]) -> None:
    for got, row in zip(clean_positions(torch.tensor(rows), 12).tolist(), rows):
        kept = 0
        while kept < 5 and row[kept] == row[0] + kept and 0 <= row[kept] < 12:
            kept += 1
        assert got == row[:kept] + [-1] * (5 - kept)


@settings(max_examples=40)
@given(ROWS, st.integers(1, 9))
def test_a_single_token_reads_the_ring_behind_its_own_store(rows: list[tuple[int, int]], width: int) -> None:
    positions = positions_of(rows, 1)
    plan = plan_window_rows(positions, width)
    ring = torch.full((len(rows) * width + 1,), -1)
    for b, (position,) in enumerate(positions.tolist()):
        for past in range(max(0, position - width), max(0, position)):
            ring[b * width + past % width] = past
    ring[plan.write] = positions.flatten()
    for row, (position,) in zip(ring[plan.read].tolist(), positions.tolist()):
        if position >= 0:
            assert row == [p if p >= 0 else -1 for p in range(position - width + 1, position + 1)]
    chunk = positions_of(rows, 3)
    assert torch.equal(plan_window_rows(chunk, width).read, plan_window(chunk, width).read)


@settings(max_examples=60)
@given(ROWS, st.integers(1, 12), st.integers(1, 9), st.integers(0, 4), st.data())
def test_pages(rows: list[tuple[int, int]], length: int, width: int, spare: int, data: st.DataObject) -> None:
    """In pages, the plan is that of the batch's order with another place for every ring; no page, no place."""
    positions, batch = positions_of(rows, length), len(rows)
    number = data.draw(st.lists(st.integers(-1, 8), min_size=batch, max_size=batch, unique=True))
    run = width + spare
    pages = Pages(torch.tensor(number), run, 9 * run)
    for plan in (plan_window, plan_window_rows):
        got, plain = plan(positions, width, pages), plan(positions, width, Pages(torch.arange(batch), run, batch * run))
        for b, page in enumerate(number):
            for mine, theirs in zip(
                (got.read[b], got.write.view(batch, -1)[b]), (plain.read[b], plain.write.view(batch, -1)[b])
            ):
                stored = (theirs != batch * run) & (page >= 0)
                assert mine.equal(torch.where(stored, theirs - b * run + page * run, 9 * run))
        if not spare:
            dense = plan(positions, width)
            assert plain.read.equal(dense.read) and plain.write.equal(dense.write)


@settings(max_examples=60)
@given(ROWS, st.integers(1, 12), st.integers(1, 4), st.data())
def test_groups_in_pages(rows: list[tuple[int, int]], length: int, ratio: int, data: st.DataObject) -> None:
    positions, batch = positions_of(rows, length), len(rows)
    per_page = data.draw(st.integers(1, 4))
    columns = -(-MAX_TOKENS // ratio) // per_page + 1
    table = torch.tensor(data.draw(st.permutations(range(batch * columns)))).view(batch, columns)
    table[-1, columns // 2 :] = -1
    start = torch.tensor(data.draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch)))
    scratch = batch * columns * per_page
    places = page_rows(table, per_page, scratch)
    capacity = columns * per_page
    got = plan_groups(positions, ratio, capacity, places, scratch, start)
    plain = plan_groups(positions, ratio, capacity)
    assert got.members.equal(plain.members) and got.start.equal(plain.start)
    for b in range(batch):
        for mine, dense, first in zip(got.write.view(batch, -1)[b], plain.write.view(batch, -1)[b], got.start[b]):
            group = int(dense) - b * capacity
            page = int(table[b, group // per_page]) if dense < batch * capacity and first >= start[b] else -1
            assert int(mine) == (page * per_page + group % per_page if page >= 0 else scratch)
