"""Engram in Triton: gathered rows are exact; the gate is bounded by the rounding of its sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.engram import TEMPLATES
from support.kernels import named, reference, runs, spec_of
from support.triton_interpreter import count_traffic

GATHER, GATE = TEMPLATES
TARGET = get_target("sm_103a")
FLOATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def exact(got: Tensor, want: Tensor) -> bool:
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    )


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 3), max_size=2), st.integers(0, 5), st.integers(1, 6), st.integers(1, 12),
    st.sampled_from([torch.uint8, torch.float8_e4m3fn]), st.sampled_from([torch.uint8, torch.float8_e8m0fnu]), FLOATS,
    st.sampled_from([torch.int64, torch.int32]),
)  # fmt: skip
def test_quantised_tables(
    lead: list[int], count: int, groups: int, group: int, table: torch.dtype, scale: torch.dtype, out: torch.dtype,
    index: torch.dtype,
) -> None:  # fmt: skip
    """Any number of rows a token, groups of any length, either spelling of the bytes."""
    values = torch.randint(0, 120, (9, groups * group + 4)).to(torch.uint8)[:, : groups * group]
    values = (values | (torch.randint(0, 2, values.shape) << 7).to(torch.uint8)).view(table)
    scales = torch.randint(110, 140, (9, groups)).to(torch.uint8).view(scale)
    args = (values, scales, torch.randint(0, 9, (*lead, count)).to(index), out)
    for got in runs(GATHER, args, TARGET):
        assert exact(got, reference(GATHER, *args))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [7, 64])
def test_plain_tables(kind: torch.dtype, width: int, target: Target) -> None:
    table = torch.randn(11, width).to(kind)
    args = (table, None, torch.randint(0, 11, (2, 3)), torch.bfloat16)
    for got in runs(GATHER, args, target, most=9):
        assert exact(got, reference(GATHER, *args))


def test_a_row_out_of_range_gives_zeros() -> None:
    table = torch.full((6, 32), 0x7F, dtype=torch.uint8)  # NaN around the rows that belong to the table
    table[1:5] = torch.randint(0, 100, (4, 32)).to(torch.uint8)
    scales = torch.full((6, 2), 255, dtype=torch.uint8)
    scales[1:5] = 127
    rows = torch.tensor([[0, -1, 4, 3], [2**40 + 1, 2**32, -(2**40), 1]])
    got = next(runs(GATHER, (table[1:5], scales[1:5], rows, torch.float32), TARGET)).unflatten(-1, (4, 32))
    inside = (rows >= 0) & (rows < 4)
    assert got[~inside].eq(0).all()
    want = reference(GATHER, table[1:5], scales[1:5], rows[inside], torch.float32).view(-1, 32)
    assert torch.equal(got[inside], want)


def test_every_byte_of_a_table() -> None:
    """Each value with each power of two, subnormal results and NaN included."""
    table = torch.arange(256).to(torch.uint8).expand(256, 256).contiguous()
    scales = torch.arange(256).to(torch.uint8)[:, None].expand(256, 8).contiguous()
    args = (table, scales, torch.arange(256)[None], torch.float32)
    torch.testing.assert_close(
        next(runs(GATHER, args, TARGET)), reference(GATHER, *args), rtol=0, atol=0, equal_nan=True
    )


# -- the gate ----------------------------------------------------------------------------------------------------------


def gate_arguments(
    lead: list[int], streams: int, width: int, kind: torch.dtype, weights: torch.dtype, masked: bool, eps: float = 1e-20
) -> tuple:
    shape = (*lead, streams, width)
    mask = torch.rand(lead) < 0.5 if masked else None
    weight = [(torch.rand(streams, width) + 0.5).to(weights) for _ in range(2)]
    return (
        torch.randn(shape).to(kind),
        torch.randn(shape).to(kind),
        torch.randn(*lead, width).to(kind),
        *weight,
        mask,
        eps,
    )


def check_gate(args: tuple, got: Tensor) -> None:
    """Sums in another order: the score moves by 2^-24 sqrt(D) or so of its size, the root halves that.

    Close to zero the root is steep: a change of 1e-7 in the score moves the gate by 1e-7 / (2 * 1e-3) at most, at the
    floor of the score. The sign of a score that is zero within its rounding may even flip, which random rows avoid.
    """
    want = reference(GATE, *args)
    assert got.dtype == want.dtype and got.shape == want.shape
    eps = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got.float(), want.float(), rtol=max(eps, 1e-6), atol=1e-4 if want.numel() else 0)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 3), max_size=2), st.integers(1, 4), st.sampled_from([1, 7, 32, 96, 160]), FLOATS, FLOATS,
    st.booleans(),
)  # fmt: skip
def test_gate(lead: list[int], streams: int, width: int, kind: torch.dtype, weights: torch.dtype, masked: bool) -> None:
    args = gate_arguments(lead, streams, width, kind, weights, masked)
    for got in runs(GATE, args, TARGET):
        check_gate(args, got)


def test_gate_against_float64() -> None:
    streams, key, value, q, k, _, eps = gate_arguments([4], 3, 256, torch.float32, torch.bfloat16, False, 1e-6)
    x, y, v = streams.double(), key.double(), value.double()
    score = (x * q.double() * k.double() * y).sum(-1)
    score = score * (x.square().mean(-1) + eps).rsqrt() * (y.square().mean(-1) + eps).rsqrt() / 16
    want = x + torch.sigmoid(score.sign() * score.abs().clamp_min(1e-6).sqrt()).unsqueeze(-1) * v.unsqueeze(-2)
    for got in runs(GATE, (streams, key, value, q, k, None, eps), TARGET, most=9):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)


def test_signs_and_zero_of_the_score() -> None:
    """A score of zero gates by one half, a tiny one by the floor with its sign."""
    ones = torch.ones(1, 4, 8)
    key = torch.stack(
        (torch.zeros(8), torch.full((8,), 1.0), torch.full((8,), -1.0), torch.tensor([1.0, -1.0]).repeat(4))
    )
    weight = torch.full((4, 8), 1e-4)
    weight[3] = 1.0
    args = (ones, key[None], torch.full((1, 8), 10.0), weight, weight, None, 1e-20)
    got = next(runs(GATE, args, TARGET))
    check_gate(args, got)
    assert got[0, 0].eq(6).all() and got[0, 3].eq(6).all() and (got[0, 1] > 6).all() and (got[0, 2] < 6).all()


def test_masked_tokens_pass_unchanged_whatever_their_keys_hold(target: Target) -> None:
    streams, key, value, q, k, _, eps = gate_arguments([3], 2, 64, torch.bfloat16, torch.float32, False)
    mask = torch.tensor([True, False, True])
    key[1] = value[1] = torch.nan
    streams[1, 0, :3] = torch.tensor([-0.0, torch.inf, -torch.inf])
    args = (streams, key, value, q, k, mask, eps)
    got = next(runs(GATE, args, target))
    assert exact(got[1], streams[1])
    check_gate(args, got)
    with count_traffic() as traffic:
        next(runs(GATE, (streams, key, value, q, k, torch.zeros_like(mask), eps), target))
    assert traffic.loaded == streams.numel() * 2 + 2 * 3


def test_strided_streams() -> None:
    wide = torch.randn(3, 4, 2, 100).bfloat16()
    args = (
        wide[..., 3:67], torch.randn(4, 3, 2, 64).bfloat16().transpose(0, 1), torch.randn(3, 64, 4).bfloat16().mT,
        torch.rand(64, 2).t(), torch.rand(2, 64), torch.rand(4, 3).t() < 0.5, 1e-6,
    )  # fmt: skip
    check_gate(args, next(runs(GATE, args, TARGET)))


def test_bytes(target: Target) -> None:
    table, scales = torch.randint(0, 99, (64, 256)).to(torch.uint8), torch.full((64, 8), 120, dtype=torch.uint8)
    args = (table, scales, torch.randperm(64).view(4, 16), torch.bfloat16)
    with count_traffic() as traffic:
        next(runs(GATHER, args, target))
    cost = spec_of(GATHER).cost_of(*args).numbers()
    assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
    assert traffic.loaded == traffic.distinct_loaded == cost["read_bytes"]
    args = gate_arguments([8], 4, 96, torch.bfloat16, torch.bfloat16, False)
    with count_traffic() as traffic:
        next(runs(GATE, args, target))
    cost = spec_of(GATE).cost_of(*args).numbers()
    assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
    assert traffic.distinct_loaded == cost["read_bytes"]


def test_refuses() -> None:
    args = (torch.zeros(8, 4).t(), None, torch.zeros(1, dtype=torch.int64), torch.float32)
    assert "table: 4 from one value to the next" in str(GATHER.applies(named(GATHER, args)))
    args = (torch.zeros(4, 9000), *args[1:])
    assert "9000" in str(GATHER.applies(named(GATHER, args)))
    assert "20000" in str(GATE.applies({"streams": torch.empty(1, 1, 20000)}))
