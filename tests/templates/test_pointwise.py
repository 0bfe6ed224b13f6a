"""RoPE, pooling, Engram."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dscompile.templates.cpu.compress import compress
from dscompile.templates.cpu.engram import engram_gate, engram_gather
from dscompile.templates.cpu.norm import rope

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_exact(check: Callable[..., Any], dtype: torch.dtype) -> None:
    for shape, lead, half in (
        ((2, 5, 3, 64), (2, 5, 1), 16),  # heads after tokens
        ((2, 3, 5, 64), (2, 1, 5), 32),  # heads before tokens
        ((7, 20), (7,), 3),
        ((4, 6, 16), (), 5),  # one row for all
        ((9, 16), (9,), 0),
        ((0, 3, 16), (0, 1), 4),
        ((2, 2, 2, 3, 34), (2, 1, 2, 1), 17),
    ):
        x, angle = torch.randn(shape).to(dtype), torch.rand(*lead, half) * 6
        for inverse in (False, True):
            check(rope, x, angle.cos(), angle.sin(), inverse, rtol=0, atol=0)
            check(rope, x, angle.cos().to(dtype), angle.sin().to(dtype), inverse, rtol=0, atol=0)
    x, angle = torch.randn(2, 5, 3, 64).to(dtype).transpose(1, 2), torch.rand(2, 1, 5, 8)
    check(rope, x, angle.cos(), angle.sin(), False, rtol=0, atol=0)


def test_rope_refuses_a_wider_rotation() -> None:
    with pytest.raises(ValueError, match="cos"):
        rope(torch.randn(3, 8), torch.rand(3, 5), torch.rand(3, 5), False)
    with pytest.raises(ValueError, match="cos"):
        rope(torch.randn(3, 8), torch.rand(2, 4), torch.rand(2, 4), False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compress(check: Callable[..., Any], dtype: torch.dtype, overlap: bool) -> None:
    for batch, groups, ratio, channels in ((1, 3, 4, 64), (2, 5, 2, 36), (2, 1, 128, 48), (2, 0, 4, 32), (1, 2, 1, 16)):
        kv, gate = (
            torch.randn(batch, groups, ratio, channels).to(dtype),
            torch.randn(batch, groups, ratio, channels) * 3,
        )
        ape32 = torch.randn(ratio, channels)
        for gates, ape in ((gate, ape32), (gate.to(dtype), ape32.to(dtype)), (gate.to(dtype), ape32), (gate, None)):
            check(compress, kv, gates, ape, None, None, overlap)
            if overlap:
                prior = torch.randn(batch, ratio, channels // 2)
                check(compress, kv, gates, ape, prior.to(dtype), prior * 2, True)
                check(compress, kv, gates, ape, prior, torch.full_like(prior, -torch.inf), True)
    kv = torch.randn(2, 6, 4, 32).to(dtype).transpose(1, 2)
    check(compress, kv, kv, None, None, None, overlap)


def test_engram_gather(check: Callable[..., Any]) -> None:
    for width, group in ((256, 32), (40, 20), (64, 64)):
        table = torch.randint(0, 256, (50, width)).to(torch.uint8)
        scales = torch.randint(100, 140, (50, width // group)).to(torch.uint8)
        scales[3, 0], scales[4, 0] = 0, 255
        rows = torch.randint(0, 50, (3, 5, 6))
        rows[0, 0, :2] = torch.tensor([3, 4])
        for dtype in DTYPES:
            check(engram_gather, table, scales, rows, dtype)
            check(engram_gather, table.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), rows.int(), dtype)
    for bad in (50, -1, 2**40):
        with pytest.raises(IndexError, match="rows"):
            engram_gather(table, scales, torch.tensor([0, bad]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_engram_gate(check: Callable[..., Any], dtype: torch.dtype) -> None:
    for n, width in ((4, 64), (1, 37)):
        streams, key = torch.randn(2, 5, n, width).to(dtype), torch.randn(2, 5, n, width).to(dtype)
        value, q, k = torch.randn(2, 5, width).to(dtype), torch.randn(n, width), torch.randn(n, width).to(dtype)
        streams[0, 0] = 0
        for mask in (None, torch.rand(2, 5) < 0.5):
            check(engram_gate, streams, key, value, q, k, mask, 1e-20)
        check(engram_gate, streams, key.float(), value, q, k, None, 1e-6)
