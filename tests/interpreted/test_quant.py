"""Packing, unpacking and fake quantisation are bit for bit those of `dscompile.formats`, for every record there."""

import pytest
import torch
from formats.oracle import bits, every_finite_bf16
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.formats.registry import RECORDS
from dscompile.targets import Target, get_target
from dscompile.templates.triton.quant import TEMPLATES
from dscompile.templates.triton.record import config
from support.kernels import named, reference, runs, spec_of
from support.triton_interpreter import count_traffic

PACK, FAKE_QUANT, UNPACK = TEMPLATES
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
TARGET = get_target("sm_103a")
#: Records that read a row differently; pages are not the concern of an operation on rows.
ROWS = [record.name for record in RECORDS if record.page == FORMATS["bf16"].page]
QUANTISED = [name for name in ROWS if not FORMATS[name].is_plain]
RELEASE = ["fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"]
WIDE = config(4, 1, N=64)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def same(got: Tensor, want: Tensor) -> bool:
    """Equal in dtype, shape and every bit; any NaN equals any."""
    nan = want.isnan()
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.equal(got.isnan(), nan)
        and torch.equal(bits(got.masked_fill(nan, 0)), bits(want.masked_fill(nan, 0)))
    )


def width(name: str) -> int:
    return 77 if name == "none" else FORMATS[name].tail + 3 * max(FORMATS[name].group, 16)


def hard_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every magnitude, exact ties of E2M1, zeros of both signs."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 13, (*shape[:-1], 1)).float())
    ties = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0, 0.0, -0.0])
    x[0], x[1], x[2] = ties[torch.randint(0, 10, shape[1:])], 0.0, -0.0
    return x.to(dtype)


def check(name: str, x: Tensor, target: Target = TARGET, most: int = 1) -> None:
    rows = reference(PACK, x, name)
    for got in runs(PACK, (x, name), target, most):
        assert same(got, rows)
    for got in runs(FAKE_QUANT, (x, name), target, most):
        assert same(got, reference(FAKE_QUANT, x, name))
    for dtype in DTYPES:
        args = (rows, name, x.shape[-1], dtype)
        for got in runs(UNPACK, args, target, most):
            assert same(got, reference(UNPACK, *args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["none", *ROWS])
def test_every_record(name: str, dtype: torch.dtype) -> None:
    check(name, hard_rows((9, width(name)), dtype))


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - set(ROWS)))
def test_layouts_of_pages_pack_rows_all_the_same(name: str) -> None:
    check(name, hard_rows((3, width(name)), torch.bfloat16))


@pytest.mark.parametrize("name", RELEASE)
def test_variants_of_targets(name: str, target: Target) -> None:
    check(name, hard_rows((5, 96), torch.bfloat16), target, most=9)


@pytest.mark.parametrize(
    ("name", "key", "codes"),
    [("fp8_g32_ue8m0", "fp8_g32", "codes"), ("fp4_g16_e4m3", "fp4_g16_e4m3", "packed"),
     ("fp4_g32_ue8m0", "fp4_g32_ue8m0", "packed")],
)  # fmt: skip
def test_conformance(conformance, name: str, key: str, codes: str) -> None:
    data = conformance("formats")
    x, dequantised = data["input"], data[f"{key}.dequant"]
    rows = torch.cat((data[f"{key}.{codes}"], data[f"{key}.scales"]), -1)
    assert torch.equal(PACK.fn(x, name, config=WIDE, target=TARGET), rows)
    assert same(UNPACK.fn(rows, name, 128, torch.bfloat16, config=WIDE, target=TARGET), dequantised)
    assert same(UNPACK.fn(rows, name, 128, torch.float32, config=WIDE, target=TARGET), dequantised.float())
    assert same(FAKE_QUANT.fn(x, name, config=WIDE, target=TARGET), dequantised)
    assert same(FAKE_QUANT.fn(x.float(), name, config=WIDE, target=TARGET), dequantised.float())


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_every_finite_bf16(name: str, order: str) -> None:
    """Sorted, groups hold neighbours; shuffled, one value sets the scale of the others."""
    every = every_finite_bf16()
    if order == "shuffled":
        every = every[torch.randperm(len(every))]
    dim = 128 + FORMATS[name].tail
    every = every[: len(every) // dim * dim].view(-1, dim)
    rows = FORMATS[name].pack(every)
    assert torch.equal(PACK.fn(every, name, config=WIDE, target=TARGET), rows)
    got = UNPACK.fn(rows, name, dim, torch.float32, config=WIDE, target=TARGET)
    assert same(got, FORMATS[name].unpack(rows, dim))


@pytest.mark.parametrize("name", RELEASE)
def test_every_payload_byte_with_every_scale_byte(name: str) -> None:
    fmt, dim = FORMATS[name], 512
    payload = torch.arange(256, dtype=torch.uint8).repeat(512)[: 256 * fmt.payload_bytes(dim)]
    payload = payload.view(256, -1) if fmt.payload == "e4m3" else payload.view(256, 256)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, fmt.scale_bytes(dim))
    rows = torch.cat((payload, scales), -1)
    for dtype in (torch.bfloat16, torch.float32):
        args = (rows, name, dim, dtype)
        assert same(UNPACK.fn(*args, config=config(4, 1, N=16), target=TARGET), reference(UNPACK, *args))


# -- R01 to R03 --------------------------------------------------------------------------------------------------------


def through(x: Tensor, name: str) -> Tensor:
    """Quantised, stored, loaded; the same as fake quantisation."""
    rows = next(runs(PACK, (x, name), TARGET))
    loaded = next(runs(UNPACK, (rows, name, x.shape[-1], torch.float32), TARGET))
    assert same(loaded, next(runs(FAKE_QUANT, (x, name), TARGET)))
    return loaded


def test_r01_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]])
    right = torch.tensor([[6, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, 0]])
    assert same(through(x, "fp4_g16_e4m3"), right)


def test_r02_values_are_divided_by_the_rounded_scale() -> None:
    index = {1.2: 1.0, 2.7: 3.0, 5.5: 6.0, 6.0: 6.0, 6.0001: 6.0, 7.0: 8.0, 12.001: 12.0}
    rows = {6.3: 6.0, 6.375: 6.0, 6.4: 6.75, 7.0: 6.75, 100.0: 96.0, 0.02: 0.0234375}
    for name, group, table in (("fp4_g32_ue8m0", 32, index), ("fp4_g16_e4m3", 16, rows)):
        x = torch.zeros(len(table), group)
        x[:, 5] = torch.tensor([*table])
        assert torch.equal(through(x, name)[:, 5], torch.tensor([*table.values()]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(1, 4)
    assert torch.equal(through(x, "fp4_g16_e4m3"), torch.tensor([1.03125, 2.0625, 2.75, 4.125]).repeat(1, 4))
    x = torch.randn(1000, 32)
    error = (FAKE_QUANT.fn(x, "fp4_g32_ue8m0", config=WIDE, target=TARGET) - x).norm() / x.norm()
    assert float(error) == pytest.approx(0.115, rel=0.03)


@pytest.mark.parametrize("name", QUANTISED)
def test_r03_damage_stays_where_it_is(name: str) -> None:
    fmt = FORMATS[name]
    dim = 2 * fmt.group + fmt.tail
    x = torch.randn(8, dim)
    clean = x.clone()
    clean[5:] = 0
    x[5:] = torch.nan
    packed = PACK.fn(x, name, config=config(1, 1, N=8), target=TARGET)
    assert torch.equal(packed[:5], fmt.pack(clean)[:5])

    x = clean.clone()
    x[2, fmt.group + 1] = torch.nan
    x[3, 1] = torch.inf
    packed = PACK.fn(x, name, config=config(1, 1, N=8), target=TARGET)
    values = UNPACK.fn(packed, name, dim, torch.float32, config=config(1, 1, N=8), target=TARGET)
    assert same(values, fmt.unpack(fmt.pack(x), dim))
    assert values[2].isnan().nonzero().flatten().tolist() == list(range(fmt.group, 2 * fmt.group))
    assert same(FAKE_QUANT.fn(x, name, config=config(1, 1, N=8), target=TARGET), fmt.fake_quant(x))


# -- shapes, strides, bytes --------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.sampled_from(["none", *ROWS]), st.lists(st.integers(0, 3), max_size=3), st.integers(1, 5), st.integers(0, 2),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_any_shape(name: str, lead: list[int], groups: int, gap: int, dtype: torch.dtype) -> None:
    """Leading axes of any number and size, rows that are no power of two, and rows of a wider tensor."""
    dim = 7 * groups if name == "none" or FORMATS[name].is_plain else FORMATS[name].tail + groups * FORMATS[name].group
    if name in QUANTISED and FORMATS[name].scale == "fp32":
        lead = [max(size, 1) for size in lead]  # the reference cannot pack zero rows with one such scale each
    x = torch.randn(*lead, dim + gap).to(dtype)[..., gap:]
    check(name, x)


def test_strided_rows() -> None:
    x = torch.randn(64, 6).t()
    assert torch.equal(next(runs(PACK, (x, RELEASE[0]), TARGET)), FORMATS[RELEASE[0]].pack(x))
    wide = torch.randint(0, 120, (9, 200)).to(torch.uint8)
    for rows in (wide[::2, 7:75], wide.t()[:68, 3:9].t(), wide[2:4, :68].expand(3, 2, 68)):
        args = (rows, "fp4_g32_ue8m0", 128, torch.float32)
        assert same(next(runs(UNPACK, args, TARGET)), reference(UNPACK, *args))


def test_rows_of_odd_length() -> None:
    """fp32 scales and bf16 tails that lie at odd places are read and written as bytes."""
    name = "fp8_g64_ue8m0_tail64"
    for groups in (1, 2):
        check(name, torch.randn(4, 64 * groups + 64).bfloat16())
    shifted = torch.zeros(4, 200, dtype=torch.uint8)[:, 3:135]
    shifted.copy_(FORMATS["fp8_g128_fp32"].pack(torch.randn(4, 128)))
    args = (shifted, "fp8_g128_fp32", 128, torch.float32)
    assert same(next(runs(UNPACK, args, TARGET)), reference(UNPACK, *args))


@pytest.mark.parametrize("name", RELEASE)
@pytest.mark.parametrize("dim", [128, 96])
def test_bytes(name: str, dim: int) -> None:
    """Nothing twice, neither in rows that fill a tile nor in rows that do not."""
    x = torch.randn(16, dim).bfloat16()
    rows = FORMATS[name].pack(x)
    for template, args in ((PACK, (x, name)), (FAKE_QUANT, (x, name)), (UNPACK, (rows, name, dim, torch.bfloat16))):
        with count_traffic() as traffic:
            next(runs(template, args, TARGET))
        cost = spec_of(template).cost_of(*args).numbers()
        assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
        assert traffic.loaded == traffic.distinct_loaded == cost["read_bytes"]


def test_refuses() -> None:
    refusal = PACK.applies(named(PACK, (torch.empty(1, 9000), "none")))
    assert refusal is not None and "9000" in refusal and "8192" in refusal
    rows = torch.zeros(2, 9, dtype=torch.uint8)[:, 1:]
    refusal = UNPACK.applies(named(UNPACK, (rows, "bf16", 4, torch.float32)))
    assert refusal is not None and "multiples of 2 (bf16)" in refusal
