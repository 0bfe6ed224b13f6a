"""The Triton grouped output projection against its reference, and the bytes that it moves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.grouped_output import TEMPLATES
from support.kernels import reference, runs, space, spec_of
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SM103 = get_target("sm_103a")


def case(n: int, g: int, size: int, rank: int, out: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    wo_a, wo_b = torch.randn(g, rank, size) * size**-0.5, torch.randn(out, g * rank) * (g * rank) ** -0.5
    return torch.randn(n, g, size).to(kind), wo_a.to(kind), wo_b.to(kind)


def close(got: Tensor, args: tuple[Tensor, Tensor, Tensor]) -> None:
    """Sums in another order; in a 16-bit type each result of both products may round the other way."""
    o, wo_a, wo_b = args
    want = reference(TEMPLATE, *args)
    low = torch.einsum("...gi,gri->...gr", o.double().abs(), wo_a.double().abs()).flatten(-2)
    bound = 3 * torch.finfo(o.dtype).eps * (low @ wo_b.double().abs().T) + 1e-6
    assert got.dtype == want.dtype and got.shape == want.shape
    assert ((got.double() - want.double()).abs() <= bound).all()


@settings(max_examples=20)
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    n, g = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([1, 2, 3, 8]))
    size, rank = data.draw(st.sampled_from([8, 40, 128])), data.draw(st.sampled_from([4, 33, 64]))
    out, kind = data.draw(st.sampled_from([16, 70, 130])), data.draw(st.sampled_from([FP32, BF16, FP16]))
    torch.manual_seed(n * g)
    args = case(n, g, size, rank, out, kind)
    config = data.draw(st.sampled_from(space(TEMPLATE, args, SM103)))
    close(TEMPLATE.fn(*args, config=config, target=SM103), args)


def test_many_blocks_of_tokens() -> None:
    """More blocks than pass together, and a rest."""
    args = case(16 * 9 + 3, 2, 16, 16, 70, BF16)
    for config in TEMPLATE.space({"N": 8, "x_bytes": 2, "weight_bytes": 2}, SM103)[:3]:
        close(TEMPLATE.fn(*args, config=config, target=SM103), args)


def test_a_nan_token_stays_where_it_is() -> None:
    o, wo_a, wo_b = case(5, 2, 40, 16, 70, BF16)
    clean = next(runs(TEMPLATE, (o, wo_a, wo_b), SM103, 1))
    o[2] = float("nan")
    got = next(runs(TEMPLATE, (o, wo_a, wo_b), SM103, 1))
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_batches_and_odd_strides(target: Target) -> None:
    o, wo_a, wo_b = case(6, 2, 32, 16, 48, FP32)
    wide = torch.zeros(2, 3, 2, 70)
    wide[..., 5:37] = o.view(2, 3, 2, 32)
    args = (wide[..., 5:37], wo_a.mT.contiguous().mT, wo_b.T.contiguous().T)
    close(next(runs(TEMPLATE, args, target, 1)), args)


@pytest.mark.parametrize("tokens", [8, 100])
def test_bytes(tokens: int) -> None:
    """Everything once; between the products lie tokens x groups x rank values."""
    args = case(tokens, 4, 128, 64, 128, BF16)
    with count_traffic() as traffic:
        next(runs(TEMPLATE, args, SM103, 1))
    cost = spec_of(TEMPLATE).cost_of(*args).numbers()
    assert len(traffic._read - traffic._written) <= 1.05 * cost["read_bytes"]
    assert traffic.stored == cost["write_bytes"] + tokens * 4 * 64 * 2


def test_refuses() -> None:
    refusal = TEMPLATE.applies({"wo_a": torch.empty(2, 0, 8), "wo_b": torch.empty(8, 0)})
    assert refusal is not None and "(2, 0, 8)" in refusal
