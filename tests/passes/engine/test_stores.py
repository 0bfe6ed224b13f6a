"""Replacements that write: what has to be so, and where they go among what reads the pool."""

from __future__ import annotations

import torch

import dscompile.ops  # noqa: F401  (registers torch.ops.dsv4)
from dscompile.passes.engine import Pattern
from dscompile.passes.engine.graphs import find
from support.patterns import apply, reason

aten = torch.ops.aten
dsv4 = torch.ops.dsv4

STORE = Pattern(
    "store", "store_rows", "toy",
    lambda pool, rows, slots: aten.index_put(pool, [slots], rows * 2),
    lambda pool, rows, slots: (dsv4.store_rows(pool, rows * 2, slots), pool)[1],
    {"pool": "f32[S R]", "rows": "f32[N R]", "slots": "i64[N]"}, key=aten.index_put.default,
)  # fmt: skip
POOL = (torch.zeros(6, 4), torch.randn(2, 4), torch.tensor([1, 4]))


def test_store_becomes_a_write():
    def fn(pool, rows, slots):
        pool[slots] = rows * 2
        return pool.sum() + 1

    gm, result = apply(STORE, fn, *POOL)
    assert result.counts == {"store_rows": 1}
    order = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert aten.copy_.default not in order
    assert order.index(dsv4.store_rows.default) < order.index(aten.sum.dim_IntList)


def test_two_stores_into_one_pool_keep_their_order():
    def fn(pool, rows, slots):
        pool[slots] = rows * 2
        middle = pool.sum(1)
        pool[slots + 1] = rows.exp() * 2
        return middle, pool.sum(1)

    gm, result = apply(STORE, fn, *POOL)
    assert result.counts == {"store_rows": 2}
    order = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    stores = [i for i, t in enumerate(order) if t is dsv4.store_rows.default]
    assert stores[0] < order.index(aten.sum.dim_IntList) < stores[1]


def test_store_through_a_view_of_the_pool():
    def fn(pool, rows, slots):
        pool.view(12, 4)[slots] = rows * 2
        return pool.sum()

    gm, result = apply(STORE, fn, torch.zeros(2, 6, 4), *POOL[1:])
    assert result.counts == {"store_rows": 1} and not find(gm.graph, aten.copy_.default)


def test_a_later_read_of_the_old_pool_refuses_the_store():
    def fn(pool, rows, slots):
        new = aten.index_put(pool, [slots], rows * 2)
        old = (pool * 3).sum()
        pool.copy_(new)
        return old

    _, result = apply(STORE, fn, *POOL)
    assert "reads pool as it was before the store" in reason(result)


def test_a_pool_that_is_not_written_back_is_not_written():
    _, result = apply(STORE, lambda pool, rows, slots: aten.index_put(pool, [slots], rows * 2) + 1, *POOL)
    assert "not written back" in reason(result)
    _, result = apply(STORE, lambda pool, rows, slots: aten.index_put(pool + 1, [slots], rows * 2), *POOL)
    assert "no graph input" in reason(result)


# -- among what reads the pool as it was ---------------------------------------------------------------------------


def _search(pool, rows, slots):
    rows = rows * 2
    return aten.index_put(pool, [slots], rows), rows


def _replace(pool, rows, slots):
    rows = rows * 2
    dsv4.store_rows(pool, rows, slots)
    return pool, rows


STORE_ROWS = Pattern(
    "store", "store_rows", "toy", _search, _replace, {"pool": "f32[S R]", "rows": "f32[N R]", "slots": "i64[N]"},
    key=aten.index_put.default,
)  # fmt: skip


def test_the_rows_are_used_before_the_old_pool_is_read() -> None:
    """The store goes where it stood, and the use behind it."""

    def fn(pool, rows, slots):
        rows = rows * 2
        early = rows + 1
        old = pool[slots]
        pool[slots] = rows
        return torch.where(early > 0, early, old), rows

    gm, result = apply(STORE_ROWS, fn, *POOL)
    assert result.counts == {"store_rows": 1} and not find(gm.graph, aten.copy_.default)


def test_what_reads_the_old_pool_by_the_rows_does_not_move_behind_the_store() -> None:
    def fn(pool, rows, slots):
        rows = rows * 2
        old = pool[(rows.sum(1) > 0).long() + 1]
        pool[slots] = rows
        return old, rows

    _, result = apply(STORE_ROWS, fn, *POOL)
    assert "reads pool as it was before the store" in reason(result)


def test_inputs_that_come_late_do_not_help() -> None:
    """The slots are known only behind the read: the store would go last, and the read with it."""

    def fn(pool, rows, slots):
        rows = rows * 2
        old = pool[(rows.sum(1) > 0).long() + 1]
        pool[slots + 1 - 1 * (slots > 9).long()] = rows
        return old, rows

    _, result = apply(STORE_ROWS, fn, *POOL)
    assert "reads pool as it was before the store" in reason(result)
