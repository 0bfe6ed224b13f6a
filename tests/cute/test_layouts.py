"""Layouts as functions: the arrangement of scale factors against its definition, one byte at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.templates.cute import layouts


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_every_scale_lies_where_it_should(row_blocks: int, group_blocks: int, matrices: int) -> None:
    rows, groups = 128 * row_blocks, 4 * group_blocks
    scales = torch.randint(0, 256, (matrices, rows, groups), dtype=torch.uint8)
    arranged = layouts.arranged_scales(scales)
    assert arranged.shape == (matrices, row_blocks, group_blocks, 32, 4, 4) and arranged.is_contiguous()
    for matrix, flat in zip(scales, arranged.flatten(1)):
        for row in range(0, rows, 13):
            for group in range(groups):
                assert flat[layouts.scale_offset(row, group, groups)] == matrix[row, group]
    assert torch.equal(layouts.restored_scales(arranged), scales)


def test_offsets_are_a_permutation() -> None:
    places = [layouts.scale_offset(row, group, 8) for row in range(256) for group in range(8)]
    assert sorted(places) == list(range(256 * 8))


def test_four_scales_of_a_row_are_a_word() -> None:
    """What lets a kernel store them at once."""
    for row in range(128):
        first = layouts.scale_place(row, 0)
        assert first % 4 == 0 and [layouts.scale_place(row, g) for g in range(4)] == list(range(first, first + 4))


@pytest.mark.parametrize("shape", [(100, 4), (128, 6), (0, 3)])
def test_other_sizes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="allowed: multiples of 128 and 4"):
        layouts.arranged_scales(torch.zeros(shape, dtype=torch.uint8))


def test_widened_codes() -> None:
    places = [layouts.unpacked_place(column) for column in range(128)]
    assert len(set(places)) == 128 and places[:3] == [(0, 0), (0, 4), (1, 0)] and places[16] == (16, 0)
    assert all(byte % 16 < 8 and byte < 128 for byte, _ in places)


@pytest.mark.parametrize(("used", "allocated"), [(1, 32), (32, 32), (33, 64), (76, 128), (268, 512), (512, 512)])
def test_tensor_memory(used: int, allocated: int) -> None:
    assert layouts.tensor_memory_columns(used) == allocated


def test_too_much_tensor_memory() -> None:
    with pytest.raises(ValueError, match="allowed: 512"):
        layouts.tensor_memory_columns(513)
