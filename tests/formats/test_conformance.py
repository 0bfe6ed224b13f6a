"""The release's three formats, bit for bit against the values of its reference implementation."""

from pathlib import Path

import pytest
import torch
from formats.oracle import bits
from safetensors.torch import load_file

from dscompile.formats import FORMATS, unpack_by_table

DATA = Path(__file__).parents[1] / "data" / "conformance" / "formats.safetensors"
CASES = [
    ("fp8_g32_ue8m0", "fp8_g32", "codes"),
    ("fp4_g16_e4m3", "fp4_g16_e4m3", "packed"),
    ("fp4_g32_ue8m0", "fp4_g32_ue8m0", "packed"),
]


@pytest.fixture(scope="module")
def data() -> dict[str, torch.Tensor]:
    return load_file(DATA)


@pytest.mark.parametrize(("name", "key", "codes"), CASES)
def test_bit_exact(data: dict[str, torch.Tensor], name: str, key: str, codes: str) -> None:
    fmt, x, dequant = FORMATS[name], data["input"], data[f"{key}.dequant"]
    payload, scales = fmt.encode(x)
    assert torch.equal(payload, data[f"{key}.{codes}"])
    assert torch.equal(scales, data[f"{key}.scales"])
    rows = fmt.pack(x)
    assert torch.equal(rows, torch.cat((payload, scales), -1))
    for values in (
        fmt.fake_quant(x),
        fmt.unpack(rows, 128, torch.bfloat16),
        fmt.decode(payload, scales, 128, torch.bfloat16),
        unpack_by_table(fmt, rows, 128, torch.bfloat16),
        fmt.unpack(rows, 128).to(torch.bfloat16),
    ):
        assert torch.equal(bits(values), bits(dequant))
    # bf16 holds every dequantised value exactly.
    assert torch.equal(fmt.unpack(rows, 128), dequant.float())
    assert torch.equal(bits(fmt.fake_quant(x.float())), bits(dequant.float()))


def test_release_row_widths() -> None:
    assert FORMATS["fp8_g32_ue8m0"].row_bytes(512) == 528
    assert FORMATS["fp4_g16_e4m3"].row_bytes(512) == 288
    assert FORMATS["fp4_g32_ue8m0"].row_bytes(128) == 68


def test_e2m1_ties_go_to_the_even_code() -> None:
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0])
    right = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, 0])
    fmt = FORMATS["fp4_g16_e4m3"]
    assert torch.equal(bits(fmt.fake_quant(x)), bits(right))
    assert torch.equal(bits(fmt.unpack(fmt.pack(x), 16)), bits(right))


@pytest.mark.parametrize(
    ("amax", "right"),
    [(1.2, 1.0), (2.7, 3.0), (5.5, 6.0), (6.0, 6.0), (6.0001, 6.0), (7.0, 8.0), (12.001, 12.0)],
)
def test_mxfp4_divides_by_the_rounded_scale(amax: float, right: float) -> None:
    x = torch.zeros(32)
    x[5] = amax
    assert FORMATS["fp4_g32_ue8m0"].fake_quant(x)[5] == right


@pytest.mark.parametrize(
    ("amax", "right"),
    [(6.3, 6.0), (6.375, 6.0), (6.4, 6.75), (7.0, 6.75), (100.0, 96.0), (0.02, 0.0234375)],
)
def test_fp4_e4m3_divides_by_the_rounded_scale(amax: float, right: float) -> None:
    x = torch.zeros(16)
    x[5] = amax
    assert FORMATS["fp4_g16_e4m3"].fake_quant(x)[5] == right


def test_fp4_e4m3_group_of_one_to_four() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(4)
    right = torch.tensor([1.03125, 2.0625, 2.75, 4.125]).repeat(4)
    assert torch.equal(FORMATS["fp4_g16_e4m3"].fake_quant(x), right)


@pytest.mark.parametrize(
    ("name", "right"), [("fp8_g32_ue8m0", 0.0266), ("fp4_g16_e4m3", 0.095), ("fp4_g32_ue8m0", 0.115)]
)
def test_relative_error_on_gaussian_rows(name: str, right: float) -> None:
    x = torch.randn(1000, 32)
    error = (FORMATS[name].fake_quant(x) - x).norm() / x.norm()
    assert float(error) == pytest.approx(right, rel=0.03)
