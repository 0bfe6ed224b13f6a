"""The arithmetic of the CuTe kernels, run on tensors, against the formats and operations that it stands for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscompile.formats import FORMATS
from dscompile.formats.numeric import e2m1_to_bytes, round_e2m1, to_e4m3
from dscompile.ops.experts import clamped_silu
from dscompile.templates.cute import arithmetic
from dscompile.templates.cute.arithmetic import Rounding
from dscompile.templates.cute.host import Host

RECORDS = ("fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0")


def rounding(name: str) -> Rounding:
    record = FORMATS[name]
    return Rounding(record.payload, record.scale, record.amax_floor)


def every_bf16() -> torch.Tensor:
    """All 65,536, NaNs and infinities too."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """x and the fp32 numbers next to it on both sides."""
    bits = x.float().view(torch.int32)
    return torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)])


def columns(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.unbind(-1))


def bytes_of(words: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(words, -1).view(torch.uint8)


@pytest.mark.parametrize("kind", ["all of bf16", "ties", "random"])
def test_e2m1_codes(kind: str) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 2.0**-140])
    random = torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 4
    x = {"all of bf16": every_bf16(), "ties": neighbours(torch.cat((ties, -ties))), "random": random}[kind]
    x = x[~x.isnan()]
    x = x[: x.numel() // 2 * 2].view(-1, 2)
    expected = e2m1_to_bytes(round_e2m1(x))[:, 0]
    assert torch.equal(arithmetic.e2m1_byte(Host, *columns(x), False).to(torch.uint8), expected)


def test_e2m1_of_nan_is_a_six() -> None:
    assert arithmetic.e2m1_code(Host, torch.tensor([float("nan"), -float("nan")])).bitwise_and(7).tolist() == [7, 7]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("amount", [1.0, 1e-6, 1e4])
def test_groups_of_values_become_the_bytes_of_the_format(name: str, amount: float) -> None:
    record, generator = FORMATS[name], torch.Generator().manual_seed(2)
    x = (torch.randn(400, 64, generator=generator) * amount).bfloat16().float()
    x[0], x[1, :20], x[2, 3], x[3, 5] = 0.0, -0.0, float("inf"), -float("inf")
    x[4:12] *= torch.logspace(-30, 4, 8)[:, None]
    words, scales = arithmetic.quantised(Host, columns(x), rounding(name), record.group)
    rows = torch.cat((bytes_of(words), torch.stack(scales, -1).to(torch.uint8)), -1)
    assert torch.equal(rows, record.pack(x))


@pytest.mark.parametrize("name", RECORDS)
def test_nan_stays_in_its_group(name: str) -> None:
    record, x = FORMATS[name], torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    x[:, 40] = float("nan")
    words, scales = arithmetic.quantised(Host, columns(x), rounding(name), record.group)
    rows = torch.cat((bytes_of(words), torch.stack(scales, -1).to(torch.uint8)), -1)
    seen, expected = record.unpack(rows, 64), record.unpack(record.pack(x), 64)
    assert torch.equal(seen.isnan(), expected.isnan()) and torch.equal(seen.nan_to_num(), expected.nan_to_num())


def test_quotients_are_those_of_a_division() -> None:
    """By every scale that E4M3 holds, of numbers around every tie of E2M1 and of others."""
    codes = torch.arange(1, 0x7F, dtype=torch.int32)
    scales = Host.from_e4m3(codes)[:, None]
    ties = neighbours(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]))
    random = torch.randn(4000, generator=torch.Generator().manual_seed(4)) * 3
    x = torch.cat((scales * ties, scales * random, scales * every_bf16()[::37]), -1)
    x = x[:, ~x.isnan().any(0)]
    got = arithmetic.quotient(Host, x, scales, Host.reciprocal(scales))
    # Where the remainder is subnormal it is not exact; such quotients are far below the smallest code.
    exact = (((x / scales).abs() < 1000) & (x.abs() > 2.0**-90)) | (x == 0)
    assert exact.float().mean() > 0.5 and torch.equal(got[exact], (x / scales)[exact])
    assert torch.equal(to_e4m3(got).float(), to_e4m3(x / scales).float())
    assert torch.equal(arithmetic.e2m1_code(Host, got), arithmetic.e2m1_code(Host, x / scales))


def test_bf16_pairs() -> None:
    x = neighbours(every_bf16()[:-1])
    x = x[~x.isnan()]
    x = x[: x.numel() // 2 * 2].view(-1, 2)
    assert torch.equal(torch.stack(arithmetic.to_bf16(Host, columns(x)), -1), x.bfloat16().float())


@given(st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_a_tree_adds_every_value_once(count: int) -> None:
    assert arithmetic.tree(lambda a, b: a + b, range(count)) == sum(range(count))


def test_words_of_parts() -> None:
    parts = [torch.tensor([i], dtype=torch.int32) for i in range(1, 7)]
    assert bytes_of(arithmetic.joined(parts, 8)).flatten().tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert bytes_of(arithmetic.joined(parts, 16)).flatten().tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]


@pytest.mark.parametrize("limit", [None, 10.0, 0.5])
def test_clamped_swiglu(limit: float | None) -> None:
    gate, up = (torch.randn(2, 20_000, generator=torch.Generator().manual_seed(5)) * 8).unbind(0)
    gate[0], up[1], gate[2] = float("nan"), float("nan"), float("-inf")
    got = arithmetic.clamped_swiglu(Host, gate, up, limit)
    expected = clamped_silu(gate, up, limit or 0.0)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("lanes", [1, 2, 4, 32])
def test_reduction_over_threads(lanes: int) -> None:
    x = torch.randint(0, 100, (3, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(6))
    got = arithmetic.over(Host, Host.max_int, x, lanes)
    assert torch.equal(got, x.view(3, -1, lanes).amax(-1, keepdim=True).expand(-1, -1, lanes).reshape(3, 32))
