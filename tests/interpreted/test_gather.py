"""Rows decoded by index, bit for bit what the reference makes of them, and only those rows read."""

import pytest
import torch
from formats.oracle import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.formats.registry import RECORDS
from dscompile.targets import get_target
from dscompile.templates.triton.gather import TEMPLATES
from dscompile.templates.triton.record import config
from support.kernels import reference, runs, spec_of
from support.triton_interpreter import count_traffic

GATHER, USED = TEMPLATES
TARGET = get_target("sm_103a")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
RELEASE = {"fp8_g32_ue8m0": 512, "fp4_g16_e4m3": 512, "fp4_g32_ue8m0": 128, "none": 512}
ROWS = ["none", *(record.name for record in RECORDS if record.page == FORMATS["bf16"].page)]


def packed(name: str, *shape: int) -> Tensor:
    x = torch.randn(shape)
    return x.bfloat16() if name == "none" else FORMATS[name].pack(x)


def same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want))


@settings(max_examples=50)
@given(
    st.sampled_from(ROWS), st.integers(0, 3), st.integers(0, 5), st.integers(0, 7), st.sampled_from(DTYPES),
    st.sampled_from([torch.int64, torch.int32]), st.booleans(),
)  # fmt: skip
def test_equals_the_reference(
    name: str, batch: int, capacity: int, count: int, dtype: torch.dtype, index: torch.dtype, gaps: bool
) -> None:
    dim = 70 if name == "none" or FORMATS[name].is_plain else FORMATS[name].tail + 3 * FORMATS[name].group
    rows = packed(name, batch, capacity + 2, dim)
    rows = rows[:, 1:-1] if gaps else rows[:, :capacity].contiguous()
    indices = torch.randint(-1, capacity, (batch, count + 1)).to(index)
    indices = indices[:, 1:] if gaps else indices[:, :count].contiguous()
    args = (rows, indices, name, dim, dtype)
    for got in runs(GATHER, args, TARGET):
        assert same(got, reference(GATHER, *args))
    args = (rows, indices[:, None], name, dim, dtype)
    for got in runs(USED, args, TARGET):
        assert same(got, reference(USED, *args))


@pytest.mark.parametrize("name", ["fp4_g16_e4m3", "none"])
def test_an_index_out_of_range_is_like_minus_one(name: str) -> None:
    """Also where its low 32 bits would be in range; the guard rows hold NaN that would show."""
    wide = packed(name, 2, 6, 64)
    wide[:, 0] = wide[:, 5] = torch.nan if name == "none" else 0x7F
    rows = wide[:, 1:5]
    bad = torch.tensor([[1, 4, 2**40 + 1, 0, -5, -1, 2**32, -(2**40)]]).expand(2, -1)
    good = torch.where((bad >= 0) & (bad < 4), bad, -1)
    got = next(runs(GATHER, (rows, bad, name, 64, torch.float32), TARGET))
    assert same(got, reference(GATHER, rows, good, name, 64, torch.float32))
    got = next(runs(USED, (rows, bad[:, None], name, 64, torch.float32), TARGET))
    assert same(got, reference(USED, rows, good[:, None], name, 64, torch.float32))


def test_rows_that_are_not_named_may_hold_anything() -> None:
    rows = packed("fp8_g32_ue8m0", 1, 5, 64)
    clean = rows.clone()
    rows[0, 3:] = 0xFF
    for indices in ([[0, 2, -1]], [[1, -1, 1]]):
        for template, shape in ((GATHER, (1, 3)), (USED, (1, 1, 3))):
            args = (torch.tensor(indices).view(shape), "fp8_g32_ue8m0", 64, torch.bfloat16)
            assert same(next(runs(template, (rows, *args), TARGET)), reference(template, clean, *args))


def test_many_indices_are_looked_through_in_parts() -> None:
    """More of them than one program takes, the largest anywhere among them."""
    rows = packed("fp4_g32_ue8m0", 3, 9, 32)
    indices = torch.full((3, 5, 11), -1)
    indices[0, 4, 10], indices[1, 0, 0] = 8, 3
    args = (rows, indices, "fp4_g32_ue8m0", 32, torch.float32)
    got = USED.fn(*args, config=config(1, 1, N=4, BLOCK=16), target=TARGET)
    assert same(got, reference(USED, *args))


@pytest.mark.parametrize("name", RELEASE)
def test_bytes(name: str) -> None:
    """The rows that are named, their indices, the values; of rows behind the last used one nothing is read."""
    dim = RELEASE[name]
    rows, indices = packed(name, 2, 12, dim), torch.stack((torch.randperm(12)[:8], torch.randperm(12)[:8]))
    args = (rows, indices, name, dim, torch.bfloat16)
    with count_traffic() as traffic:
        next(runs(GATHER, args, TARGET))
    cost = spec_of(GATHER).cost_of(*args).numbers()
    assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
    assert traffic.distinct_loaded == cost["read_bytes"]

    used = torch.tensor([[[2, 5, -1]], [[-1, -1, -1]]])
    args = (rows, used, name, dim, torch.bfloat16)
    with count_traffic() as traffic:
        next(runs(USED, args, TARGET))
    row_bytes = rows.shape[2] * rows.element_size()
    assert traffic.distinct_loaded == 6 * row_bytes + 6 * 8 + 2 * 8  # rows, indices, how many
    assert traffic.distinct_stored - spec_of(USED).cost_of(*args).numbers()["write_bytes"] <= 2 * 8
