"""Quantised rows and their stores in a compiled function (cases R01 to R05)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.formats import FORMATS
from support.quant import ix4, kv4

NAN = float("nan")
ROWS, WIDTH = 16, 64
TIES = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]
ROUNDED = [6, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, 0]


class StoreAndLoad:
    """Rows packed, written to a pool, and the whole pool read back."""

    def __init__(self, format: str) -> None:
        self.format = FORMATS[format]

    def __call__(self, pool: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        pool.index_put_((slots,), self.format.pack(x))
        return self.format.unpack(pool, WIDTH, torch.float32)

    def pool(self, fill: int = 0) -> Tensor:
        return torch.full((ROWS, self.format.row_bytes(WIDTH)), fill, dtype=torch.uint8)


@pytest.fixture(scope="module", params=["fp4_g16_e4m3", "fp4_g32_ue8m0", "fp8_g32_ue8m0"])
def stored(request: pytest.FixtureRequest, dsv4: Callable[..., Any]) -> tuple[StoreAndLoad, Any]:
    eager = StoreAndLoad(request.param)
    return eager, dsv4(eager, dynamic=False)


def both(stored: tuple[StoreAndLoad, Any], x: Tensor, slots: Tensor) -> Tensor:
    """The loaded rows of the compiled run, after its pool and values were found equal to eager's bit for bit."""
    eager, compiled = stored
    pools = eager.pool(17), eager.pool(17)
    want, got = eager(pools[0], x, slots), compiled(pools[1], x, slots)
    assert pools[0].equal(pools[1])
    same = (got == want) | (got.isnan() & want.isnan())
    assert same.all() and got.signbit().equal(want.signbit())
    report = compiled.report.graphs[-1]
    assert report.counts() == {"quant": 2, "store": 1}, report.pattern_counts()
    return got


def rows_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """x padded to all rows of the pool, and slots: one shape for every test."""
    filled = torch.ones(ROWS, WIDTH)
    filled[: len(x)] = x
    return filled, torch.arange(ROWS)


def test_ties_go_to_the_even_code_and_zero_keeps_its_sign(stored: tuple[StoreAndLoad, Any]) -> None:
    """R01. Every group scaled by a power of two, so that the midpoints stay midpoints."""
    x = torch.tensor(TIES * 4) * torch.tensor([1.0, 0.25, 4.0, 64.0])[:, None, None].expand(4, 1, 1).flatten(1)
    got = both(stored, *rows_of(x))[:4]
    if stored[0].format.name.startswith("fp4"):
        want = torch.tensor(ROUNDED * 4) * torch.tensor([1.0, 0.25, 4.0, 64.0])[:, None]
        assert got.equal(want) and got.signbit().equal(want.signbit())


def test_values_are_divided_by_the_scale_that_is_stored(stored: tuple[StoreAndLoad, Any]) -> None:
    """R02. Against plain formulas of the two FP4 formats; 14 times the error if the exact scale divides."""
    x = torch.randn(ROWS, WIDTH) * torch.logspace(-3, 3, ROWS)[:, None]
    x[0] = 0
    x[0, 0], x[1, 32], x[2, 16], x[3, :16] = 6.4, 6.0001, 0.02, torch.tensor([1.0, 2, 3, 4] * 4)
    got = both(stored, *rows_of(x))
    plain = {"fp4_g16_e4m3": kv4, "fp4_g32_ue8m0": ix4}.get(stored[0].format.name)
    if plain is not None:
        assert got.equal(plain(x))
    assert (got - x).norm() / x.norm() < 0.13


def test_garbage_stays_in_its_row_and_group(stored: tuple[StoreAndLoad, Any]) -> None:
    """R03. Rows of NaN, one NaN inside a row, an infinity: everything else is bitwise what it is without them."""
    x = torch.randn(8, WIDTH)
    clean = both(stored, *rows_of(x))
    x[5:] = NAN
    x[1, 40], x[2, 0] = NAN, float("inf")
    got = both(stored, *rows_of(x))
    group = stored[0].format.group
    touched = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    touched[5:8] = True
    touched[1, 40 // group * group : 40 // group * group + group] = True
    touched[2, :group] = True
    assert got[~touched].equal(clean[~touched])
    assert got[5:8].isnan().all() and got[1, 40 // group * group].isnan()


def test_a_plain_rounding_that_is_no_known_spelling_is_left_alone(dsv4: Callable[..., Any]) -> None:
    """The formula of the tests is written in another way than the formats': not recognised, so not changed."""
    x = torch.tensor(TIES) * 2
    compiled = dsv4(kv4)
    assert compiled(x).equal(torch.tensor(ROUNDED) * 2)
    assert "quant" not in compiled.counts


# -- stores: padding and bounds ----------------------------------------------------------------------------------------


def guarded(dtype: torch.dtype = torch.float32, width: int = 8) -> tuple[Tensor, Tensor]:
    """A pool between two guard rows, and the buffer around it."""
    buffer = torch.arange((ROWS + 2) * width).view(-1, width).remainder(97).to(dtype)
    return buffer[1:-1], buffer


def put(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    pool[slots] = rows
    return pool[3] + 1


def put_masked(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Padding (-1) goes to the last row, which is scratch."""
    pool[torch.where(slots >= 0, slots, pool.shape[0] - 1)] = rows
    return pool[3] + 1


def put_chosen(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Padding is cut out before the store: sizes that depend on data."""
    pool[slots[slots >= 0]] = rows[slots >= 0]
    return pool[3] + 1


def put_blocks(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Blocks along the second axis, the same places in every sequence: pool [2, ROWS / 2, 2, 4]."""
    pool[:, slots] = rows
    return pool[0, 3] + 1


@pytest.fixture(scope="module", params=[put, put_masked, put_chosen])
def store(request: pytest.FixtureRequest, dsv4: Callable[..., Any]) -> tuple[Callable[..., Tensor], Any]:
    return request.param, dsv4(request.param, dynamic=False)


@pytest.mark.parametrize("slots", [[3, -1, 5, -1], [0, 1, 2, 3], [-1, -1, -1, -1], [14, 3, 0, -1]])
def test_padding_writes_what_eager_writes(store: tuple[Callable[..., Tensor], Any], slots: list[int]) -> None:
    """R04. A plain store writes -1 to the last row, as Python does; a masked one to its scratch row; all else stays."""
    eager, compiled = store
    rows = torch.randn(4, 8)
    (mine, around), (theirs, _) = guarded(), guarded()
    padding = torch.tensor(slots) < 0
    if eager is put:
        rows[padding] = rows[padding][-1:]  # which of several equal slots wins is nobody's promise
    else:
        rows[padding] = NAN
    before = around.clone()
    want, got = eager(theirs, rows, torch.tensor(slots)), compiled(mine, rows, torch.tensor(slots))
    assert mine.nan_to_num(5.5).equal(theirs.nan_to_num(5.5)) and got.nan_to_num(5.5).equal(want.nan_to_num(5.5))
    kept = torch.ones(ROWS + 2, dtype=torch.bool)
    kept[[1 + slot for slot in slots if slot >= 0]] = False
    if eager is not put_chosen:
        kept[ROWS] = False  # where -1 and scratch are
        assert compiled.counts == {"store": 1}
    assert around[kept].equal(before[kept])


BAD = (ROWS, ROWS + 1, 2**31 + 3, 2**32 + 5, 2**40 + 17, -ROWS - 1, -ROWS - 2, -(2**40))


def test_a_slot_out_of_range_is_an_error_and_no_write(dsv4: Callable[..., Any]) -> None:
    """R05. Eager raises IndexError; so does the compiled form, for every width of the number."""
    compiled = dsv4(put, dynamic=False)
    for bad in BAD:
        (mine, around), (theirs, _) = guarded(), guarded()
        before = around.clone()
        slots = torch.tensor([15, bad])
        with pytest.raises(IndexError):
            put(theirs, torch.ones(2, 8), slots)
        with pytest.raises(IndexError, match=f"slots is {bad};"):
            compiled(mine, torch.ones(2, 8), slots)
        assert around.equal(before)
    compiled(mine, torch.full((2, 8), 7.0), torch.tensor([15, -ROWS]))
    before[[ROWS, 1]] = 7.0
    assert around.equal(before) and compiled.counts == {"store": 1}


def test_a_block_out_of_range_does_not_reach_another_sequence(dsv4: Callable[..., Any]) -> None:
    """R05. Places of one sequence lie behind those of the other: the bound is that of the sequence."""
    compiled, places = dsv4(put_blocks, dynamic=False), ROWS // 2
    for bad in (places, places + 3, ROWS, -places - 1, -places - 3, 2**40 + 1, -(2**40)):
        mine, around = guarded()
        before = around.clone()
        with pytest.raises(IndexError):
            put_blocks(guarded()[0].view(2, places, 2, 4), torch.ones(2, 2, 2, 4), torch.tensor([3, bad]))
        with pytest.raises(IndexError):
            compiled(mine.view(2, places, 2, 4), torch.ones(2, 2, 2, 4), torch.tensor([3, bad]))
        assert around.equal(before)
    compiled(mine.view(2, places, 2, 4), torch.ones(2, 2, 2, 4), torch.tensor([3, -1]))
    before[[1 + 3, places, 1 + places + 3, ROWS]] = 1.0
    assert around.equal(before) and compiled.counts == {"store": 1}
