"""The Triton kernels from one sublayer into the next against the references of both halves, and their bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.targets import get_target
from dscompile.templates.triton.hc import TEMPLATES as HC
from dscompile.templates.triton.hc_post_pre import TEMPLATES
from support.kernels import reference, space, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
PRE = HC[0]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = st.sampled_from([FP32, BF16, FP16])
SM103 = get_target("sm_103a")


def case(tokens: int, n: int, size: int, kind: torch.dtype, fp32: bool = True, delayed: bool = True) -> list[Any]:
    mixes = (2 + n) * n
    return [
        torch.randn(tokens, size).to(kind), torch.randn(tokens, n, size).to(kind), torch.rand(tokens, n) * 2,
        torch.rand(tokens, n, n), fp32, torch.randn(mixes, n * size) * (n * size) ** -0.5, torch.rand(3),
        torch.randn(mixes), torch.rand(tokens, n) if delayed else None, torch.rand(size) + 0.5, 1e-20, 1e-6, 3, 1e-20,
        False,
    ]  # fmt: skip


def close(got: tuple[torch.Tensor, ...], args: list[Any]) -> None:
    """The streams are off by the order of a sum: below one rounding of their type. All else is then what `hc_pre` makes
    of these very streams."""
    want = reference(TEMPLATE, *args)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
    y, streams, post, comb, fp32 = args[:5]
    scale = post[..., None] * y.float().abs()[..., None, :] + comb.mT @ streams.float().abs()
    roundings = 1 if fp32 else 3
    bound = roundings * torch.finfo(streams.dtype).eps * scale + 1e-6
    assert ((got[0].double() - want[0].double()).abs() <= bound).all()
    x, *gates = reference(PRE, got[0], *args[5:])
    for a, b in zip(got[2:], gates):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    tolerance = 4 * torch.finfo(streams.dtype).eps + 1e-5
    torch.testing.assert_close(got[1].float(), x.float(), rtol=tolerance, atol=tolerance)


@settings(max_examples=12)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    tokens, n = data.draw(st.integers(0, 19)), data.draw(st.sampled_from([1, 2, 3, 4]))
    size, kind = data.draw(st.sampled_from([16, 72, 130])), data.draw(KINDS)
    torch.manual_seed(tokens * size)
    args = case(tokens, n, size, kind, data.draw(st.booleans()), data.draw(st.booleans()))
    args[0] = args[0].to(data.draw(KINDS))
    if data.draw(st.booleans()):
        args[9] = None
    configs = space(TEMPLATE, tuple(args), SM103)
    close(TEMPLATE.fn(*args, config=data.draw(st.sampled_from(configs)), target=SM103), args)


def test_batches_and_odd_strides() -> None:
    flat = case(6, 4, 64, BF16)
    odd = list(flat)
    wide = torch.zeros(2, 3, 4, 2, 64, dtype=BF16)
    wide[..., 1, :] = flat[1].view(2, 3, 4, 64)
    odd[0], odd[1] = torch.cat((flat[0], flat[0]), -1).view(2, 3, 128)[..., 64:], wide[..., 1, :]
    odd[2], odd[3] = flat[2].view(2, 3, 4).mT.contiguous().mT, flat[3].view(2, 3, 4, 4).mT.contiguous().mT
    odd[8] = flat[8].view(2, 3, 4)
    for config in space(TEMPLATE, tuple(flat), SM103)[::2]:
        want = TEMPLATE.fn(*flat, config=config, target=SM103)
        for a, b in zip(TEMPLATE.fn(*odd, config=config, target=SM103), want):
            assert torch.equal(a.flatten(0, 1), b)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_nan_token_stays_where_it_is() -> None:
    args = case(5, 4, 64, BF16)
    for config in space(TEMPLATE, tuple(args), SM103)[::2]:
        clean = TEMPLATE.fn(*args, config=config, target=SM103)
        dirty = args[0].clone()
        dirty[2] = float("nan")
        got = TEMPLATE.fn(dirty, *args[1:], config=config, target=SM103)
        for a, b in zip(got, clean):
            assert a[2].isnan().any() and torch.equal(a[[0, 1, 3, 4]], b[[0, 1, 3, 4]])


def test_the_counters_are_left_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call with what the first left behind gives the same."""
    from dscompile.templates.triton import hc

    kept = torch.zeros(8, dtype=torch.int32)
    monkeypatch.setattr(hc, "counters", lambda like, count: kept)
    args = case(20, 4, 256, BF16)
    config = space(TEMPLATE, tuple(args), SM103)[0]
    first, second = (TEMPLATE.fn(*args, config=config, target=SM103) for _ in range(2))
    assert not kept.any() and all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("delayed", [True, False])
def test_bytes(delayed: bool) -> None:
    """Streams, y and fn once, the new streams once, in every form; beside it sums of splits and counters."""
    args = case(17, 4, 256, BF16, delayed=delayed)
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    seen = set()
    for config in space(TEMPLATE, tuple(args), SM103):
        form = bool(config["SPAN"]), config["ONE"]
        if form in seen:
            continue
        seen.add(form)
        with count_traffic() as traffic:
            TEMPLATE.fn(*args, config=config, target=SM103)
        assert len(traffic._read - traffic._written) <= 1.05 * cost["read_bytes"]
        splits = -(-256 // config["SPAN"]) if config["SPAN"] else 1
        assert traffic.distinct_stored == cost["write_bytes"] + splits * 17 * 28 * 4 + 2 * 4 * config["ONE"]
    assert len(seen) == 3


def test_refuses() -> None:
    refusal = TEMPLATE.applies({"streams": torch.empty(1, 9, 16)})
    assert refusal is not None and "9 streams" in refusal
    assert all(not c["ONE"] for c in TEMPLATE.space({"N": 8, "n": 4, "D": 8320}, SM103))
