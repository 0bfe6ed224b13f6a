"""Router, experts, and the products of few rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.templates.cpu.experts import experts
from dscompile.templates.cpu.linear import MAX_ROWS, few_rows, grouped_output, mm
from dscompile.templates.cpu.router import router

DTYPES = (torch.float32, torch.bfloat16)


def weights_of(count: int, dim: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    w13, w2 = torch.randn(count, 2 * inner, dim) / dim**0.5, torch.randn(count, dim, inner) / inner**0.5
    return w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "k", "count", "dim", "inner"),
    [
        (0, 2, 4, 32, 16),
        (1, 2, 4, 64, 32),
        (7, 3, 5, 37, 21),
        (40, 2, 3, 64, 48),
        (9, 2, 40, 96, 64),
        (150, 2, 2, 64, 96),
        (600, 2, 3, 64, 32),  # blocks of tokens on tiles for bf16
        (300, 1, 2, 48, 32),  # no whole tiles: PyTorch's products
    ],
)
def test_experts(
    check: Callable[..., Any], tokens: int, k: int, count: int, dim: int, inner: int, dtype: torch.dtype, before: bool
) -> None:  # fmt: skip
    w13, w2 = weights_of(count, dim, inner, dtype)
    x, indices = torch.randn(tokens, dim).to(dtype), torch.randint(-1, count, (tokens, k))
    for weight_dtype, limit, out in (
        (torch.float32, 0.7, dtype),
        (dtype, 0.0, torch.float32),
        (dtype, float("inf"), dtype),
    ):
        check(experts, x, indices, torch.rand(tokens, k).to(weight_dtype), w13, w2, limit, before, out)


@pytest.mark.parametrize("tokens", [1, 2, 7, 9, 300])
def test_experts_without_tokens_add_nothing(fast: Callable[..., Any], tokens: int) -> None:
    """Case R18: NaN in the weights of an expert without tokens, and in recycled memory, must not appear."""
    for dtype in (torch.float32, torch.bfloat16):
        w13, w2 = weights_of(6, 64, 32, dtype)
        x, indices = torch.randn(tokens, 64).to(dtype), torch.randint(0, 3, (tokens, 2))
        weights = torch.rand(tokens, 2)
        want = fast(experts, x, indices, weights, w13, w2, 10.0, True, dtype)
        w13[3:], w2[3:] = torch.nan, torch.nan
        for _ in range(5):
            junk = [torch.full((tokens * 2 * size,), torch.nan, dtype=dtype) for size in (32, 64, 128)]
            del junk
            assert torch.equal(fast(experts, x, indices, weights, w13, w2, 10.0, True, dtype), want)
        skipped = fast(experts, x, torch.full_like(indices, -1), weights, w13, w2, 10.0, True, dtype)
        assert skipped.eq(0).all()


def test_experts_refuse_an_unknown_expert() -> None:
    w13, w2 = weights_of(4, 32, 16, torch.float32)
    for bad in (4, -2, 2**40):
        with pytest.raises(IndexError, match="indices"):
            experts(
                torch.randn(2, 32),
                torch.tensor([[0, 1], [bad, 2]]),
                torch.rand(2, 2),
                w13,
                w2,
                1.0,
                True,
                torch.float32,
            )


def test_experts_take_strided_weights(check: Callable[..., Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w13, w2 = weights_of(4, 64, 32, dtype)
        w13, w2 = w13.transpose(0, 1).contiguous().transpose(0, 1), w2.transpose(1, 2).contiguous().transpose(1, 2)
        x = torch.randn(64, 12).to(dtype).t()
        check(experts, x, torch.randint(0, 4, (12, 2)).int(), torch.rand(12, 2), w13, w2, 1.0, False, dtype)


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_router(check: Callable[..., Any], dtype: torch.dtype, score: str, fp32: bool) -> None:
    for tokens, dim, count, k in ((0, 32, 8, 2), (1, 64, 32, 4), (9, 37, 300, 6), (80, 64, 5, 5)):
        # Integers and a coarse weight: logits are exact, equal ones are equal.
        x, weight = torch.randint(-2, 3, (tokens, dim)).to(dtype), (torch.randint(-2, 3, (count, dim)) / 8).to(dtype)
        for bias in (None, torch.randn(count), torch.randn(count).to(dtype)):
            check(router, x, weight, bias, None, k, score, True, 1e-20, 2.5, fp32)
        check(
            router, x, weight, torch.randn(count), torch.randint(0, count, (tokens, k)), k, score, False, 0.0, 1.5, fp32
        )


def test_router_breaks_ties_by_index(fast: Callable[..., Any]) -> None:
    weight = torch.ones(9, 32)
    weight[4] = 2
    _, indices = fast(router, torch.ones(3, 32), weight, None, None, 4, "sigmoid", True, 0.0, 1.0, True)
    assert indices.tolist() == [[0, 1, 2, 3]] * 3  # sigmoid(32) = sigmoid(64) = 1
    _, indices = fast(router, torch.ones(3, 32) / 64, weight, None, None, 4, "sigmoid", True, 0.0, 1.0, True)
    assert indices.tolist() == [[4, 0, 1, 2]] * 3


def test_router_counts_past_256_and_bias_only_selects(fast: Callable[..., Any]) -> None:
    """Case R17."""
    x, weight, bias = torch.randn(7, 64), torch.randn(384, 64), torch.zeros(384)
    bias[:256] -= 100
    weights, indices = fast(router, x, weight, bias, None, 6, "sqrtsoftplus", True, 1e-20, 2.5, True)
    assert indices.min() >= 256
    again, same = fast(router, x, weight, bias + 3, None, 6, "sqrtsoftplus", True, 1e-20, 2.5, True)
    assert torch.equal(indices, same) and torch.equal(weights, again)


def test_router_refuses_a_forced_expert_out_of_range() -> None:
    for bad in (8, -1, 2**40):
        with pytest.raises(IndexError, match="forced_indices"):
            router(
                torch.randn(1, 32),
                torch.randn(8, 32),
                None,
                torch.tensor([[0, bad]]),
                2,
                "sigmoid",
                True,
                0.0,
                1.0,
                True,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_few_rows(dtype: torch.dtype) -> None:
    for rows in (1, 2, 3, 4, 5, 17, 33, 64):
        for width, columns in ((1024, 96), (100, 37), (64, 33), (32, 16)):
            x, w = torch.randn(rows, width).to(dtype), (torch.randn(columns, width) / width**0.5).to(dtype)
            out = few_rows(x, w)
            if rows > MAX_ROWS[dtype]:
                assert out is None
                continue
            assert out is not None
            torch.testing.assert_close(out.float(), x.float() @ w.float().t(), rtol=1e-2, atol=1e-2)
            assert torch.equal(mm(x, w.t()), out)
    x, w = torch.randn(2, 64).to(dtype), torch.randn(64, 8).to(dtype)
    torch.testing.assert_close(mm(x, w), torch.mm(x, w))  # a mat2 that is no transposed weight
    assert mm(x[:0], w).shape == (0, 8)
    with pytest.raises(RuntimeError):
        mm(x, w[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_output(check: Callable[..., Any], dtype: torch.dtype) -> None:
    for lead in ((1,), (2, 3), (0,), (1, 70)):
        o = torch.randn(*lead, 4, 64).to(dtype)
        wo_a, wo_b = (torch.randn(4, 24, 64) / 8).to(dtype), (torch.randn(50, 96) / 10).to(dtype)
        check(grouped_output, o, wo_a, wo_b)
    o = torch.randn(5, 64, 4).to(dtype).transpose(1, 2)
    check(grouped_output, o, wo_a, wo_b)
