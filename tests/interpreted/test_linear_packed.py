"""The Triton products with stored FP8 weights against their references: every form, odd sizes, bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.linear_packed import TEMPLATES
from support.kernels import reference, space, spec_of
from support.triton_interpreter import count_traffic

LINEAR, PAIR, OUTPUT = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def stored(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    low = 127 - int(columns.bit_length()) // 2
    scale = torch.randint(low, low + 3, (rows // 32, columns // 32)).byte()
    return torch.randn(rows, columns).to(torch.float8_e4m3fn), scale


def close(got: Tensor, want: Tensor) -> None:
    """Sums of exact products in fp32, in another order, then one rounding."""
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).abs()
    largest = want.double().abs().amax() if want.numel() else 0.0
    assert (error <= torch.finfo(got.dtype).eps * want.double().abs() + 1e-5 * largest).all()


@settings(max_examples=20)
@given(st.data())
def test_linear(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(0, 21)), 32 * data.draw(st.integers(1, 5))
    size, kind = 32 * data.draw(st.sampled_from([1, 3, 8, 13])), data.draw(st.sampled_from([FP32, BF16, FP16]))
    torch.manual_seed(rows * columns + size)
    args = (torch.randn(rows, size).to(kind), *stored(columns, size))
    target = get_target(data.draw(st.sampled_from(["sm_90a", "sm_103a"])))
    config = data.draw(st.sampled_from(space(LINEAR, args, target)))
    close(LINEAR.fn(*args, config=config, target=target), reference(LINEAR, *args))


@pytest.mark.parametrize("rows", [70, 300])
def test_many_rows_are_rounded_in_front(rows: int, target: Target) -> None:
    args = (torch.randn(2, rows // 2, 96).to(BF16), *stored(160, 96))
    config = space(LINEAR, args, target)[0]
    assert not config["ROUND"]
    close(LINEAR.fn(*args, config=config, target=target), reference(LINEAR, *args))


def test_a_split_sum_and_bytes_as_weight(target: Target) -> None:
    x, weight, scale = torch.randn(5, 1024).to(BF16), *stored(64, 1024)
    wide = torch.zeros(5, 2000, dtype=BF16)
    wide[:, 3:1027] = x
    args = (wide[:, 3:1027], weight.view(torch.uint8), scale)
    config = space(LINEAR, args, target)[0]
    assert config["SPLITS"] == 8
    results = [LINEAR.fn(*args, config=config, target=target) for _ in range(2)]
    close(results[0], reference(LINEAR, *args))
    assert torch.equal(*results)


@settings(max_examples=10)
@given(st.data())
def test_two_weights(data: st.DataObject) -> None:
    rows, size = data.draw(st.integers(0, 19)), 32 * data.draw(st.sampled_from([1, 5, 16]))
    widths = [32 * data.draw(st.integers(1, 6)) for _ in range(2)]
    torch.manual_seed(rows + size)
    args = (torch.randn(rows, size).to(BF16), *stored(widths[0], size), *stored(widths[1], size))
    target = get_target(data.draw(st.sampled_from(["sm_90a", "sm_103a"])))
    config = data.draw(st.sampled_from(space(PAIR, args, target)))
    got = PAIR.fn(*args, config=config, target=target)
    close(got, reference(PAIR, *args))
    parts = [LINEAR.fn(args[0], *args[i : i + 2], config=config, target=target) for i in (1, 3)]
    assert torch.equal(got, torch.cat(parts, 1))


@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_grouped_output(tokens: int, target: Target) -> None:
    wo_b, scale = stored(64, 96)
    args: tuple[Any, ...] = (torch.randn(tokens, 3, 40).to(BF16), (torch.randn(3, 32, 40) / 6).to(BF16), wo_b, scale)
    for config in space(OUTPUT, args, target)[:2]:
        got, want = OUTPUT.fn(*args, config=config, target=target), reference(OUTPUT, *args)
        # A value between the products may round to the next bf16 and then to the next code, 1/8 of itself.
        error = (got.double() - want.double()).abs()
        assert (error <= 0.02 * want.double().abs().amax()).all() and (error > 0).double().mean() < 0.2


def test_bytes(target: Target) -> None:
    """One tile over the rows of x: weights are read once."""
    args = (torch.randn(8, 1024).to(BF16), *stored(256, 1024))
    cost = spec_of(LINEAR).cost_of(*args).numbers()
    config = next(c for c in space(LINEAR, args, target) if c["SPLITS"] == 1)
    with count_traffic() as traffic:
        LINEAR.fn(*args, config=config, target=target)
    assert traffic.distinct_loaded <= 1.05 * cost["read_bytes"]
    assert traffic.stored <= 1.05 * cost["write_bytes"]
