"""The last program to arrive finds what the others have stored, and leaves the counters as it found them."""

import pytest
import torch
import triton
import triton.language as tl

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
