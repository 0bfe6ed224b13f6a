"""Linear maps with stored weights: a float64 oracle with its own decoding, and their arguments."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401
from support.quant import fp8

linear_packed, grouped_output_packed = torch.ops.dsv4.linear_packed, torch.ops.dsv4.grouped_output_packed
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def stored(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, its scales, and what they mean in float64."""
    weight = torch.randn(rows, columns).mul(8).to(torch.float8_e4m3fn)
    scale = torch.randint(118, 124, (rows // 32, columns // 32), dtype=torch.uint8)
    factors = (2.0 ** (scale.double() - 127)).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return weight, scale, weight.double() * factors


@settings(max_examples=30)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6), st.sampled_from([FP32, BF16, FP16]), st.booleans())
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype, octets: bool) -> None:
    torch.manual_seed(rows + 7 * n + 31 * k)
    x = (torch.randn(rows, 2, 32 * k) * torch.logspace(-3, 3, 32 * k)).to(dtype)
    weight, scale, meaning = stored(32 * n, 32 * k)
    got = linear_packed(x, weight.view(torch.uint8) if octets else weight, scale)
    want = fp8(x) @ meaning.T
    bound = torch.finfo(dtype).eps * want.abs() + 1e-6 * (fp8(x).abs() @ meaning.abs().T)
    assert got.dtype == dtype and ((got.double() - want).abs() <= bound + (6e-8 if dtype == FP16 else 0)).all()


def test_two_weights() -> None:
    x, (w0, s0, _), (w1, s1, _) = torch.randn(3, 64).to(BF16), stored(32, 64), stored(96, 64)
    want = torch.cat((linear_packed(x, w0, s0), linear_packed(x, w1, s1)), 1)
    assert torch.equal(torch.ops.dsv4.linears_packed(x, w0, s0, w1, s1), want)


def test_grouped_output() -> None:
    o, wo_a = torch.randn(2, 3, 4, 8), torch.randn(4, 16, 8)
    weight, scale, meaning = stored(96, 64)
    low = torch.einsum("...gi,gri->...gr", o, wo_a).flatten(-2)
    want = fp8(low) @ meaning.T
    got = grouped_output_packed(o, wo_a, weight, scale)
    assert got.shape == (2, 3, 96)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_bad_arguments() -> None:
    x, (weight, scale, _) = torch.randn(3, 64), stored(96, 64)
    with pytest.raises(ValueError, match=re.escape("shape of weight is [96, 64]; allowed: [96, 32]")):
        linear_packed(x[:, :32], weight, scale)
    with pytest.raises(ValueError, match=re.escape("shape of weight_scale is [2, 2]; allowed: [3, 2]")):
        linear_packed(x, weight, scale[:2])
    with pytest.raises(ValueError, match="axis 0 of weight is 95; allowed: a multiple of 32"):
        linear_packed(x, weight[:95], scale)
    with pytest.raises(TypeError, match="dtype of weight is torch.float32"):
        linear_packed(x, weight.float(), scale)
    with pytest.raises(ValueError, match=re.escape("linears_packed: shape of w1_scale is [3, 2]; allowed: [3, 1]")):
        torch.ops.dsv4.linears_packed(x[:, :32], weight[:, :32], scale[:, :1], weight[:, :32], scale)
    with pytest.raises(ValueError, match=re.escape("shape of wo_b is [96, 64]; allowed: [96, 96]")):
        grouped_output_packed(torch.randn(2, 3, 8), torch.randn(3, 32, 8), weight, scale)
