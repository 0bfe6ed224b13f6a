"""The Triton norm with its product: the bits of the norm's template, and the product against float64."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton import rms_norm
from dscompile.templates.triton.norm_linear import TEMPLATES
from dscompile.templates.triton.record import config
from support.kernels import named, parameters, reference, runs, space, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MODES = ("fp32", "scale_cast", "cast_before_weight")
SM103 = get_target("sm_103a")
SMALL = config(4, 2, BLOCK_T=16, BLOCK_N=16, BLOCK_K=32)


def case(tokens: int, size: int, rows: int, kind: torch.dtype, mode: str = "fp32", weighted: bool = True) -> list[Any]:
    norm_weight = torch.rand(size).add(0.5).to(FP32 if mode == "fp32" else kind) if weighted else None
    return [torch.randn(tokens, size).to(kind), norm_weight, 1e-6, mode, torch.randn(rows, size).to(kind)]


def close(got: tuple[Tensor, Tensor], args: list[Any]) -> None:
    """The norm: a step of its dtype, where sums of squares in another order round the other way (three where it rounds
    the scale and twice more). The product of what the kernel itself has normalised: one rounding of sums in fp32.
    """
    y, normed = got
    kind, size = args[0].dtype, args[0].shape[1]
    want = reference(TEMPLATE, *args)[1]
    eps = torch.finfo(kind).eps
    assert normed.dtype == y.dtype == kind and normed.shape == want.shape
    steps = 1 if args[3] == "fp32" else 3
    assert ((normed.double() - want.double()).abs() <= (steps * eps + 2e-6) * want.double().abs()).all()
    exact, sums = (f(normed.double()) @ f(args[4].double()).T for f in (lambda t: t, torch.abs))
    bound = eps * exact.abs() + size * 2**-23 * sums + torch.finfo(kind).tiny
    assert y.shape == exact.shape and ((y.double() - exact).abs() <= bound).all()


def test_takes_the_arguments_of_its_op() -> None:
    assert parameters(TEMPLATE) == [argument.name for argument in spec_of(TEMPLATE).op._schema.arguments]


@settings(max_examples=20, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_equals_norm_and_product(data: st.DataObject) -> None:
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    args = case(draw(0, 40), draw(1, 150), draw(1, 80), data.draw(st.sampled_from([FP32, BF16, FP16])),
                data.draw(st.sampled_from(MODES)), data.draw(st.booleans()))  # fmt: skip
    chosen = data.draw(st.sampled_from([SMALL, *space(TEMPLATE, tuple(args), SM103)]))
    close(TEMPLATE.fn(*args, config=chosen, target=SM103), args)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [True, False])
def test_same_bits_as_the_norm_alone(mode: str, weighted: bool) -> None:
    """Squares of integers have exact sums in every order: then nothing may differ, for every rounding."""
    args = case(40, 96, 33, BF16, mode, weighted)
    args[0] = torch.randint(-20, 21, (40, 96)).to(BF16)
    (norm,) = rms_norm.TEMPLATES
    alone = norm.fn(*args[:4], config=config(4), target=SM103)
    y, normed = TEMPLATE.fn(*args, config=SMALL, target=SM103)
    assert torch.equal(normed, alone)
    close((y, normed), args)


@pytest.mark.parametrize("tokens", [8, 40, 130])
def test_the_configs_of_the_template(tokens: int, target: Target) -> None:
    args = case(tokens, 256, 80, BF16)
    close(reference(TEMPLATE, *args), args)
    for got in runs(TEMPLATE, tuple(args), target):
        close(got, args)


def test_strides_and_rows_of_zeros() -> None:
    """With eps 0 a row of zeros is NaN, and only that row."""
    args = case(6, 50, 20, FP32)
    args[0] = torch.cat((args[0], args[0]), 1)[:, 50:]
    args[4] = args[4].T.contiguous().T
    args[2] = 0.0
    close(TEMPLATE.fn(*args, config=SMALL, target=SM103), args)
    args[0][3] = 0
    for part in TEMPLATE.fn(*args, config=SMALL, target=SM103):
        assert part[3].isnan().all() and part[[0, 1, 2, 4, 5]].isfinite().all()


def test_bytes() -> None:
    """Everything once, the rows twice."""
    args = case(8, 256, 128, BF16)
    with count_traffic() as traffic:
        TEMPLATE.fn(*args, config=config(4, 2, BLOCK_T=16, BLOCK_N=64, BLOCK_K=64), target=SM103)
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    assert traffic.distinct_loaded == cost["read_bytes"] and traffic.stored == cost["write_bytes"]
    assert traffic.loaded == 2 * (2 * 8 * 256 * 2 + 256 * 4) + 128 * 256 * 2  # x twice, by two programs


@pytest.mark.parametrize(
    ("shape", "reason"), [((257, 8, 4), "257 rows"), ((3, 8200, 4), "8200"), ((3, 8, 0), "weight")]
)
def test_refuses(shape: tuple[int, int, int], reason: str) -> None:
    assert reason in str(TEMPLATE.applies(named(TEMPLATE, tuple(case(*shape, BF16)))))
