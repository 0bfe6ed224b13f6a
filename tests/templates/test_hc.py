"""Hyper-connections: kernels against their references, and what must not leak between tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.templates.cpu import hc

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mixes(n: int, dim: int, rows: int, scales: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, n * dim) / (n * dim) ** 0.5, torch.rand(scales) + 0.5, torch.randn(rows)


@pytest.mark.parametrize(
    ("n", "dim", "dtype"),
    [
        *((4, 64, dtype) for dtype in DTYPES),
        *((n, dim, torch.float32) for n, dim in ((2, 112), (3, 37), (1, 16), (8, 20))),
    ],
)
def test_pre(check: Callable[..., Any], n: int, dim: int, dtype: torch.dtype) -> None:
    fn, scale, base = mixes(n, dim, n * (n + 2), 3)
    for tokens in ((0,), (1,), (2, 9), (37,), (3, 25)):
        streams = torch.randn(*tokens, n, dim).to(dtype)
        for pre_in, weight, first in ((None, torch.rand(dim), True), (torch.rand(*tokens, n), None, False)):
            check(hc.hc_pre, streams, fn, scale, base, pre_in, weight, 1e-6, 1e-6, 20, 1e-6, first)


@pytest.mark.parametrize("iters", [1, 2, 7, 50])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_sinkhorn(check: Callable[..., Any], n: int, iters: int) -> None:
    check(hc.sinkhorn, torch.randn(21, n, n) * 3, iters, 1e-6, rtol=1e-5, atol=1e-6)
    check(hc.sinkhorn, torch.randn(2, 3, n, n).to(torch.bfloat16), iters, 1e-6, rtol=1e-5, atol=1e-6)


def test_sinkhorn_of_masked_and_large_logits(check: Callable[..., Any]) -> None:
    logits = torch.randn(3, 4, 4) * 50
    logits[0, 1, 2] = -torch.inf
    logits[1, 0] = 80.0
    check(hc.sinkhorn, logits, 20, 1e-6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_post(check: Callable[..., Any], dtype: torch.dtype, wide: bool) -> None:
    for n, dim in ((4, 64), (4, 37)):
        for tokens in ((0,), (1,), (2, 17)):
            y, streams = torch.randn(*tokens, dim).to(dtype), torch.randn(*tokens, n, dim).to(dtype)
            check(hc.hc_post, y, streams, torch.rand(*tokens, n) * 2, torch.rand(*tokens, n, n), wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head(check: Callable[..., Any], dtype: torch.dtype) -> None:
    fn, scale, base = mixes(4, 48, 4, 1)
    check(hc.hc_head, torch.randn(3, 5, 4, 48).to(dtype), fn, scale, base, 1e-6, 1e-6)


def test_permuted_streams_and_narrow_parameters(check: Callable[..., Any]) -> None:
    fn, scale, base = mixes(4, 32, 24, 3)
    streams = torch.randn(4, 7, 32).transpose(0, 1)
    check(
        hc.hc_pre, streams, fn.half(), scale.half(), base.half(), None, torch.rand(32).half(), 1e-6, 1e-6, 5, 1e-6, True
    )
    check(hc.hc_post, torch.randn(32, 7).t(), streams, torch.rand(4, 7).t(), torch.rand(7, 4, 4).transpose(1, 2), True)


def test_products_on_tiles_are_those_of_fp32(fast: Callable[..., Any]) -> None:
    """Against float64: as close as an fp32 product, although the tiles multiply bf16."""
    fn, scale, base = mixes(4, 256, 24, 3)
    fn *= torch.exp2(torch.randint(-12, 12, fn.shape).float())
    streams = torch.randn(80, 4, 256).to(torch.bfloat16)
    args = (fn, scale, base, None, None, 1e-6, 1e-6, 20, 1e-6, False)
    flat = streams.flatten(1).double()
    mix = flat @ fn.double().t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    want = torch.sigmoid(mix[:, :4] * scale[0] + base[:4]) + 1e-6
    torch.testing.assert_close(fast(hc.hc_pre, streams, *args)[1].double(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("count", "dtype"), [(19, torch.float32), (70, torch.bfloat16)])
def test_one_bad_token_stays_alone(fast: Callable[..., Any], count: int, dtype: torch.dtype) -> None:
    """Sixteen tokens share vector lanes; NaN and infinity in one of them must not reach another."""
    fn, scale, base = mixes(4, 32, 24, 3)
    streams = torch.randn(count, 4, 32).to(dtype)
    dirty = streams.clone()
    dirty[3], dirty[7, 1, 5] = torch.nan, torch.inf
    keep = [t for t in range(count) if t not in (3, 7)]
    args = (fn, scale, base, None, torch.rand(32), 1e-6, 1e-6, 20, 1e-6, True)
    for clean, touched in zip(fast(hc.hc_pre, streams, *args), fast(hc.hc_pre, dirty, *args), strict=True):
        assert torch.equal(clean[keep], touched[keep])
        assert touched[3].isnan().any()


def test_bad_shapes_are_refused_by_name() -> None:
    fn, scale, base = mixes(4, 32, 24, 3)
    with pytest.raises(ValueError, match="shape of fn"):
        hc.hc_pre(torch.randn(2, 4, 32), fn[:, 1:], scale, base, None, None, 1e-6, 1e-6, 20, 1e-6, True)
    with pytest.raises(ValueError, match="shape of comb"):
        hc.hc_post(torch.randn(2, 32), torch.randn(2, 4, 32), torch.rand(2, 4), torch.rand(2, 4, 3), True)
