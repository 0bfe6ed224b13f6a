"""Rows read by index: the same values as decoding everything, and clear errors for indices out of range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dscompile.ops  # noqa: F401 - registers the operations
from dscompile.formats import FORMATS

FORMAT, DIM = "fp4_g16_e4m3", 32


def packed(batch: int, rows: int, seed: int = 0) -> torch.Tensor:
    return FORMATS[FORMAT].pack(torch.randn(batch, rows, DIM, generator=torch.Generator().manual_seed(seed)))


@given(batch=st.integers(1, 3), rows=st.integers(1, 9), picks=st.integers(0, 6), seed=st.integers(0, 99))
def test_gather_equals_decoding_all_rows(batch: int, rows: int, picks: int, seed: int) -> None:
    pool = packed(batch, rows, seed)
    index = torch.randint(-1, rows, (batch, picks), generator=torch.Generator().manual_seed(seed))
    out = torch.ops.dsv4.gather_rows(pool, index, FORMAT, DIM, torch.float32)
    everything = FORMATS[FORMAT].unpack(pool, DIM)
    for b in range(batch):
        for k in range(picks):
            i = int(index[b, k])
            assert torch.equal(out[b, k], everything[b, i] if i >= 0 else torch.zeros(DIM))


@given(batch=st.integers(1, 3), rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_unpack_used_decodes_up_to_the_last_named_row(batch: int, rows: int, seed: int) -> None:
    pool = packed(batch, rows, seed)
    index = torch.randint(-1, rows, (batch, 2, 3), generator=torch.Generator().manual_seed(seed))
    out = torch.ops.dsv4.unpack_used(pool, index, FORMAT, DIM, torch.float32)
    everything = FORMATS[FORMAT].unpack(pool, DIM)
    for b in range(batch):
        used = int(index[b].max()) + 1
        assert torch.equal(out[b, :used], everything[b, :used])
        assert not out[b, used:].any()


def test_no_rows_and_no_picks() -> None:
    none = torch.ops.dsv4.gather_rows(packed(2, 0), torch.full((2, 3), -1), FORMAT, DIM, torch.bfloat16)
    assert none.shape == (2, 3, DIM) and not none.any()
    assert torch.ops.dsv4.unpack_used(packed(2, 4), torch.zeros(2, 0, 3).long(), FORMAT, DIM, torch.float32).eq(0).all()


@pytest.mark.parametrize("bad", [-2, 4, 2**40])
def test_out_of_range_is_an_error(bad: int) -> None:
    with pytest.raises(IndexError, match=r"range of indices.*allowed: -1 \.\. 3"):
        torch.ops.dsv4.gather_rows(packed(1, 4), torch.tensor([[0, bad]]), FORMAT, DIM, torch.float32)
    with pytest.raises(IndexError, match="range of indices"):
        torch.ops.dsv4.unpack_used(packed(1, 4), torch.tensor([[[0, bad]]]), FORMAT, DIM, torch.float32)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="batch of indices"):
        torch.ops.dsv4.gather_rows(packed(2, 4), torch.zeros(3, 1).long(), FORMAT, DIM, torch.float32)
    with pytest.raises(ValueError, match="shape of rows"):
        torch.ops.dsv4.gather_rows(packed(2, 4), torch.zeros(2, 1).long(), FORMAT, 64, torch.float32)
