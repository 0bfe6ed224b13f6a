"""RMS norm and rotary embedding against float64 oracles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401

rms_norm = torch.ops.dsv4.rms_norm
rope = torch.ops.dsv4.rope
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def norm64(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.double() / (x.double() ** 2).mean(-1, keepdim=True).add(eps).sqrt()
    return y if weight is None else y * weight.double()


def ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["fp32", "scale_cast", "cast_before_weight"])
@pytest.mark.parametrize("weighted", [True, False])
def test_norm_matches_float64(dtype: torch.dtype, mode: str, weighted: bool) -> None:
    x = (torch.randn(3, 5, 96) * 3).to(dtype)
    weight = torch.rand(96) + 0.5 if weighted else None
    out = rms_norm(x, weight, 1e-6, mode)
    want = norm64(x, weight, 1e-6)
    # fp32: one rounding of the exact value; the others round a factor first
    roundings = 0.5 if mode == "fp32" else 2.0
    assert ((out.double() - want).abs() <= (roundings * ulp(dtype) + 1e-6) * want.abs() + 1e-6).all()
    promoted = mode != "fp32" and weighted
    assert out.dtype == (torch.float32 if promoted else dtype)


def test_norm_modes_round_where_they_say() -> None:
    x, weight = torch.randn(64, 32, dtype=torch.bfloat16), (torch.rand(32) + 0.5).bfloat16()
    xf = x.float()
    r = torch.rsqrt((xf * xf).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6, "fp32"), (weight.float() * (xf * r)).bfloat16())
    assert torch.equal(rms_norm(x, weight, 1e-6, "scale_cast"), x * r.bfloat16() * weight)
    assert torch.equal(rms_norm(x, weight, 1e-6, "cast_before_weight"), weight * (xf * r).bfloat16())


def test_norm_keeps_nan_and_zero_rows_to_themselves() -> None:
    x = torch.randn(4, 16)
    clean = rms_norm(x, None, 1e-20, "fp32")
    x[1], x[2] = float("nan"), 0.0
    out = rms_norm(x, None, 1e-20, "fp32")
    assert torch.equal(out[[0, 3]], clean[[0, 3]])
    assert out[1].isnan().all() and torch.equal(out[2], torch.zeros(16))


def test_norm_checks_its_arguments() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"dsv4::rms_norm: mode is 'fast'; allowed: 'fp32', 'scale_cast', 'cast_"):
        rms_norm(x, None, 1e-6, "fast")
    with pytest.raises(ValueError, match=r"shape of weight is \[7\]; allowed: \[8\]"):
        rms_norm(x, torch.ones(7), 1e-6, "fp32")
    with pytest.raises(ValueError, match=r"shape of weight is \[7\]; allowed: \[8\]"):
        rms_norm(x.to("meta"), torch.ones(7, device="meta"), 1e-6, "fp32")
    with pytest.raises(TypeError, match="dtype of x is torch.float64"):
        rms_norm(x.double(), None, 1e-6, "fp32")
    with pytest.raises(ValueError, match="eps is -1.0; allowed: >= 0"):
        rms_norm(x, None, -1.0, "fp32")


@given(
    st.integers(0, 5), st.integers(0, 6), st.integers(0, 8), st.booleans(), st.sampled_from(DTYPES),
)  # fmt: skip
def test_rope_matches_complex_multiplication(
    rows: int, half: int, kept: int, inverse: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(2, rows, 3, kept + 2 * half).to(dtype)
    angle = torch.rand(rows, 1, half, dtype=torch.float64) * 7
    out = rope(x, angle.cos().float(), angle.sin().float(), inverse)
    assert out.dtype == dtype and torch.equal(out[..., :kept], x[..., :kept])
    tail = torch.view_as_complex(x[..., kept:].double().unflatten(-1, (half, 2)))
    turned = torch.view_as_real(tail * torch.polar(torch.ones_like(angle), -angle if inverse else angle)).flatten(-2)
    size = torch.view_as_real(tail).abs().sum(-1, keepdim=True).expand(-1, -1, -1, -1, 2).flatten(-2)
    assert ((out[..., kept:].double() - turned).abs() <= (ulp(dtype) + 1e-6) * size).all()


def test_rope_then_inverse_is_the_identity() -> None:
    x, angle = torch.randn(2, 7, 32), torch.rand(2, 7, 8) * 6
    back = rope(rope(x, angle.cos(), angle.sin(), False), angle.cos(), angle.sin(), True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)


def test_rope_checks_its_arguments() -> None:
    x = torch.ones(2, 4, 8)
    with pytest.raises(ValueError, match=r"2 \* last axis of cos is 10; allowed: <= last axis of x, 8"):
        rope(x, torch.ones(4, 5), torch.ones(4, 5), False)
    with pytest.raises(ValueError, match=r"shape of sin is \[4, 2\]; allowed: \[4, 3\]"):
        rope(x, torch.ones(4, 3), torch.ones(4, 2), False)
    with pytest.raises(ValueError, match=r"shape of cos is \[3, 2\]; allowed: broadcastable to \[2, 4, 2\]"):
        rope(x, torch.ones(3, 2), torch.ones(3, 2), False)
    with pytest.raises(ValueError, match="broadcastable"):
        rope(x[:1], torch.ones(2, 4, 2), torch.ones(2, 4, 2), False)  # would enlarge x
    with pytest.raises(ValueError, match="broadcastable"):
        rope(x[0, 0], torch.ones(4, 2), torch.ones(4, 2), False)
