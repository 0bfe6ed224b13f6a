"""The Triton rms_norm against its reference, and the bytes that it moves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.targets import Target, get_target
from dscompile.templates.triton.rms_norm import MODES, TEMPLATES
from support.kernels import reference, runs, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def tolerance(*dtypes: torch.dtype) -> dict[str, float]:
    """One rounding of the coarsest type, after sums in another order."""
    return {"rtol": max(2 * torch.finfo(dtype).eps for dtype in dtypes), "atol": 1e-6}


@settings(max_examples=40)
@given(
    st.integers(0, 5), st.sampled_from([1, 7, 32, 96, 512, 1280]), KINDS, st.none() | KINDS, st.sampled_from([*MODES]),
    st.sampled_from([0.0, 1e-20, 1e-6]),
)  # fmt: skip
def test_equals_the_reference(
    rows: int, size: int, kind: torch.dtype, weights: torch.dtype | None, mode: str, eps: float
) -> None:
    torch.manual_seed(rows * size)
    x = torch.randn(rows, size).to(kind)
    weight = None if weights is None else (torch.rand(size) + 0.5).to(weights)
    args = (x, weight, eps, mode)
    want = reference(TEMPLATE, *args)
    for got in runs(TEMPLATE, args, get_target("sm_103a")):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, **tolerance(kind, want.dtype))


def test_rows_of_a_wider_tensor(target: Target) -> None:
    x, weight = torch.randn(2, 3, 200)[..., 40:168], torch.rand(128)
    args = (x, weight, 1e-6, "fp32")
    for got in runs(TEMPLATE, args, target):
        torch.testing.assert_close(got, reference(TEMPLATE, *args), **tolerance(torch.float32))


def test_bytes(target: Target) -> None:
    """Everything once. The weight is read by every row, and comes from memory only once."""
    args = (torch.randn(32, 512).bfloat16(), torch.rand(512), 1e-6, "fp32")
    with count_traffic() as traffic:
        next(runs(TEMPLATE, args, target))
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    assert traffic.stored == cost["write_bytes"]
    assert traffic.distinct_loaded <= 1.05 * cost["read_bytes"]


@pytest.mark.parametrize("size", [0, 65537])
def test_refuses(size: int) -> None:
    refusal = TEMPLATE.applies({"x": torch.empty(1, size), "weight": None, "eps": 0.0, "mode": "fp32"})
    assert refusal is not None and str(size) in refusal
