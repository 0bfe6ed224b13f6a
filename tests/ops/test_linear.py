"""Products of the same rows with several weights, and of normalised rows."""

import pytest
import torch

import dscompile.ops  # noqa: F401

ops = torch.ops.dsv4
BF16 = torch.bfloat16


@pytest.mark.parametrize("count", [2, 3, 4])
def test_linears_match_float64(count: int) -> None:
    x, weights = torch.randn(5, 24), [torch.randn(n, 24) for n in (3, 8, 1, 7)[:count]]
    want = torch.cat([x.double() @ w.double().T for w in weights], 1)
    args = [*weights, None, None][:4]
    torch.testing.assert_close(ops.linears(x, *args).double(), want, rtol=1e-5, atol=1e-5)
    half = ops.linears(x.bfloat16(), *(None if w is None else w.bfloat16() for w in args))
    assert half.dtype == BF16 and half.shape == want.shape


def test_linears_check_their_arguments() -> None:
    x, w = torch.ones(5, 24), torch.ones(3, 24)
    with pytest.raises(ValueError, match=r"dsv4::linears: shape of w1 is \[3, 23\]; allowed: \[3, 24\]"):
        ops.linears(x, w, w[:, :23], None, None)
    with pytest.raises(ValueError, match=r"w3 is given; allowed: None without w2"):
        ops.linears(x, w, w, None, w)
    with pytest.raises(TypeError, match=r"dtype of w2 is torch.bfloat16; allowed: torch.float32"):
        ops.linears(x, w, w, w.bfloat16(), None)


@pytest.mark.parametrize("rounding", ["fp32", "scale_cast", "cast_before_weight"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_norm_linear_is_the_norm_and_the_product(rounding: str, dtype: torch.dtype) -> None:
    x, scale, weight = torch.randn(5, 24).to(dtype), torch.randn(24).to(dtype), torch.randn(7, 24).to(dtype)
    for norm_weight in (scale, None):
        y, normed = ops.norm_linear(x, norm_weight, 1e-6, rounding, weight)
        assert torch.equal(normed, ops.rms_norm(x, norm_weight, 1e-6, rounding))
        limit = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(y.double(), normed.double() @ weight.double().T, rtol=limit, atol=limit)
        rows = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt()
        rows = rows if norm_weight is None else rows * norm_weight.double()
        torch.testing.assert_close(normed.double(), rows, rtol=3 * torch.finfo(dtype).eps, atol=1e-6)


def test_norm_linear_checks_its_arguments() -> None:
    x, weight = torch.ones(5, 24, dtype=BF16), torch.ones(3, 24, dtype=BF16)
    assert ops.norm_linear(x, torch.ones(24), 1e-6, "fp32", weight)[0].dtype == BF16
    with pytest.raises(TypeError, match=r"dtype of norm_weight is torch.float32; allowed: torch.bfloat16"):
        ops.norm_linear(x, torch.ones(24), 1e-6, "cast_before_weight", weight)
    with pytest.raises(ValueError, match=r"rounding is 'fp16'; allowed: 'fp32', 'scale_cast', 'cast_before_weight'"):
        ops.norm_linear(x, None, 1e-6, "fp16", weight)
    with pytest.raises(ValueError, match=r"shape of weight is \[3, 23\]; allowed: \[3, 24\]"):
        ops.norm_linear(x, None, 1e-6, "fp32", weight[:, :23])
