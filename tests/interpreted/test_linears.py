"""The Triton products of several weights against float64: shares of K, odd sizes, strides, and the bytes that move."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.linears import TEMPLATES
from dscompile.templates.triton.record import config
from support.kernels import named, parameters, reference, runs, space, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SM103 = get_target("sm_103a")
SHARED = config(4, 2, BLOCK_T=16, BLOCK_N=16, BLOCK_K=32, SPLITS=3)


def case(tokens: int, size: int, rows: tuple[int, ...], kind: torch.dtype) -> list[Any]:
    weights = [(torch.randn(n, size) * size**-0.5).to(kind) for n in rows]
    return [torch.randn(tokens, size).to(kind), *weights, None, None][:5]


def close(got: Tensor, args: list[Any]) -> None:
    """One rounding of sums in fp32, whose own error is that of their terms."""
    x, *weights = [a for a in args if a is not None]
    w = torch.cat(weights).double()
    want, size = x.double() @ w.T, x.double().abs() @ w.abs().T
    assert got.dtype == x.dtype and got.shape == want.shape
    bound = torch.finfo(x.dtype).eps * want.abs() + x.shape[1] * 2**-23 * size + torch.finfo(x.dtype).tiny
    assert ((got.double() - want).abs() <= bound).all()


def test_takes_the_arguments_of_its_op() -> None:
    assert parameters(TEMPLATE) == [argument.name for argument in spec_of(TEMPLATE).op._schema.arguments]


@settings(max_examples=25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_equals_float64(data: st.DataObject) -> None:
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rows = tuple(draw(1, 70) for _ in range(draw(2, 4)))
    args = case(draw(0, 40), draw(1, 150), rows, data.draw(st.sampled_from([FP32, BF16, FP16])))
    if data.draw(st.booleans()):
        chosen = config(4, 2, BLOCK_T=16, BLOCK_N=16, BLOCK_K=32, SPLITS=draw(1, 6))
    else:
        chosen = data.draw(st.sampled_from(space(TEMPLATE, tuple(args), SM103)))
    close(TEMPLATE.fn(*args, config=chosen, target=SM103), args)


@pytest.mark.parametrize("tokens", [8, 70])
def test_the_configs_of_the_template(tokens: int, target: Target) -> None:
    args = case(tokens, 512, (80, 32), BF16)
    close(reference(TEMPLATE, *args), args)
    for got in runs(TEMPLATE, tuple(args), target):
        close(got, args)


def test_shares_are_added_in_their_order() -> None:
    """The same bits whoever comes last, and those of one program that adds the same shares."""
    args = case(5, 96, (20, 33), FP32)
    args[0] *= 1000.0 ** torch.linspace(-1, 1, 96)
    got = TEMPLATE.fn(*args, config=SHARED, target=SM103)
    parts = [TEMPLATE.fn(args[0][:, i : i + 32], *(w[:, i : i + 32] for w in args[1:3]), None, None,
                         config=config(4, 2, BLOCK_T=16, BLOCK_N=16, BLOCK_K=32, SPLITS=1), target=SM103)
             for i in (0, 32, 64)]  # fmt: skip
    assert torch.equal(got, parts[0] + parts[1] + parts[2])


def test_strides() -> None:
    """Rows of a wider tensor, parts of one weight, and weights that are stored by columns."""
    x, w0, w1, w2, w3 = case(6, 48, (20, 18, 9, 4), BF16)
    both = torch.cat((w0, w1))
    args = [torch.cat((x, x), 1)[:, 48:], both[:20], both[20:], w2.T.contiguous().T, torch.cat((w3, w3), 1)[:, :48]]
    got = TEMPLATE.fn(*args, config=SHARED, target=SM103)
    assert torch.equal(got, TEMPLATE.fn(x, w0, w1, w2, w3, config=SHARED, target=SM103))
    close(got, args)


def test_a_nan_token_stays_where_it_is() -> None:
    args = case(5, 70, (20, 33), BF16)
    clean = TEMPLATE.fn(*args, config=SHARED, target=SM103)
    args[0][2] = torch.nan
    got = TEMPLATE.fn(*args, config=SHARED, target=SM103)
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("splits", [1, 4])
def test_bytes(splits: int) -> None:
    """Everything once; shares of K add their sums in fp32, and a counter for each tile."""
    args = case(8, 512, (96, 32), BF16)
    with count_traffic() as traffic:
        TEMPLATE.fn(*args, config=config(4, 2, BLOCK_T=16, BLOCK_N=32, BLOCK_K=64, SPLITS=splits), target=SM103)
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    handed = 0 if splits == 1 else splits * 8 * 128 * 4
    assert traffic.distinct_loaded == cost["read_bytes"] + handed
    assert traffic.stored == cost["write_bytes"] + handed + (4 * 4 if splits > 1 else 0)


def test_refuses() -> None:
    args = case(3, 8, (4, 0), BF16)
    assert "(0, 8)" in str(TEMPLATE.applies(named(TEMPLATE, tuple(args))))
