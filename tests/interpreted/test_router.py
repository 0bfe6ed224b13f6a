"""The Triton router against its reference: ties, forced choice, many experts (case R17), bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.router import SCORES, TEMPLATES
from support.kernels import reference, runs, space, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SM103 = get_target("sm_103a")


def ranked(x: Tensor, weight: Tensor, bias: Tensor | None, score_fn: str) -> Tensor:
    """float64 scores with the bias."""
    logits = x.double() @ weight.double().T
    if score_fn == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(logits).sqrt()
    else:
        scores = logits.sigmoid() if score_fn == "sigmoid" else logits.softmax(-1)
    return scores if bias is None else scores + bias.double()


def close(got: tuple[Tensor, Tensor], args: tuple[Any, ...]) -> None:
    """The same experts in the same order, unless their scores differ by less than the arithmetic can tell."""
    x, weight, bias, forced, k, score_fn, *_, fp32 = args
    want = reference(TEMPLATE, *args)
    for a, b in zip(got, want):
        assert a.dtype == b.dtype and a.shape == b.shape
    kind = FP32 if fp32 else x.dtype
    tolerance = 1e-5 if kind == FP32 else 4 * torch.finfo(kind).eps
    if forced is not None:
        assert torch.equal(got[1], want[1])
    else:
        scores = ranked(x, weight, bias, score_fn)
        a, b = scores.gather(1, got[1]), scores.gather(1, want[1])
        assert ((a - b).abs() <= tolerance * (1 + b.abs())).all()
        assert (got[1].sort(-1).values.diff(dim=-1) > 0).all()
    same = got[1] == want[1]
    torch.testing.assert_close(got[0][same], want[0][same], rtol=tolerance, atol=tolerance)


@settings(max_examples=25)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    n, e = data.draw(st.integers(0, 20)), data.draw(st.sampled_from([1, 2, 6, 33, 128]))
    k, size = data.draw(st.integers(1, min(e, 8))), data.draw(st.sampled_from([8, 40, 256, 300]))
    kind, fp32 = data.draw(st.sampled_from([FP32, BF16, FP16])), data.draw(st.booleans())
    weights = data.draw(st.sampled_from([FP32, BF16, FP16])) if fp32 else kind
    torch.manual_seed(n * e + size)
    x, weight = torch.randn(n, size).to(kind), (torch.randn(e, size) * size**-0.5).to(weights)
    bias = torch.randn(e).to(data.draw(st.sampled_from([FP32, kind]))) if data.draw(st.booleans()) else None
    forced = torch.randint(0, e, (n, k)) if data.draw(st.booleans()) else None
    score_fn, normalize = data.draw(st.sampled_from([*SCORES])), data.draw(st.booleans())
    args = (x, weight, bias, forced, k, score_fn, normalize, data.draw(st.sampled_from([0.0, 1e-20])), 1.5, fp32)
    config = data.draw(st.sampled_from(space(TEMPLATE, args, SM103)))
    close(TEMPLATE.fn(*args, config=config, target=SM103), args)


@pytest.mark.parametrize("experts", [300, 384])
@pytest.mark.parametrize("k", [2, 6])
def test_more_than_256_experts(experts: int, k: int, target: Target) -> None:
    """Case R17: experts from 256 on can be chosen; the same bias for all leaves everything bitwise as it was."""
    x, weight, bias = torch.randn(9, 64), torch.randn(experts, 64) / 8, torch.rand(experts)
    bias[:256] -= 100

    def call(b: Tensor) -> tuple[Tensor, Tensor]:
        args = (x, weight, b, None, k, "sqrtsoftplus", True, 1e-20, 2.5, True)
        got = next(runs(TEMPLATE, args, target, 1))
        close(got, args)
        return got

    (weights, indices), moved = call(bias), call(bias + 3)
    assert (indices >= 256).all()
    assert torch.equal(moved[1], indices) and torch.equal(moved[0], weights)


@pytest.mark.parametrize("experts", [5, 1024])
@pytest.mark.parametrize("kind", [FP32, BF16])
def test_ties_go_to_the_lowest_index(experts: int, kind: torch.dtype) -> None:
    """All equal, equal in groups, -0 and 0: the order of the reference exactly."""
    x = torch.ones(3, 16, dtype=kind)
    weight = torch.zeros(experts, 16, dtype=kind)
    weight[1::2] = 0.25
    bias = -torch.nn.functional.softplus(torch.zeros(experts)).sqrt() * torch.arange(experts).remainder(2).eq(0)
    bias[0] = -bias[0] * 0 - 0.0
    for b in (None, bias):
        args = (x, weight, b, None, 5, "sqrtsoftplus", False, 0.0, 1.0, kind == FP32)
        got, want = next(runs(TEMPLATE, args, SM103, 1)), reference(TEMPLATE, *args)
        assert torch.equal(got[1], want[1])


def test_values_of_the_score_functions() -> None:
    """Over the whole range of logits, against float64: no cancellation in softplus, no overflow."""
    logits = torch.cat((torch.linspace(-80, 80, 160), torch.logspace(-8, 1, 40)))
    x, forced = logits[:, None] * torch.eye(1, 16), torch.zeros(200, 1, dtype=torch.int64)
    weight = torch.eye(2, 16)
    for score_fn in ("sqrtsoftplus", "sigmoid"):
        args = (x, weight, None, forced, 1, score_fn, False, 0.0, 1.0, True)
        got = next(runs(TEMPLATE, args, SM103, 1))[0].double()
        want = ranked(x, weight, None, score_fn)[:, :1]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_nan_and_forced_indices_outside() -> None:
    """A NaN token stays where it is. A forced index outside weighs nothing, and reads nothing."""
    x, weight = torch.randn(4, 40), torch.randn(6, 40) / 6
    args = (x, weight, None, None, 3, "sigmoid", True, 1e-20, 1.0, True)
    clean = next(runs(TEMPLATE, args, SM103, 1))
    x[1] = float("nan")
    got, want = next(runs(TEMPLATE, args, SM103, 1)), reference(TEMPLATE, *args)
    keep = [0, 2, 3]
    assert torch.equal(got[0][keep], clean[0][keep]) and torch.equal(got[1][keep], clean[1][keep])
    assert got[0][1].isnan().all() and torch.equal(got[1][1], want[1][1])
    forced = torch.tensor([[0, -1, 5], [6, 2**31, 1], [2**32, 2, -(2**40)], [1, 2, 3]])
    x[1] = 0
    weights, indices = next(runs(TEMPLATE, (x, weight, None, forced, 3, "sigmoid", False, 0.0, 1.0, True), SM103, 1))
    assert torch.equal(indices, forced) and torch.equal(weights == 0, (forced < 0) | (forced >= 6))


def test_odd_strides(target: Target) -> None:
    x, weight = torch.randn(5, 90)[:, 7:71], torch.randn(64, 6).T
    bias, forced = torch.randn(12)[::2], torch.randint(0, 6, (3, 5)).T
    for b, f in ((bias, None), (None, forced)):
        args = (x, weight, b, f, 3, "sqrtsoftplus", True, 1e-20, 1.5, True)
        close(next(runs(TEMPLATE, args, target, 1)), args)


@pytest.mark.parametrize("weights", [FP32, BF16])
def test_bytes(weights: torch.dtype) -> None:
    """Tokens and weights once. Logits are written and come back from the cache; they are counted here."""
    x, weight = torch.randn(32, 256).to(BF16), (torch.randn(96, 256) / 16).to(weights)
    args = (x, weight, torch.rand(96), None, 6, "sqrtsoftplus", True, 1e-20, 1.5, True)
    for config in space(TEMPLATE, args, SM103)[::2]:
        with count_traffic() as traffic:
            TEMPLATE.fn(*args, config=config, target=SM103)
        cost = spec_of(TEMPLATE).cost_of(*args).numbers()
        assert len(traffic._read - traffic._written) <= 1.05 * cost["read_bytes"]
        counters = 2 * 4 * config["ONE"]  # of two blocks of tokens
        splits = (traffic.distinct_stored - cost["write_bytes"] - counters) / (32 * 96 * 4)
        assert splits == int(splits) <= config["SPLITS"]


@pytest.mark.parametrize("kind", [FP32, BF16])
@pytest.mark.parametrize("tokens", [1, 21])
def test_one_launch_and_two_agree_to_the_bit(tokens: int, kind: torch.dtype) -> None:
    """With the same shares of columns; blocks of tokens that are not full, and more tokens than one choice is for."""
    x, weight = torch.randn(tokens, 256).to(kind), torch.randn(384, 256).to(kind) / 16
    args = (x, weight, torch.rand(384), None, 6, "sqrtsoftplus", True, 1e-20, 1.5, True)
    one = space(TEMPLATE, args, SM103)[0]
    assert one["ONE"]
    constants = tuple((name, 0 if name == "ONE" else value) for name, value in one.constants)
    two = replace(one, constants=constants)
    first, second = (TEMPLATE.fn(*args, config=c, target=SM103) for c in (one, two))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    close(first, args)


def test_refuses() -> None:
    refusal = TEMPLATE.applies({"weight": torch.empty(1025, 8, device="meta")})
    assert refusal is not None and "1025" in refusal
