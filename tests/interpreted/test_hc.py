"""The Triton hyper-connections and Sinkhorn against their references, and the bytes that they move."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton import hc, hc_post, sinkhorn
from support.kernels import reference, runs, space, spec_of
from support.triton_interpreter import count_traffic

PRE, HEAD = hc.TEMPLATES
(POST,) = hc_post.TEMPLATES
(SINKHORN,) = sinkhorn.TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = st.sampled_from([FP32, BF16, FP16])
SM103 = get_target("sm_103a")
FORMS = ["one", "split", "whole"]


def of_form(template: Any, call: tuple[Any, ...], form: str) -> Any:
    """The first config in which the columns of a token are shared by programs and one of those finishes, or a second
    kernel does, or nothing is shared."""
    wanted = {
        "one": lambda c: c["ONE"],
        "split": lambda c: c["SPAN"] and not c["ONE"],
        "whole": lambda c: not c["SPAN"],
    }
    return next(c for c in space(template, call, SM103) if wanted[form](c))


def pre_case(tokens: int, n: int, size: int, kind: torch.dtype, weights: torch.dtype = FP32) -> list[Any]:
    """Arguments of hc_pre up to pre_in."""
    mixes = (2 + n) * n
    streams = (torch.randn(tokens, n, size) * torch.logspace(-1, 1, tokens)[:, None, None]).to(kind)
    fn = (torch.randn(mixes, n * size) * (n * size) ** -0.5).to(weights)
    return [streams, fn, torch.rand(3).to(weights), torch.randn(mixes).to(weights), torch.rand(tokens, n)]


def x_bound(streams: Tensor, pre: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Two roundings to the streams' type may fall the other way: of the collapsed row, and of the normalised one."""
    collapsed = (pre.double().unsqueeze(-1) * streams.double()).sum(-2)
    bound = 3 * torch.finfo(streams.dtype).eps * (pre.double().unsqueeze(-1) * streams.double()).abs().sum(-2)
    if weight is not None:
        bound = bound * torch.rsqrt(collapsed.square().mean(-1, keepdim=True) + eps) * weight.double().abs()
    return bound + 1e-6


def close_pre(got: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
    """The weights come from sums of fp32 products of order 1 in another order: 1e-5 of what goes into sigmoid and
    softmax, whose derivatives are below 1."""
    want = reference(PRE, *args)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype
    for a, b in zip(got[1:], want[1:]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    streams, pre_in, weight, norm_eps = args[0], args[4], args[5], args[9]
    bound = x_bound(streams, want[1] if pre_in is None else pre_in, weight, norm_eps)
    # The pre that the collapse uses may itself be off.
    slack = 1e-4 * want[0].double().abs().amax(-1, keepdim=True) if pre_in is None else 0.0
    assert ((got[0].double() - want[0].double()).abs() <= bound + slack).all()


@settings(max_examples=25)
@given(st.data())
def test_pre(data: st.DataObject) -> None:
    tokens, n = data.draw(st.integers(0, 19)), data.draw(st.sampled_from([1, 2, 3, 4]))
    size, kind = data.draw(st.sampled_from([16, 72, 130])), data.draw(KINDS)
    torch.manual_seed(tokens * size)
    args = pre_case(tokens, n, size, kind, data.draw(KINDS))
    args[4] = args[4].to(data.draw(KINDS)) if data.draw(st.booleans()) else None
    weight = (torch.rand(size) + 0.5).to(data.draw(KINDS)) if data.draw(st.booleans()) else None
    eps, first = data.draw(st.sampled_from([1e-20, 1e-6])), data.draw(st.booleans())
    call = (*args, weight, eps, data.draw(st.sampled_from([1e-6, 0.0])), data.draw(st.integers(1, 4)), eps, first)
    config = of_form(PRE, call, data.draw(st.sampled_from(FORMS)))
    close_pre(PRE.fn(*call, config=config, target=SM103), call)


def test_pre_of_batches_and_odd_strides(target: Target) -> None:
    args = pre_case(6, 4, 64, BF16)
    flat = (*args, torch.rand(64), 1e-20, 1e-6, 20, 1e-20, False)
    want = next(runs(PRE, flat, target, 1))
    close_pre(want, flat)
    wide = torch.zeros(2, 3, 4, 2, 64, dtype=BF16)
    wide[..., 1, :] = args[0].view(2, 3, 4, 64)
    fn = torch.zeros(24, 300)
    fn[:, 7:263] = args[1]
    odd = (wide[..., 1, :], fn[:, 7:263], *args[2:4], args[4].view(2, 3, 4).mT.contiguous().mT, *flat[5:])
    for a, b in zip(next(runs(PRE, odd, target, 1)), want):
        assert torch.equal(a.flatten(0, 1), b)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_nan_token_stays_where_it_is() -> None:
    args = (*pre_case(5, 4, 64, BF16), torch.rand(64), 1e-20, 1e-6, 3, 1e-20, False)
    for config in space(PRE, args, SM103):
        clean = PRE.fn(*args, config=config, target=SM103)
        dirty = args[0].clone()
        dirty[2] = float("nan")
        got = PRE.fn(dirty, *args[1:], config=config, target=SM103)
        for a, b in zip(got, clean):
            assert a[2].isnan().any() and torch.equal(a[[0, 1, 3, 4]], b[[0, 1, 3, 4]])


@pytest.mark.parametrize("pieces", [FP32, FP16, BF16])
def test_the_mix_is_as_exact_as_in_fp32(pieces: torch.dtype) -> None:
    """bf16 streams, any fn: against float64 no worse than fp32 products."""
    args = pre_case(8, 4, 512, BF16, pieces)
    args[2], args[3] = torch.ones(3), torch.zeros(24)
    call = (*args, None, 0.0, 0.0, 1, 0.0, False)
    flat = args[0].double().flatten(1)
    mixes = (flat @ args[1].double().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True))
    error = (next(runs(PRE, call, SM103, 1))[2].double() - 2 * torch.sigmoid(mixes[:, 4:8])).abs().max()
    assert error <= 4e-7


@settings(max_examples=15)
@given(st.integers(0, 9), st.sampled_from([1, 2, 4]), st.sampled_from([16, 72]), KINDS, KINDS, st.sampled_from(FORMS))
def test_head(tokens: int, n: int, size: int, kind: torch.dtype, weights: torch.dtype, form: str) -> None:
    torch.manual_seed(tokens)
    streams, fn = torch.randn(tokens, n, size).to(kind), (torch.randn(n, n * size) * (n * size) ** -0.5).to(weights)
    args = (streams, fn, torch.rand(1), torch.randn(n), 1e-6, 1e-6)
    want = reference(HEAD, *args)
    got = HEAD.fn(*args, config=of_form(HEAD, args, form), target=SM103)
    gates = torch.full((tokens, n), 1.0)
    assert got.dtype == want.dtype and ((got.double() - want.double()).abs() <= x_bound(streams, gates, None, 0)).all()


@settings(max_examples=25)
@given(
    st.integers(0, 5), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 16, 130, 1100]), KINDS, KINDS, st.booleans()
)  # fmt: skip
def test_post(tokens: int, n: int, size: int, kind: torch.dtype, other: torch.dtype, fp32: bool) -> None:
    """Rounded once, or three times in the streams' type."""
    torch.manual_seed(tokens * size)
    y, streams = torch.randn(tokens, size).to(other), torch.randn(tokens, n, size).to(kind)
    post, comb = torch.rand(tokens, n), torch.rand(tokens, n, n)
    args = (y, streams, post, comb, fp32)
    want = reference(POST, *args)
    scale = post[..., None] * y.float().abs()[:, None] + comb.mT @ streams.float().abs()
    for got in runs(POST, args, SM103):
        assert got.dtype == want.dtype
        assert ((got.double() - want.double()).abs() <= 2 * torch.finfo(kind).eps * scale + 1e-6).all()


def test_post_of_batches_and_odd_strides() -> None:
    y, wide = torch.randn(2, 3, 40)[..., 4:36], torch.randn(2, 3, 4, 2, 32)
    args = (y, wide[..., 1, :], torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4).mT, True)
    want = reference(POST, *args)
    for got in runs(POST, args, SM103):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(st.integers(0, 40), st.sampled_from([1, 2, 3, 4, 5, 8]), st.integers(1, 20), KINDS, st.sampled_from([1e-6, 0.0]))
def test_sinkhorn(matrices: int, n: int, iters: int, kind: torch.dtype, eps: float) -> None:
    torch.manual_seed(matrices)
    args = ((torch.randn(matrices, 1, n, n) * 3).to(kind), iters, eps)
    for got in runs(SINKHORN, args, SM103):
        torch.testing.assert_close(got, reference(SINKHORN, *args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_bytes_of_pre(form: str, delayed: bool) -> None:
    """Streams and fn once. What kernels wrote themselves comes from the cache; the sums of splits, in rows of 28
    numbers, are counted here, and the counters of two blocks of tokens."""
    args = (*pre_case(32, 4, 512, BF16), torch.rand(512), 1e-20, 1e-6, 2, 1e-20, False)
    args = args if delayed else (*args[:4], None, *args[5:])
    config = of_form(PRE, args, form)
    with count_traffic() as traffic:
        PRE.fn(*args, config=config, target=SM103)
    cost = spec_of(PRE).cost_of(*args).numbers()
    assert len(traffic._read - traffic._written) <= 1.05 * cost["read_bytes"]
    splits = -(-512 // config["SPAN"]) if config["SPAN"] else 1
    assert traffic.distinct_stored == cost["write_bytes"] + splits * 32 * 28 * 4 + 2 * 4 * config["ONE"]


@pytest.mark.parametrize("tokens", [1, 8, 40, 64, 256, 1024])
def test_sums_of_splits_are_small(tokens: int) -> None:
    """At the released width: below 6 % of what has to move anyway."""
    sizes = {"N": tokens, "n": 4, "D": 5120, "x_bytes": 2, "fn_bytes": 4}
    cost = spec_of(PRE).cost(**sizes).numbers()
    config = PRE.space(sizes, SM103)[0]
    assert config["SPAN"] > 0 and config["ONE"] == (tokens <= 64)
    assert 2 * -(-5120 // config["SPAN"]) * tokens * 28 * 4 <= 0.06 * (cost["read_bytes"] + cost["write_bytes"])


def test_bytes_of_post_and_sinkhorn() -> None:
    args = (
        torch.randn(16, 512).to(BF16),
        torch.randn(16, 4, 512).to(BF16),
        torch.rand(16, 4),
        torch.rand(16, 4, 4),
        True,
    )
    for template, call in ((POST, args), (SINKHORN, (torch.randn(64, 4, 4), 3, 1e-6))):
        with count_traffic() as traffic:
            next(runs(template, call, SM103, 1))
        cost = spec_of(template).cost_of(*call).numbers()
        assert traffic.distinct_loaded <= 1.05 * cost["read_bytes"] and traffic.stored == cost["write_bytes"]


def test_refuses() -> None:
    for template in (PRE, HEAD, POST):
        refusal = template.applies({"streams": torch.empty(1, 9, 16)})
        assert refusal is not None and "9 streams" in refusal
    refusal = SINKHORN.applies({"logits": torch.empty(1, 33, 33)})
    assert refusal is not None and "33" in refusal
