"""The Triton sparse attention over window rows in a pool: as over gathered rows, without those that are not there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.sparse_attention import TEMPLATES
from support.attention import CONFIGS, FP4, FP8, assert_close, blocks, case
from support.kernels import named, parameters, reference, runs, spec_of
from support.triton_interpreter import count_traffic

TEMPLATE, PAGED = TEMPLATES
SM90 = get_target("sm_90a")
ONE, SHARED = CONFIGS[1], CONFIGS[2]  # tokens alone, parts combined at once; two tokens together, a second launch


def pooled(args: list[Any], gone: float = 0.3) -> tuple[list[Any], list[Any], Tensor]:
    """The call over a pool in which the rows lie mixed with others, some without a slot; the gathered call; which."""
    window_kv = args[1]
    batch, rows, width = window_kv.shape
    pool = torch.full((2 * batch * rows + 3, width), torch.nan if window_kv.is_floating_point() else 255)
    slots = torch.randperm(len(pool))[: batch * rows].view(batch, rows)
    pool = pool.to(window_kv.dtype)
    pool[slots] = window_kv
    there = torch.rand(batch, rows) >= gone
    return [args[0], pool, slots.where(there, -1), *args[2:]], args, there


def run_paged(args: list[Any], chosen: Any) -> Tensor:
    assert PAGED.applies(named(PAGED, tuple(args))) is None
    return PAGED.fn(*args, config=chosen, target=SM90)


def test_takes_the_arguments_of_its_op() -> None:
    assert parameters(PAGED) == [argument.name for argument in spec_of(PAGED).op._schema.arguments]


@pytest.mark.parametrize("mode", ["list", "count", "none"])
@pytest.mark.parametrize("formats", [("none", "none"), (FP8, FP4)])
def test_rows_that_are_not_there(mode: str, formats: tuple[str, str]) -> None:
    """Also a whole window that is not there, of one sequence; what stands in rows without a slot is NaN."""
    args, dense, there = pooled(case(mode=mode, formats=formats, tokens=4))
    there[1] = False
    args[2][1] = -1
    assert_close(reference(PAGED, *args), dense, there)
    for chosen in (ONE, SHARED, blocks(tokens=2, heads=8)):
        assert_close(run_paged(args, chosen), dense, there)


def test_nothing_to_see_is_zero() -> None:
    args, _, _ = pooled(case(mode="none", half=0), gone=1.1)
    for chosen in (ONE, SHARED):
        assert torch.equal(run_paged(args, chosen), torch.zeros_like(args[0]))


def test_same_bits_as_gathered_rows() -> None:
    args, dense, _ = pooled(case(formats=(FP8, FP4)), gone=-1.0)
    assert torch.equal(run_paged(args, ONE), TEMPLATE.fn(*dense, config=ONE, target=SM90))


@pytest.mark.parametrize("bad", [83, -2, 2**40, 2**31 + 1])
def test_a_slot_out_of_range_is_nobody(bad: int) -> None:
    args, dense, there = pooled(case(position=19), gone=0.0)
    args[2][:, 18], there[:, 18] = bad, False
    for chosen in (ONE, SHARED):
        assert_close(run_paged(args, chosen), dense, there)


def test_strides_and_integer_types() -> None:
    args, dense, there = pooled(case())
    args[1] = torch.cat((args[1], args[1]), 1)[:, :32]
    args[2] = args[2].int().repeat_interleave(2, 1)[:, ::2]
    assert_close(run_paged(args, ONE), dense, there)
    args[2] = torch.cat((args[2], args[2]), 1)[:, :20]
    assert_close(run_paged(args, SHARED), dense, there)


def test_the_configs_of_the_template(target: Target) -> None:
    args, dense, there = pooled(case(1, 1, 16, 64, formats=(FP8, FP4)))
    for got in runs(PAGED, tuple(args), target):
        assert_close(got, dense, there)


def test_bytes() -> None:
    """No copy of the window: its rows once, from the pool, and their slots."""
    args = case(2, 1, 16, 128, 16, 16, 256, 48, formats=(FP8, FP4), half=16, position=900)
    args[6] = torch.stack([torch.randperm(256)[:48] for _ in range(2)]).unsqueeze(1)
    args, _, _ = pooled(args, gone=-1.0)
    cost = spec_of(PAGED).cost_of(*args).numbers()
    handed = 2 * 2 * 16 * (128 + 2) * 4
    with count_traffic() as traffic:
        run_paged(args, blocks(splits=2, combine=1))
    assert traffic.distinct_stored - 8 == traffic.stored - 8 == cost["write_bytes"] + handed
    assert traffic.distinct_loaded <= 1.1 * cost["read_bytes"] + handed
