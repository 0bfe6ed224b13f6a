"""Pooling in Triton: against the reference and against float64, with and without the group before."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.compress import TEMPLATES
from dscompile.templates.triton.record import config
from support.kernels import reference, runs, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
TARGET = get_target("sm_103a")
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def arguments(
    kind: torch.dtype, gates: torch.dtype, shape: tuple[int, ...], ape: torch.dtype | None, prior: bool, overlap: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool]:
    batch, groups, ratio, channels = shape
    kv, gate = torch.randn(shape).to(kind), (torch.randn(shape) * 3).to(gates)
    before = (None, None)
    if prior:
        half = (batch, ratio, channels // 2)
        before = (torch.randn(half).to(kind), (torch.randn(half) * 3).float())
    return kv, gate, None if ape is None else torch.randn(ratio, channels).to(ape), *before, overlap


def check(args: tuple, got: Tensor) -> None:
    """The weights carry an error of a few units of 2^-24 (exponential, sum, quotient) before they are rounded.

    Weights and products have a type with `eps`: where one of them falls to the other side of a boundary, the result
    moves by eps times the largest value at most, and the sum of two such types is rounded to the type once more.
    """
    want = reference(TEMPLATE, *args)
    assert got.dtype == want.dtype and got.shape == want.shape
    eps = torch.finfo(want.dtype).eps
    size = float(args[0].float().abs().max()) if args[0].numel() else 0.0
    size = max(size, float(args[3].float().abs().max())) if args[3] is not None and args[3].numel() else size
    torch.testing.assert_close(got.float(), want.float(), rtol=2 * eps, atol=max(2 * eps, 2**-20) * size)
    if want.numel() > 100 and want.dtype == torch.bfloat16:
        assert (got != want).float().mean() <= 0.02


@settings(max_examples=50)
@given(
    st.integers(0, 2), st.integers(0, 3), st.integers(1, 9), st.integers(1, 20), KINDS, KINDS, st.none() | KINDS,
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_equals_the_reference(
    batch: int, groups: int, ratio: int, channels: int, kind: torch.dtype, gates: torch.dtype, ape: torch.dtype | None,
    prior: bool, overlap: bool,
) -> None:  # fmt: skip
    width = 2 * channels if overlap else channels
    args = arguments(kind, gates, (batch, groups, ratio, width), ape, prior and overlap, overlap)
    for got in runs(TEMPLATE, args, TARGET):
        check(args, got)


@pytest.mark.parametrize(("ratio", "overlap"), [(2, False), (4, True), (128, False)])
def test_ratios_of_the_released_models(ratio: int, overlap: bool, target: Target) -> None:
    for kind in (torch.float32, torch.bfloat16):
        args = arguments(kind, kind, (1, 3, ratio, 64), torch.float32 if ratio > 2 else None, overlap, overlap)
        for got in runs(TEMPLATE, args, target, most=9):
            check(args, got)


def test_fp32_against_float64() -> None:
    args = arguments(torch.float32, torch.float32, (2, 3, 4, 48), torch.float32, True, True)
    kv, gate, ape, prior_kv, prior_gate, _ = (x.double() if isinstance(x, Tensor) else x for x in args)
    gate = gate + ape
    early = (
        torch.cat((prior_kv[:, None], kv[:, :-1, :, :24]), 1),
        torch.cat((prior_gate[:, None], gate[:, :-1, :, :24]), 1),
    )
    kv, gate = torch.cat((early[0], kv[..., 24:]), 2), torch.cat((early[1], gate[..., 24:]), 2)
    want = (gate.softmax(2) * kv).sum(2)
    for got in runs(TEMPLATE, args, TARGET):
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


def test_gates_are_rounded_as_the_sum_is() -> None:
    """bf16 gate and bf16 bias add up in bf16, as in the expression that the op stands for."""
    args = arguments(torch.float32, torch.bfloat16, (1, 2, 4, 32), torch.bfloat16, False, False)
    wide = (args[0], args[1].float(), args[2].float(), *args[3:])
    rounded, exact = next(runs(TEMPLATE, args, TARGET)), next(runs(TEMPLATE, wide, TARGET))
    check(args, rounded)
    assert not torch.allclose(rounded, exact, rtol=1e-4)


def test_nothing_before_the_start_is_read() -> None:
    """The first half of the last group belongs to a group that is not there yet; before the first there is nothing."""
    kv, gate = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    clean = next(runs(TEMPLATE, (kv, gate, None, None, None, True), TARGET))
    kv[:, 2, :, :4] = gate[:, 2, :, :4] = torch.nan
    assert torch.equal(next(runs(TEMPLATE, (kv, gate, None, None, None, True), TARGET)), clean)
    prior = torch.full((1, 2, 4), -math.inf)
    got = next(runs(TEMPLATE, (kv, gate, None, torch.zeros(1, 2, 4), prior, True), TARGET))
    assert torch.equal(got, clean)
    kv[:, 0, 0, 4] = torch.nan
    got = next(runs(TEMPLATE, (kv, gate, None, None, None, True), TARGET))
    assert got.isnan().nonzero().tolist() == [[0, 0, 0]]


def test_strided_inputs() -> None:
    """kv and gate are often halves of one projection."""
    both = torch.randn(2, 3, 4, 80).bfloat16()
    args = (both[..., :32], both[..., 40:72], torch.randn(4, 40)[:, 4:36], None, None, False)
    check(args, next(runs(TEMPLATE, args, TARGET)))
    across = torch.randn(2, 3, 32, 4).transpose(2, 3)
    args = (
        across,
        across * 2,
        None,
        torch.randn(2, 16, 4).transpose(1, 2),
        torch.randn(4, 2, 16).transpose(0, 1),
        True,
    )
    check(args, next(runs(TEMPLATE, args, TARGET)))


@pytest.mark.parametrize(("overlap", "ratio"), [(False, 2), (True, 4)])
def test_bytes(overlap: bool, ratio: int, target: Target) -> None:
    args = arguments(torch.float32, torch.float32, (2, 16, ratio, 64), torch.float32, False, overlap)
    with count_traffic() as traffic:
        next(runs(TEMPLATE, args, target))
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
    assert traffic.distinct_loaded <= 1.05 * cost["read_bytes"]


def test_refuses() -> None:
    refusal = TEMPLATE.applies({"kv": torch.empty(1, 1, 1025, 8)})
    assert refusal is not None and "1025" in refusal
    assert "128 values" in str(TEMPLATE.check(config(1, 1, BLOCK=32), {"r": 100}, TARGET))
