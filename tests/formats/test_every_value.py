"""Every finite bf16 number, every byte, and hard float32 numbers, against the float64 oracle."""

import numpy as np
import pytest
import torch
from formats.oracle import (
    E2M1_GRID,
    E4M3_GRID,
    Rounded,
    bits,
    every_finite_bf16,
    nibbles_to_bytes,
    quantise,
)
from hypothesis import given
from hypothesis import strategies as st

from dscompile.formats import FORMATS, KVFormat, unpack_by_table

NAMES = ["fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0", "fp8_g128_fp32", "fp8_g128_fp32_pow2"]


def oracle(fmt: KVFormat, x: torch.Tensor) -> Rounded:
    scale = f"{fmt.scale}_pow2" if fmt.pow2 else fmt.scale
    return quantise(x, fmt.payload, fmt.group, scale, fmt.amax_floor)


def check(fmt: KVFormat, x: torch.Tensor) -> None:
    """encode, unpack and fake_quant of x [N, D] equal the oracle, bit for bit."""
    right = oracle(fmt, x)
    payload, scales = fmt.encode(x)
    codes = nibbles_to_bytes(right.codes) if fmt.payload == "e2m1" else right.codes
    np.testing.assert_array_equal(payload.numpy(), codes)
    np.testing.assert_array_equal(scales.numpy(), right.scales.view(np.uint8))
    values = torch.from_numpy(right.values).to(torch.float32)
    assert torch.equal(bits(fmt.unpack(fmt.pack(x), x.shape[-1])), bits(values))
    assert torch.equal(bits(fmt.fake_quant(x)), bits(values.to(x.dtype)))


@pytest.mark.parametrize("name", NAMES)
def test_every_bf16_alone_in_its_group(name: str) -> None:
    fmt, every = FORMATS[name], every_finite_bf16()
    for start in range(0, len(every), 16384):
        part = every[start : start + 16384]
        x = torch.zeros(len(part), fmt.group, dtype=torch.bfloat16)
        x[torch.arange(len(part)), torch.arange(len(part)) % fmt.group] = part
        check(fmt, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_every_bf16_among_others(name: str, order: str) -> None:
    every = every_finite_bf16()
    if order == "shuffled":
        every = every[torch.randperm(len(every))]
    check(FORMATS[name], every.view(-1, 128))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("largest", [6.0, 5.75, 0.02, 448.0, 1e4, 3.0e-5])
def test_every_bf16_below_a_given_amax(name: str, largest: float) -> None:
    """One value of each group fixes the scale, so the others meet every code of the grid and its ties."""
    fmt, every = FORMATS[name], every_finite_bf16()
    below = every[every.abs() <= largest]
    below = below[: len(below) // (fmt.group - 1) * (fmt.group - 1)].view(-1, fmt.group - 1)
    check(fmt, torch.cat((torch.full_like(below[:, :1], largest), below), -1))


@pytest.mark.parametrize("name", NAMES)
def test_float32_next_to_every_tie(name: str) -> None:
    """Midpoints of the grid and their two float32 neighbours, at a scale of one."""
    fmt = FORMATS[name]
    grid = E2M1_GRID if fmt.payload == "e2m1" else E4M3_GRID
    ties = torch.from_numpy((grid[:-1] + grid[1:]) / 2).to(torch.float32)
    hard = torch.cat((ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)))
    hard = torch.cat((hard, -hard))
    hard = torch.nn.functional.pad(hard, (0, -len(hard) % (fmt.group - 1))).view(-1, fmt.group - 1)
    check(fmt, torch.cat((torch.full_like(hard[:, :1], float(grid[-1])), hard), -1))


@pytest.mark.parametrize("name", NAMES)
def test_scale_at_the_edge_of_each_power_of_two(name: str) -> None:
    """amax = largest * 2^k and its float32 neighbours: the scale must step exactly there."""
    fmt = FORMATS[name]
    largest = 6.0 if fmt.payload == "e2m1" else 448.0
    amax = largest * 2.0 ** torch.arange(-100, 100, dtype=torch.float32)
    inf = torch.tensor(float("inf"))
    amax = torch.cat((amax, torch.nextafter(amax, inf), torch.nextafter(amax, -inf)))
    check(fmt, torch.nn.functional.pad(amax[:, None], (0, fmt.group - 1)))


@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_any_finite_input(name: str, data: st.DataObject) -> None:
    fmt = FORMATS[name]
    width = data.draw(st.sampled_from([16, 32]))
    numbers = st.floats(width=width, allow_nan=False, allow_infinity=False)
    values = data.draw(st.lists(numbers, min_size=1, max_size=fmt.group))
    dtype = torch.float16 if width == 16 else torch.float32
    x = torch.tensor(values + [0.0] * (-len(values) % fmt.group), dtype=dtype)
    right = oracle(fmt, x[None])
    assert torch.equal(bits(fmt.unpack(fmt.pack(x), len(x))), bits(torch.from_numpy(right.values[0]).float()))


@pytest.mark.parametrize("name", ["fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_payload_and_scale_byte_is_read_right(name: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    payload_bytes = fmt.payload_bytes(fmt.group)
    payload = torch.arange(256, dtype=torch.uint8).repeat(256).view(-1, payload_bytes)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(256 // payload_bytes)[:, None]

    codes = payload.numpy()
    if fmt.payload == "e2m1":
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1)
        grid = np.concatenate((E2M1_GRID, -E2M1_GRID))
    else:
        half = np.append(E4M3_GRID, np.nan)
        grid = np.concatenate((half, -half))
    if fmt.scale == "e4m3":
        scale_grid = np.concatenate((np.append(E4M3_GRID, np.nan), np.append(-E4M3_GRID, np.nan)))
    else:
        scale_grid = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)
    with np.errstate(over="ignore"):
        exact = (grid[codes] * scale_grid[scales.numpy()]).astype(np.float32)
    right = torch.from_numpy(exact).to(dtype)

    rows = torch.cat((payload, scales), -1)
    for values in (fmt.unpack(rows, fmt.group, dtype), unpack_by_table(fmt, rows, fmt.group, dtype)):
        assert torch.equal(values.isnan(), right.isnan())
        assert torch.equal(bits(values.nan_to_num(nan=1.0)), bits(right.nan_to_num(nan=1.0)))
