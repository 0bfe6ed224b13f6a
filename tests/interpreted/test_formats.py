"""Number formats inside kernels, and the short division that replaces a true one where scales have four bits."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from formats.oracle import bits, every_finite_bf16

from dscompile.formats import numeric
from dscompile.templates.triton.device.formats import (
    e2m1_codes,
    e2m1_value,
    e4m3_bytes,
    e4m3_value,
    group_amax,
    group_scales,
    pow2_ceil_bits,
    quotient,
    scales_of,
    ue8m0_bytes,
    ue8m0_value,
)
from support import quant


@triton.jit
def _codes(x, codes, values, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    found = e2m1_codes(tl.load(x + at).to(tl.float32))
    tl.store(codes + at, found)
    tl.store(values + at, e2m1_value(found))


@triton.jit
def _of_bytes(data, ue8m0, e4m3, again, exponents, N: tl.constexpr):
    at = tl.arange(0, N)
    byte = tl.load(data + at)
    tl.store(ue8m0 + at, ue8m0_value(byte))
    tl.store(e4m3 + at, e4m3_value(byte))
    tl.store(again + at, e4m3_bytes(e4m3_value(byte)))
    tl.store(exponents + at, ue8m0_bytes(ue8m0_value(byte)))


@triton.jit
def _powers(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, pow2_ceil_bits(tl.load(x + at)))


@triton.jit
def _groups(
    x, amax, scales, stored, scaled, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, N)[:, None], tl.arange(0, D)[None, :]
    values = tl.load(x + row * D + column)
    at = row * (D // GROUP) + tl.arange(0, D // GROUP)[None, :]
    tl.store(amax + at, group_amax(values, N, D, GROUP))
    found, data = scales_of(values, N, D, GROUP, 6.0, FLOOR, POW2)
    tl.store(scales + at, found)
    tl.store(stored + at, data)
    found = group_scales(values, N, D, GROUP, 6.0, FLOOR, POW2, not POW2)
    tl.store(scaled + row * D + column, quotient(values, found, N, D, GROUP, POW2, not POW2))


def hard_values() -> torch.Tensor:
    """Every bf16, and the fp32 neighbours of every tie of E2M1."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.5, 1.0])
    inf = torch.tensor(torch.inf)
    near = torch.cat((ties, torch.nextafter(ties, inf), torch.nextafter(ties, -inf), torch.tensor([1e-45, 2.0**-126])))
    return torch.cat((every_finite_bf16().float(), near, -near, torch.tensor([torch.inf, -torch.inf])))


def test_e2m1_codes() -> None:
    x = torch.nn.functional.pad(hard_values(), (0, -len(hard_values()) % 4096))
    codes, values = torch.empty(len(x), dtype=torch.int32), torch.empty(len(x))
    _codes[(len(x) // 4096,)](x, codes, values, 4096)
    assert torch.equal(bits(values), bits(quant.e2m1(x)))
    assert torch.equal(codes[values != 0] < 8, x[values != 0] > 0)


def test_e2m1_of_nan_is_the_largest_code() -> None:
    x = torch.tensor([torch.nan, -torch.nan]).repeat(8)
    codes = torch.empty(16, dtype=torch.int32)
    _codes[(1,)](x, codes, torch.empty(16), 16)
    assert codes.bitwise_and(7).eq(7).all()


def test_every_byte_is_read_as_the_formats_say() -> None:
    data = torch.arange(256, dtype=torch.uint8)
    ue8m0, e4m3, again, exponents = torch.empty(256), torch.empty(256), torch.empty_like(data), torch.empty_like(data)
    _of_bytes[(1,)](data, ue8m0, e4m3, again, exponents, 256)
    torch.testing.assert_close(ue8m0, numeric.ue8m0_to_float(data), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(e4m3, numeric.e4m3_to_float(data), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(again, data)
    assert torch.equal(exponents[1:], data[1:])  # 2^-127, of byte 0, is no normal number: no writer makes it


def test_powers_of_two_round_up_exactly() -> None:
    inf = torch.tensor(torch.inf)
    exact = torch.exp2(torch.arange(-126, 126, dtype=torch.float32))
    near = torch.nextafter(exact, inf), torch.nextafter(exact, -inf)[1:]
    x = torch.cat((exact, *near, torch.tensor([torch.inf, torch.nan])))
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)), value=1.0)
    out = torch.empty(1024, dtype=torch.int32)
    _powers[(1,)](x, out, 1024)
    assert torch.equal(out, numeric.power_of_two_bits(x))


@pytest.mark.parametrize("pow2", [True, False])
def test_groups(pow2: bool) -> None:
    """Scales as the reader will see them, a division by them, and NaN that stays in its group."""
    x = torch.randn(4, 64) * torch.exp2(torch.arange(-40, 24).float().view(4, 16)).repeat_interleave(4, 1)
    x[1, 20], x[2, 3] = torch.nan, 0.0
    x[3, 32:48] = 0.0
    amax, scales, scaled = torch.empty(4, 4), torch.empty(4, 4), torch.empty(4, 64)
    stored = torch.empty(4, 4, dtype=torch.uint8)
    floor = 1e-4 if pow2 else 6 * 2.0**-9
    _groups[(1,)](x, amax, scales, stored, scaled, 4, 64, 16, floor, pow2)
    groups = x.view(4, 4, 16)
    torch.testing.assert_close(amax, groups.abs().amax(-1), rtol=0, atol=0, equal_nan=True)
    floored = amax.clamp(min=floor)
    if pow2:
        want = numeric.power_of_two_bits(floored * (1 / 6)).view(torch.float32)
        assert torch.equal(stored, numeric.ue8m0_from_bits(want.view(torch.int32)))
    else:
        want = numeric.to_e4m3_scale(floored / 6.0).float()
        assert torch.equal(stored[want == want], want.to(torch.float8_e4m3fn).view(torch.uint8)[want == want])
    read = want.masked_fill(want.isinf(), torch.nan)
    torch.testing.assert_close(scales, read, rtol=0, atol=0, equal_nan=True)
    exact = groups / want.unsqueeze(-1)
    torch.testing.assert_close(scaled.view_as(exact), exact, rtol=0, atol=0, equal_nan=True)
    assert scales.isnan().sum() == 1


# -- the division on a GPU --------------------------------------------------------------------------------------------


def fp32(exact: Fraction) -> Fraction:
    """Rounded to 24 bits, ties to even; no limits on the exponent."""
    if exact == 0:
        return exact
    exponent = 0
    magnitude = abs(exact)
    while magnitude >= 1 << 24:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 1 << 23:
        magnitude, exponent = magnitude * 2, exponent - 1
    return round(magnitude) * Fraction(2) ** exponent * (1 if exact > 0 else -1)


def short_division(x: Fraction, scale: Fraction) -> Fraction:
    """What `quotient` computes on a GPU for a scale of four bits, each step with its one rounding."""
    reciprocal = fp32(1 / scale)
    guess = fp32(x * reciprocal)
    remainder = fp32(guess * scale - x)
    return fp32(remainder * -reciprocal + guess)


def test_the_short_division_is_a_division() -> None:
    """For every significand of a bf16 and a sample of fp32 ones, by every significand of an E4M3 scale."""
    generator = np.random.default_rng(0)
    significands = [*range(128, 256), *(int(n) for n in generator.integers(1 << 23, 1 << 24, 200)), (1 << 24) - 1]
    for scale in (8, 9, 10, 11, 12, 13, 14, 15):
        for significand in significands:
            x = Fraction(significand)
            assert short_division(x, Fraction(scale)) == fp32(x / scale), (significand, scale)


def test_the_short_division_decides_ties_of_e2m1_exactly() -> None:
    """A value that is a tie times a scale must divide to that tie, and its neighbours to one side of it."""
    for scale in (8, 9, 10, 11, 12, 13, 14, 15):
        for tie in (Fraction(n, 4) for n in (1, 3, 5, 7, 10, 14, 20)):
            exact = scale * tie
            assert short_division(exact, Fraction(scale)) == tie
            assert short_division(exact + Fraction(1, 1 << 21), Fraction(scale)) >= tie
            assert short_division(exact - Fraction(1, 1 << 21), Fraction(scale)) <= tie
