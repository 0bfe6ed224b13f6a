"""The Triton kernels of the exchange between devices against their references, bit for bit, and their bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.targets import Target, get_target
from dscompile.templates.triton.exchange import TEMPLATES
from support.kernels import reference, runs, space, spec_of
from support.triton_interpreter import count_traffic

PACK, COMBINE = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
WINDOW = "fp8_g32_ue8m0"
KINDS = st.sampled_from([FP32, BF16, FP16])
SM103 = get_target("sm_103a")


def check(template: Any, args: tuple[Any, ...], target: Target = SM103, most: int = 3) -> None:
    want = reference(template, *args)
    for got in runs(template, args, target, most):
        assert got.dtype == want.dtype and got.is_contiguous() and torch.equal(got, want)


@settings(max_examples=15)
@given(st.data())
def test_pack(data: st.DataObject) -> None:
    tokens, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 12))
    format = data.draw(st.sampled_from([WINDOW, "fp4_g32_ue8m0", "fp4_g16_e4m3"]))
    size, seed = data.draw(st.sampled_from([32, 96, 544])), data.draw(st.integers(0, 99))
    torch.manual_seed(seed)
    x = (torch.randn(tokens, size) * torch.logspace(-6, 4, size)).to(data.draw(st.sampled_from([FP32, BF16])))
    token = torch.randint(-1, tokens, (slots,), dtype=data.draw(st.sampled_from([torch.int64, torch.int32])))
    check(PACK, (x, token, format))


def test_rows_of_the_released_size(target: Target) -> None:
    x = torch.randn(3, 5120).to(BF16)
    check(PACK, (x, torch.tensor([2, -1, 0, 0, 1]), WINDOW), target, 2)


def test_special_values(target: Target) -> None:
    """Zeros with both signs, numbers below the floor, infinities and NaN: in their group and nowhere else."""
    x = torch.randn(5, 128)
    x[0], x[1] = 0.0, -0.0
    x[2] *= 1e-30
    x[3, 40], x[4, 70], x[4, 100] = float("nan"), float("inf"), -float("inf")
    check(PACK, (x, torch.tensor([4, 3, 2, 1, 0, -1]), WINDOW), target)
    check(PACK, (x.to(BF16), torch.tensor([4, 3, 2, 1, 0, -1]), WINDOW), target)


@settings(max_examples=15)
@given(st.data())
def test_combine(data: st.DataObject) -> None:
    slots, tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 6))
    count, size = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 33, 64, 1100]))
    torch.manual_seed(size * count)
    rows = torch.randn(slots, size).to(data.draw(KINDS))
    slot = torch.randint(-1, slots, (tokens, count), dtype=data.draw(st.sampled_from([torch.int64, torch.int32])))
    weight = torch.rand(tokens, count).to(data.draw(KINDS)) if data.draw(st.booleans()) else None
    check(COMBINE, (rows, slot, weight))


def test_indices_outside_are_none(target: Target) -> None:
    """What no index names may be NaN, also the weight of no row."""
    x = torch.randn(4, 64).to(BF16)
    x[3] = float("nan")
    far = torch.tensor([0, 2**31, -(2**40), 2, 4, -2])
    want = reference(PACK, x, torch.tensor([0, -1, -1, 2, -1, -1]), WINDOW)
    for got in runs(PACK, (x, far, WINDOW), target):
        assert torch.equal(got, want)
    weight = torch.rand(2, 3)
    want = reference(COMBINE, x, torch.tensor([[0, -1, 2], [-1, -1, 1]]), weight)
    weight[0, 1] = weight[1, 0] = float("nan")
    for got in runs(COMBINE, (x, torch.tensor([[0, 2**32, 2], [-(2**33), -1, 1]]), weight), target):
        assert torch.equal(got, want)


def test_no_rows_and_odd_strides() -> None:
    check(PACK, (torch.empty(0, 64), torch.full((3,), -1), WINDOW))
    check(COMBINE, (torch.empty(0, 40), torch.full((3, 2), -1), None))
    wide = torch.randn(5, 200)
    check(PACK, (wide[:, 7:71], torch.randint(-1, 5, (12,))[::2], WINDOW))
    check(PACK, (torch.randn(64, 5).T, torch.randint(-1, 5, (6,)), WINDOW))
    check(COMBINE, (wide[:, 3:60], torch.randint(-1, 5, (3, 4)).T, torch.rand(3, 4).T))


def test_bytes() -> None:
    x, token = torch.randn(4, 1024).to(BF16), torch.arange(24) // 6
    rows, slot = torch.randn(24, 1024).to(BF16), torch.arange(24).view(4, 6)
    for template, args in ((PACK, (x, token, WINDOW)), (COMBINE, (rows, slot, torch.rand(4, 6)))):
        cost = spec_of(template).cost_of(*args).numbers()
        for config in space(template, args, SM103):
            with count_traffic() as traffic:
                template.fn(*args, config=config, target=SM103)
            assert traffic.distinct_loaded <= 1.05 * cost["read_bytes"]
            assert traffic.distinct_stored == traffic.stored == cost["write_bytes"]


@pytest.mark.parametrize(
    ("format", "said"), [("bf16", "plain"), ("fp8_g128_fp32", "scales"), ("fp8_g64_ue8m0_tail64", "tail")]
)
def test_refuses(format: str, said: str) -> None:
    refusal = PACK.applies({"x": torch.empty(1, 512), "format": format})
    assert refusal is not None and said in refusal
    refusal = COMBINE.applies({"rows": torch.empty(1, 8), "slot": torch.empty(2, 65)})
    assert refusal is not None and "65 rows" in refusal
