"""The indexer: exact choices on integer scores (many ties), visibility, candidates."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.templates.cpu.index_topk import index_topk, index_topk_candidates

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(batch: int, tokens: int, heads: int, dim: int, rows: int, dtype: torch.dtype, low: int = -2) -> list[Tensor]:
    """Small integers: every sum is exact, so ties are ties for every order of summation."""
    q = torch.randint(low, 3, (batch, tokens, heads, dim)).to(dtype)
    keys = torch.randint(low, 3, (batch, rows, dim)).to(dtype)
    weights = torch.randint(-2, 4, (batch, tokens, heads)).to(dtype)
    return [q, keys, weights, torch.randint(-2, rows + 3, (batch, tokens))]


@pytest.mark.parametrize("format", ["none", "fp4_g32_ue8m0", "fp8_g32_ue8m0"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "rows", "k"),
    [
        (2, 7, 3, 32, 37, 5),
        (1, 1, 32, 128, 100, 64),
        (2, 33, 16, 64, 70, 20),
        (1, 3, 5, 24, 9, 30),
        (3, 1, 64, 32, 4500, 8),
    ],
)
def test_choices_are_exact(
    check: Callable[..., Any], batch: int, tokens: int, heads: int, dim: int, rows: int, k: int, dtype: torch.dtype,
    format: str,
) -> None:  # fmt: skip
    if format != "none" and dim % 32:
        pytest.skip("no whole groups")
    q, keys, weights, visible = case(batch, tokens, heads, dim, rows, dtype)
    if format != "none":
        keys = FORMATS[format].pack(keys)
    for candidates in (None, torch.rand(batch, tokens, rows) < 0.5):
        for ascending, newest in itertools.product((True, False), repeat=2):
            check(index_topk, q, keys, weights, visible, candidates, k, 0.125, format, ascending, newest)
    for blocks, size in ((3, 8), (1, 1), (1000, 4)):
        for newest in (True, False):
            check(index_topk_candidates, q, keys, weights, visible, k, 0.125, format, True, blocks, size, newest)


def test_all_scores_equal(fast: Callable[..., Any]) -> None:
    """Case R11: 8,320 rows, 100 of them positive, the rest tied at zero, k = 2,048."""
    for dtype in DTYPES:
        q, keys = torch.ones(1, 1, 2, 32).to(dtype), torch.zeros(1, 8320, 32).to(dtype)
        good = torch.randperm(8320)[:100].sort().values
        keys[0, good] = 1
        weights, visible = torch.ones(1, 1, 2).to(dtype), torch.tensor([[8320]])
        out = fast(index_topk, q, keys, weights, visible, None, 2048, 1.0, "none", False)[0, 0]
        rest = torch.tensor([i for i in range(8320) if i not in set(good.tolist())])
        assert torch.equal(out, torch.cat((good, rest[:1948])))
        ascending = fast(index_topk, q, keys, weights, visible, None, 2048, 1.0, "none", True)[0, 0]
        assert torch.equal(ascending, out.sort().values)


@pytest.mark.parametrize("lengths", [[9, 0, -1, 1], [0] * 32, [0] * 33, [-(2**40), 2**40]])
def test_lengths_of_padded_batches(check: Callable[..., Any], lengths: list[int]) -> None:
    """Case R13."""
    for dtype in DTYPES:
        q, keys, weights, _ = case(len(lengths), 1, 4, 32, 9, dtype)
        visible = torch.tensor(lengths)[:, None]
        out = check(index_topk, q, keys, weights, visible, None, 4, 1.0, "none", True)
        for row, length in zip(out[:, 0], lengths, strict=True):
            assert (row >= 0).sum() == min(max(length, 0), 4)
        alone = check(index_topk, q[:1], keys[:1], weights[:1], visible[:1], None, 4, 1.0, "none", True)
        assert torch.equal(alone[0], out[0])


def test_rows_that_are_not_visible_may_hold_anything(fast: Callable[..., Any]) -> None:
    for dtype in DTYPES:
        q, keys, weights, _ = case(1, 6, 4, 32, 70, dtype)
        visible, candidates = torch.tensor([[5, 20, 33, 40, 41, 60]]), torch.rand(1, 6, 70) < 0.6
        candidates[:, :, 7] = False
        clean = fast(index_topk, q, keys, weights, visible, candidates, 9, 1.0, "none", True)
        keys[:, 60:], keys[:, 7] = torch.nan, torch.nan
        assert torch.equal(fast(index_topk, q, keys, weights, visible, candidates, 9, 1.0, "none", True), clean)


def test_nan_scores_come_first(check: Callable[..., Any]) -> None:
    for dtype in DTYPES:
        q, keys, weights, _ = case(1, 2, 4, 32, 40, dtype)
        keys[:, 11] = torch.nan
        check(index_topk, q, keys, weights, torch.tensor([[12, 40]]), None, 5, 1.0, "none", False)


def test_no_rows_and_one_row(check: Callable[..., Any]) -> None:
    for rows in (0, 1):
        q, keys, weights, visible = case(2, 3, 4, 32, rows, torch.bfloat16)
        index_topk(q, keys, weights, visible, None, 5, 1.0, "none", True)
        if rows:
            check(index_topk, q, keys, weights, visible, None, 5, 1.0, "none", True)
            check(index_topk_candidates, q, keys, weights, visible, 5, 1.0, "none", True, 2, 4)


def test_strides_and_dtypes(check: Callable[..., Any]) -> None:
    q, keys, weights, visible = case(2, 9, 4, 32, 40, torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    keys = torch.cat((keys, keys), 2)[:, :, :32]
    check(index_topk, q, keys, weights.float(), visible.int(), None, 7, 0.5, "none", False)
    check(index_topk, q, keys.float(), weights, visible, None, 7, 0.5, "none", False)
    check(index_topk, q.float(), keys, weights, visible, None, 7, 0.5, "none", False)


def test_random_scores_agree_but_for_near_ties(fast: Callable[..., Any], reference: Callable[..., Any]) -> None:
    q, keys = torch.randn(1, 50, 32, 64).to(torch.bfloat16), torch.randn(1, 300, 64).to(torch.bfloat16)
    weights, visible = torch.randn(1, 50, 32), torch.arange(50).mul(7)[None]
    args = (q, keys, weights, visible, None, 40, 0.1, "none", True)
    got, want = fast(index_topk, *args), reference("index_topk", *args)
    assert (got == want).float().mean() > 0.99
