"""Rows read by index: bit-equal to the reference, nothing read out of range."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.templates.cpu.gather import gather_rows, unpack_used

DIM = 64


def packed(batch: int, rows: int, format: str) -> torch.Tensor:
    return FORMATS[format].pack(torch.randn(batch, rows, DIM))


@pytest.mark.parametrize("format", ["fp4_g16_e4m3", "fp8_g32_ue8m0", "fp4_g32_ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bit_equal(check: Callable[..., Any], format: str, dtype: torch.dtype) -> None:
    for batch, rows, tokens, picks in ((1, 1, 1, 1), (2, 9, 1, 5), (3, 40, 4, 7), (2, 5, 0, 3), (2, 5, 3, 0)):
        pool = packed(batch, rows, format)
        indices = torch.randint(-1, rows, (batch, tokens, picks))
        check(unpack_used, pool, indices, format, DIM, dtype, rtol=0.0, atol=0.0)
        if tokens == 1:
            check(gather_rows, pool, indices[:, 0], format, DIM, dtype, rtol=0.0, atol=0.0)


def test_a_view_of_a_flat_pool(check: Callable[..., Any]) -> None:
    flat = packed(1, 21, "fp4_g16_e4m3")[0]
    pool = flat[:-1].unflatten(0, (2, 10))
    check(gather_rows, pool, torch.tensor([[0, 9], [-1, 3]]), "fp4_g16_e4m3", DIM, torch.bfloat16)
    check(unpack_used, pool, torch.tensor([[[0, 4]], [[-1, -1]]]), "fp4_g16_e4m3", DIM, torch.bfloat16)


@pytest.mark.parametrize("bad", [-2, 9, 2**40])
def test_out_of_range_is_refused(bad: int) -> None:
    with pytest.raises(IndexError, match="range of indices"):
        gather_rows(packed(1, 9, "fp4_g16_e4m3"), torch.tensor([[bad]]), "fp4_g16_e4m3", DIM, torch.float32)
    with pytest.raises(IndexError, match="range of indices"):
        unpack_used(packed(1, 9, "fp4_g16_e4m3"), torch.tensor([[[bad]]]), "fp4_g16_e4m3", DIM, torch.float32)
