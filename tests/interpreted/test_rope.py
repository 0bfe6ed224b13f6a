"""The Triton rotation is the reference bit for bit: products and sums in the same order, rounded once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.targets import Target, get_target
from dscompile.templates.triton.rope import TEMPLATES, merge_axes
from support.kernels import reference, runs, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
TARGET = get_target("sm_103a")
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def exact(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), max_size=4), st.integers(1, 70), KINDS, KINDS, st.booleans(), st.data(),
)  # fmt: skip
def test_equals_the_reference(
    lead: list[int], dim: int, kind: torch.dtype, angles: torch.dtype, inverse: bool, data: st.DataObject
) -> None:
    """Any leading axes, angles that are broadcast over any of them, odd rows, from none to all values rotated."""
    half = data.draw(st.integers(0, dim // 2))
    shared = [1 if data.draw(st.booleans()) else size for size in lead][data.draw(st.integers(0, len(lead))) :]
    angle = torch.rand(*shared, half) * 6
    x = torch.randn(*lead, dim).to(kind)
    args = (x, angle.cos().to(angles), angle.sin().to(angles), inverse)
    for got in runs(TEMPLATE, args, TARGET):
        assert exact(got, reference(TEMPLATE, *args))


def test_heads_share_the_angles_of_their_token(target: Target) -> None:
    x, angle = torch.randn(2, 5, 3, 48).bfloat16(), torch.rand(2, 5, 1, 8) * 6
    args = (x, angle.cos(), angle.sin(), False)
    for got in runs(TEMPLATE, args, target):
        assert exact(got, reference(TEMPLATE, *args))


def test_strided_inputs() -> None:
    """Parts of wider tensors, transposed axes, an inner axis with gaps, more axes than the kernel counts."""
    angle = torch.rand(4, 3, 20) * 6
    cos, sin = angle.cos()[..., 2:10], angle.sin()[..., ::2][..., :8]
    for x in (
        torch.randn(4, 3, 40)[..., 5:37], torch.randn(3, 4, 32).transpose(0, 1), torch.randn(4, 32, 3).transpose(1, 2),
    ):  # fmt: skip
        args = (x, cos, sin, True)
        assert exact(next(runs(TEMPLATE, args, TARGET)), reference(TEMPLATE, *args))
    x = torch.randn(2, 3, 2, 3, 2, 16).permute(4, 3, 2, 1, 0, 5)
    angle = torch.rand(1, 3, 1, 3, 1, 4)
    args = (x, angle.cos(), angle.sin(), False)
    assert exact(next(runs(TEMPLATE, args, TARGET)), reference(TEMPLATE, *args).contiguous())


def test_nan_stays_in_its_pair() -> None:
    x = torch.randn(3, 16)
    x[0, 2] = x[1, 12] = torch.nan
    x[2, 15] = torch.inf
    angle = torch.rand(3, 4)
    args = (x, angle.cos(), angle.sin(), False)
    got = next(runs(TEMPLATE, args, TARGET))
    torch.testing.assert_close(got, reference(TEMPLATE, *args), rtol=0, atol=0, equal_nan=True)
    assert got.isnan().nonzero().tolist() == [[0, 2], [1, 12], [1, 13]]


def test_there_and_back() -> None:
    x, angle = torch.randn(4, 64), torch.rand(4, 16) * 6
    turned = next(runs(TEMPLATE, (x, angle.cos(), angle.sin(), False), TARGET))
    back = next(runs(TEMPLATE, (turned, angle.cos(), angle.sin(), True), TARGET))
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_bytes(heads: int, target: Target) -> None:
    x, angle = torch.randn(6, heads, 512).bfloat16(), torch.rand(6, 1, 32)
    args = (x, angle.cos(), angle.sin(), False)
    with count_traffic() as traffic:
        next(runs(TEMPLATE, args, target))
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
    assert traffic.distinct_loaded == cost["read_bytes"]


def test_axes_are_merged_where_all_tensors_allow_it() -> None:
    assert merge_axes((2, 3, 4), (12, 4, 1)) == ([24], [[1]])
    assert merge_axes((2, 3, 4), (12, 4, 1), (3, 1, 0)) == ([6, 4], [[4, 1], [1, 0]])
    assert merge_axes((2, 1, 4), (4, 99, 1), (0, 7, 0)) == ([8], [[1], [0]])
    assert merge_axes((1, 1), (5, 5)) == ([], [[]])


def test_refuses_longer_rows_than_a_tile_and_too_many() -> None:
    for shape, named in (((1, 8193), "8193"), ((1 << 20, 1 << 10, 64), "1073741824 rows")):
        refusal = TEMPLATE.applies({"x": torch.empty(shape, device="meta")})
        assert refusal is not None and named in refusal
