"""Hyper-connections and Sinkhorn against the released numbers and float64 oracles."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401

ops = torch.ops.dsv4
Loader = Callable[[str], dict[str, Tensor]]


def sinkhorn64(logits: Tensor, iters: int, eps: float) -> np.ndarray:
    out = np.empty(logits.shape)
    for where in np.ndindex(*logits.shape[:-2]):
        m = logits[where].double().numpy()
        m = np.exp(m - m.max(1, keepdims=True))
        m = m / m.sum(1, keepdims=True) + eps
        for turn in range(2 * iters - 1):
            m = m / (m.sum(turn % 2, keepdims=True) + eps)
        out[where] = m
    return out


@given(st.integers(1, 6), st.integers(1, 30), st.floats(0.1, 8.0), st.integers(0, 3))
def test_sinkhorn_matches_float64(n: int, iters: int, spread: float, batch: int) -> None:
    logits = torch.randn(batch, n, n) * spread
    out = ops.sinkhorn(logits, iters, 1e-6)
    np.testing.assert_allclose(out.numpy(), sinkhorn64(logits, iters, 1e-6), rtol=3e-5, atol=1e-6)


@given(st.integers(2, 6), st.floats(0.0, 2.0))
def test_sinkhorn_becomes_doubly_stochastic(n: int, spread: float) -> None:
    out = ops.sinkhorn(torch.randn(3, n, n) * spread, 400, 1e-6)
    assert (out > 0).all()
    torch.testing.assert_close(out.sum(-2), torch.ones(3, n), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.sum(-1), torch.ones(3, n), rtol=0, atol=1e-3)


def test_mix_gives_the_released_numbers(conformance: Loader) -> None:
    """One-hot streams read the columns of fn, so that the recorded mixes come out of the product."""
    data = conformance("parts")
    streams = torch.eye(64).view(64, 4, 16)
    fn = (data["hc.mixes"] / 8).T.contiguous()  # the root mean square of a one-hot row of 64 is 1/8
    for norm_first in (True, False):
        out = ops.hc_pre(streams, fn, data["hc.scale"], data["hc.base"], None, None, 0.0, 1e-6, 20, 0.0, norm_first)
        for have, name in zip(out[1:], ("pre", "post", "comb"), strict=True):
            torch.testing.assert_close(have, data[f"hc.{name}"], rtol=1e-5, atol=1e-5)


def mix64(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = streams.double().flatten(-2)
    return (flat / flat.pow(2).mean(-1, keepdim=True).add(eps).sqrt()) @ fn.double().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("given_pre", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_pre_matches_float64(dtype: torch.dtype, norm_first: bool, given_pre: bool, n: int) -> None:
    streams, width = torch.randn(2, 5, n, 24).to(dtype), 24
    fn, scale, base = torch.randn((2 + n) * n, n * width) * 0.2, torch.rand(3) + 0.5, torch.randn((2 + n) * n)
    weight, pre_in = torch.rand(width) + 0.5, torch.rand(2, 5, n) if given_pre else None
    x, pre, post, comb = ops.hc_pre(streams, fn, scale, base, pre_in, weight, 1e-6, 1e-5, 20, 1e-6, norm_first)

    mixes, b, s = mix64(streams, fn, 1e-6), base.double(), scale.double()
    want_pre = torch.sigmoid(mixes[..., :n] * s[0] + b[:n]) + 1e-5
    want_post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * s[1] + b[n : 2 * n])
    logits = (mixes[..., 2 * n :] * s[2] + b[2 * n :]).reshape(2, 5, n, n)
    for have, want in ((pre, want_pre), (post, want_post), (comb, torch.from_numpy(sinkhorn64(logits, 20, 1e-5)))):
        assert have.dtype == torch.float32
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    p = want_pre if pre_in is None else pre_in.double()
    y = torch.einsum("btn,btnd->btd", p, streams.double())
    y = y / y.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * weight.double()
    assert x.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)
    bare = ops.hc_pre(streams, fn, scale, base, pre_in, None, 1e-6, 1e-5, 20, 1e-6, norm_first)[0]
    assert torch.equal(ops.rms_norm(bare, weight, 1e-6, "fp32"), x)


def test_post_sums_over_the_first_axis_of_comb() -> None:
    y, streams = torch.randn(3, 8), torch.randn(3, 4, 8)
    post, comb = torch.rand(3, 4), torch.rand(3, 4, 4)
    want = torch.zeros(3, 4, 8, dtype=torch.float64)
    for j in range(4):
        want[:, j] = post[:, j, None].double() * y.double()
        for i in range(4):
            want[:, j] += comb[:, i, j, None].double() * streams[:, i].double()
    for fp32 in (True, False):
        torch.testing.assert_close(ops.hc_post(y, streams, post, comb, fp32).double(), want, rtol=1e-5, atol=1e-5)


def test_post_rounds_once_in_fp32() -> None:
    y, streams = torch.randn(50, 8).bfloat16(), torch.randn(50, 4, 8).bfloat16()
    post, comb = torch.rand(50, 4), torch.rand(50, 4, 4)
    exact = post.double()[..., None] * y.double()[:, None] + comb.double().transpose(1, 2) @ streams.double()
    once = ops.hc_post(y, streams, post, comb, True)
    assert once.dtype == torch.bfloat16
    assert ((once.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()
    assert not torch.equal(once, ops.hc_post(y, streams, post, comb, False))


def test_head_matches_float64() -> None:
    streams, fn, scale, base = torch.randn(2, 3, 4, 16), torch.randn(4, 64), torch.rand(1), torch.randn(4)
    pre = torch.sigmoid(mix64(streams, fn, 1e-6) * scale.double() + base.double()) + 1e-6
    want = torch.einsum("btn,btnd->btd", pre, streams.double())
    torch.testing.assert_close(ops.hc_head(streams, fn, scale, base, 1e-6, 1e-6).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_post_and_pre_are_the_two_after_each_other(fp32: bool, delayed: bool) -> None:
    y, streams = torch.randn(2, 3, 16).bfloat16(), torch.randn(2, 3, 4, 16).bfloat16()
    post, comb, pre_in = torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4) if delayed else None
    rest = (torch.randn(24, 64), torch.rand(3), torch.randn(24), pre_in, torch.rand(16), 1e-6, 1e-6, 3, 1e-6, False)
    got = ops.hc_post_pre(y, streams, post, comb, fp32, *rest)
    made = ops.hc_post(y, streams, post, comb, fp32)
    for have, want in zip(got, (made, *ops.hc_pre(made, *rest)), strict=True):
        assert torch.equal(have, want)
    with pytest.raises(ValueError, match=r"dsv4::hc_pre: shape of fn is \[24, 64\]; allowed: \[24, 68\]"):
        ops.hc_post_pre(torch.ones(1, 17), torch.ones(1, 4, 17), torch.ones(1, 4), torch.ones(1, 4, 4), fp32, *rest)


def test_arguments_are_checked() -> None:
    streams, fn, scale, base = torch.ones(2, 4, 8), torch.ones(24, 32), torch.ones(3), torch.ones(24)

    def pre(**change: object) -> None:
        args = {
            "streams": streams,
            "fn": fn,
            "scale": scale,
            "base": base,
            "pre_in": None,
            "norm_weight": None,
            "mix_eps": 1e-6,
            "hc_eps": 1e-6,
            "iters": 20,
            "norm_eps": 1e-6,
            "norm_first": True,
        } | change
        ops.hc_pre(*args.values())

    with pytest.raises(ValueError, match=r"dsv4::hc_pre: shape of fn is \[24, 31\]; allowed: \[24, 32\]"):
        pre(fn=fn[:, :31])
    with pytest.raises(ValueError, match=r"shape of scale is \[1\]; allowed: \[3\]"):
        pre(scale=scale[:1])
    with pytest.raises(ValueError, match=r"shape of pre_in is \[2, 3\]; allowed: \[2, 4\]"):
        pre(pre_in=torch.ones(2, 3))
    with pytest.raises(ValueError, match="iters is 0; allowed: > 0"):
        pre(iters=0)
    with pytest.raises(ValueError, match=r"dsv4::sinkhorn: shape of logits is \[3, 4\]; allowed: \[..., n, n\]"):
        ops.sinkhorn(torch.ones(3, 4), 20, 1e-6)
    with pytest.raises(ValueError, match=r"dsv4::hc_post: shape of comb is \[2, 4, 3\]; allowed: \[2, 4, 4\]"):
        ops.hc_post(torch.ones(2, 8), streams, torch.ones(2, 4), torch.ones(2, 4, 3), True)
    with pytest.raises(ValueError, match=r"dsv4::hc_head: shape of fn is \[24, 32\]; allowed: \[4, 32\]"):
        ops.hc_head(streams, fn, torch.ones(1), torch.ones(4), 1e-6, 1e-6)
