"""The last program to arrive finds what the others have stored, and leaves the counters as it found them."""

import pytest
import torch
import triton
import triton.language as tl

from dscompile.templates.triton import launching
from dscompile.templates.triton.device.arrival import is_last
from dscompile.templates.triton.launching import counters, launch
from dscompile.templates.triton.record import config


@triton.jit
def total_kernel(x, part, counter, out, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] is the sum of x[row], of which every program adds up BLOCK numbers."""
    row, share = tl.program_id(0), tl.program_id(1)
    at = row * PROGRAMS + share
    tl.store(part + at, tl.sum(tl.load(x + at * BLOCK + tl.arange(0, BLOCK))))
    if is_last(counter + row, PROGRAMS):
        tl.store(out + row, tl.sum(tl.load(part + row * PROGRAMS + tl.arange(0, PROGRAMS))))


@pytest.mark.parametrize("rows", [1, 3])
def test_the_last_one_adds_up(rows: int) -> None:
    x = torch.arange(rows * 64, dtype=torch.float32).view(rows, 64)
    zeros = counters(x, rows)
    for _ in range(2):  # the second time with what the first left in the counters
        part, out = torch.full((rows, 8), torch.nan), torch.full((rows,), torch.nan)
        launch(total_kernel, (rows, 8), x, part, zeros, out, config=config(1, 1), PROGRAMS=8, BLOCK=8)
        assert torch.equal(out, x.sum(1)) and not zeros.any()


def test_captured_launches_keep_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken from what was set aside; when that is used up, new ones."""
    left = torch.zeros(10, dtype=torch.int32)
    monkeypatch.setattr(launching, "_reserve", {0: [left]})
    like = torch.zeros(1)
    first, second, third = (launching._take(0, count, like) for count in (4, 5, 2))
    assert [t.numel() for t in (first, second, third)] == [4, 5, 2]
    spans = [(t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in (first, second)]
    assert spans[0][0] == left.data_ptr() and spans[0][1] == spans[1][0]
    assert not left.data_ptr() <= third.data_ptr() < left.data_ptr() + 40
    assert launching._take(1, 3, like).numel() == 3
