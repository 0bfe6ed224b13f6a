"""Rows for experts elsewhere: what is sent is what packing stores, what comes back is added in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dscompile.ops  # noqa: F401
from dscompile.ops import OPS

ops = torch.ops.dsv4
WINDOW = "fp8_g32_ue8m0"


@given(st.integers(0, 5), st.integers(0, 9), st.sampled_from([32, 96]))
def test_packed_rows_are_those_of_quant_pack(tokens: int, slots: int, dim: int) -> None:
    x = torch.randn(tokens, dim).bfloat16()
    token = torch.randint(-1, tokens, (slots,)) if tokens else torch.full((slots,), -1)
    rows, packed = ops.pack_rows(x, token, WINDOW), ops.quant_pack(x, WINDOW)
    assert rows.shape == (slots, dim + dim // 32) and rows.dtype == torch.uint8
    for slot, source in enumerate(token.tolist()):
        want = torch.zeros_like(rows[slot]) if source < 0 else packed[source]
        assert torch.equal(rows[slot], want)


def test_a_row_of_the_released_size() -> None:
    x = torch.randn(2, 5120)
    rows = ops.pack_rows(x, torch.tensor([1, -1, 1]), WINDOW)
    assert rows.shape == (3, 5280) and not rows[1].any()
    assert (ops.unpack(rows[:1], WINDOW, 5120, torch.float32) - x[1:]).abs().max() < 0.5
    cost = OPS["pack_rows"].cost_of(x, torch.tensor([1, -1, 1]), WINDOW).numbers()
    assert cost["write_bytes"] == 3 * 5280 and cost["read_bytes"] == 2 * 5120 * 4 + 3 * 8


@pytest.mark.parametrize("weighted", [True, False])
def test_combine_matches_float64(weighted: bool) -> None:
    """NaN in a row that no slot names, and in the weight of no row, changes nothing."""
    rows = torch.randn(7, 24).bfloat16()
    rows[6] = float("nan")
    slot = torch.randint(-1, 6, (5, 4))
    slot[0] = -1
    weight = torch.rand(5, 4) if weighted else None
    want = torch.zeros(5, 24, dtype=torch.float64)
    for n in range(5):
        for r in range(4):
            if slot[n, r] >= 0:
                want[n] += rows[slot[n, r]].double() * (1 if weight is None else weight[n, r].double())
    if weight is not None:
        weight = weight.masked_fill(slot < 0, float("nan"))
    got = ops.combine_rows(rows, slot, weight)
    assert got.dtype == torch.float32 and not got[0].any()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_combine_adds_in_order() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    order = torch.tensor([[0, 1, 2], [0, 2, 1]])
    assert ops.combine_rows(rows, order, None).flatten().tolist() == [0.0, 1.0]


def test_arguments_are_checked() -> None:
    x, token = torch.ones(3, 32), torch.zeros(4, dtype=torch.int64)
    for wrong in (3, -2):
        with pytest.raises(IndexError, match=rf"dsv4::pack_rows: token is {wrong}; allowed: -1 <= token < 3"):
            ops.pack_rows(x, token + wrong, WINDOW)
        with pytest.raises(IndexError, match=rf"dsv4::combine_rows: slot is {wrong}; allowed: -1 <= slot < 3"):
            ops.combine_rows(x, token[:, None] + wrong, None)
    with pytest.raises(ValueError, match="dsv4::pack_rows: format is 'none'; allowed: 'bf16'"):
        ops.pack_rows(x, token, "none")
    with pytest.raises(ValueError, match="a format that can hold the row"):
        ops.pack_rows(torch.ones(3, 33), token, WINDOW)
    with pytest.raises(ValueError, match=r"shape of weight is \[4, 2\]; allowed: \[4, 1\]"):
        ops.combine_rows(x, token[:, None], torch.ones(4, 2))
    with pytest.raises(TypeError, match="dtype of slot is torch.float32"):
        ops.combine_rows(x, token[:, None].float(), None)
