"""Row encoding: shapes, NaN and infinity, the bf16 tail, plain rows, byte counts and errors."""

import pytest
import torch
from formats.oracle import bits
from hypothesis import given
from hypothesis import strategies as st

from dscompile.formats import FORMATS, KVFormat, unpack_by_table

RELEASE = ["fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"]
QUANTISED = [name for name, fmt in FORMATS.items() if not fmt.is_plain]
NAN, INF = float("nan"), float("inf")


def some_dim(fmt: KVFormat, groups: int = 3) -> int:
    return groups * max(fmt.group, 1) + fmt.tail


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("lead", [(), (5,), (0,), (2, 0, 3), (2, 1, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_leading_shape(name: str, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    dim = some_dim(fmt)
    x = torch.randn(*lead, dim).to(dtype)
    payload, scales = fmt.encode(x)
    assert payload.shape == (*lead, fmt.payload_bytes(dim)) and payload.dtype == torch.uint8
    assert scales.shape == (*lead, fmt.scale_bytes(dim)) and scales.dtype == torch.uint8
    rows = fmt.pack(x)
    assert rows.shape == (*lead, fmt.row_bytes(dim)) and torch.equal(rows, torch.cat((payload, scales), -1))
    values = fmt.unpack(rows, dim)
    assert values.shape == x.shape and values.dtype == torch.float32
    assert torch.equal(values, fmt.decode(payload, scales, dim))
    assert torch.equal(bits(values), bits(unpack_by_table(fmt, rows, dim)))
    fake = fmt.fake_quant(x)
    assert fake.dtype == dtype and torch.equal(bits(fake), bits(fmt.unpack(rows, dim, dtype)))
    flat = fmt.pack(x.reshape(-1, dim))
    assert torch.equal(flat, rows.reshape(-1, rows.shape[-1]))


@pytest.mark.parametrize("name", list(FORMATS))
def test_strides_of_the_input_do_not_matter(name: str) -> None:
    fmt = FORMATS[name]
    dim = some_dim(fmt)
    x = torch.randn(3, 4, dim)
    right = fmt.pack(x)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    columns = x.mT.contiguous().mT
    wide = torch.nn.functional.pad(x, (3, 5))[..., 3 : 3 + dim]
    for y in (transposed, columns, wide):
        assert torch.equal(fmt.pack(y), right)
        assert torch.equal(fmt.fake_quant(y), fmt.fake_quant(x))
    holder = torch.zeros(3, 4, 2 * right.shape[-1], dtype=torch.uint8)
    holder[..., : right.shape[-1]] = right
    assert torch.equal(fmt.unpack(holder[..., : right.shape[-1]], dim), fmt.unpack(right, dim))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_value_stays_in_its_group(name: str, bad: float, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    dim, group = some_dim(fmt), fmt.group
    x = torch.randn(4, dim).to(dtype)
    clean = fmt.fake_quant(x)
    x[2, group + 5] = bad
    rows = fmt.pack(x)
    for values in (fmt.fake_quant(x), fmt.unpack(rows, dim, dtype), unpack_by_table(fmt, rows, dim, dtype)):
        own = torch.zeros(4, dim, dtype=torch.bool)
        own[2, group : 2 * group] = True
        assert torch.equal(bits(values[~own]), bits(clean[~own]))
        if bad != bad or fmt.scale != "e4m3":
            assert values[own].isnan().all()
        else:  # an E4M3 scale saturates at 448, and 448 * 6 is what the infinity reads as
            assert values[own].isfinite().all() and values[2, group + 5] == (2688 if bad > 0 else -2688)


@pytest.mark.parametrize("name", RELEASE)
def test_rows_of_nan_leave_the_other_rows_alone(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.randn(8, 64)
    x[5:] = 0
    clean = fmt.pack(x)
    x[5:] = NAN
    assert torch.equal(fmt.pack(x)[:5], clean[:5])
    assert fmt.fake_quant(x)[5:].isnan().all() and fmt.unpack(fmt.pack(x), 64)[5:].isnan().all()


def test_nan_scale_bytes() -> None:
    x = torch.full((32,), NAN)
    assert FORMATS["fp8_g32_ue8m0"].encode(x)[1].tolist() == [0xFF]
    assert FORMATS["fp4_g32_ue8m0"].encode(x)[1].tolist() == [0xFF]
    assert {b & 0x7F for b in FORMATS["fp4_g16_e4m3"].encode(x)[1].tolist()} == {0x7F}


@pytest.mark.parametrize(
    ("name", "scale_byte"), [("fp8_g32_ue8m0", 127 - 22), ("fp4_g16_e4m3", 1), ("fp4_g32_ue8m0", 1)]
)
def test_all_zero_group_keeps_signs_and_has_the_smallest_scale(name: str, scale_byte: int) -> None:
    fmt = FORMATS[name]
    x = torch.zeros(32)
    x[1::2] = -0.0
    payload, scales = fmt.encode(x)
    assert set(scales.tolist()) == {scale_byte}
    assert torch.equal(bits(fmt.unpack(fmt.pack(x), 32)), bits(x))
    assert set(payload.tolist()) == ({0x80} if fmt.payload == "e2m1" else {0, 0x80})


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_plain_rows_are_the_values(name: str) -> None:
    fmt, dtype = FORMATS[name], getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[name])
    x = torch.randn(3, 7)
    x[1, 2], x[0, 0] = NAN, -0.0
    assert torch.equal(bits(fmt.unpack(fmt.pack(x), 7, dtype)), bits(x.to(dtype)))
    assert torch.equal(bits(fmt.fake_quant(x)), bits(x.to(dtype).float()))
    assert fmt.row_bytes(7) == 7 * dtype.itemsize and fmt.scale_bytes(7) == 0


def test_v4_row_keeps_the_rope_values_in_bf16() -> None:
    fmt = FORMATS["fp8_g64_ue8m0_tail64"]
    x = torch.randn(2, 512)
    x[0, 500] = NAN
    rows = fmt.pack(x)
    assert rows.shape == (2, 584) and fmt.payload_bytes(512) == 576 and fmt.scale_bytes(512) == 8
    assert (rows[:, 583] == 0).all()
    assert torch.equal(bits(rows[:, 448:576]), bits(x[:, 448:].to(torch.bfloat16)))
    values = fmt.unpack(rows, 512)
    assert torch.equal(bits(values[:, 448:]), bits(x[:, 448:].to(torch.bfloat16).float()))
    amax = x[:, :448].view(2, 7, 64).abs().amax(-1)
    exponent = torch.ceil(torch.log2(amax.double() / 448)).to(torch.int64)
    assert torch.equal(rows[:, 576:583].to(torch.int64), exponent + 127)
    assert (values - x)[:, :448].norm() / x[:, :448].norm() < 0.03
    assert values.isnan().sum() == 1


def test_index_rows_end_in_a_little_endian_float32() -> None:
    x = torch.randn(4, 128)
    rows = FORMATS["fp8_g128_fp32"].pack(x)
    assert rows.shape == (4, 132)
    assert torch.equal(rows[:, 128:].contiguous().view(torch.float32), x.abs().amax(-1, keepdim=True) * (1 / 448))
    pow2 = FORMATS["fp8_g128_fp32_pow2"].pack(x)[:, 128:].contiguous().view(torch.float32)
    assert (torch.frexp(pow2).mantissa == 0.5).all() and (pow2 < 2 * x.abs().amax(-1, keepdim=True) / 448).all()


@given(st.data())
@pytest.mark.parametrize("name", ["fp8_g32_ue8m0", "fp4_g32_ue8m0", "bf16", "fp16", "fp32"])
def test_rounding_a_rounded_row_changes_nothing(name: str, data: st.DataObject) -> None:
    fmt = FORMATS[name]
    numbers = st.floats(-60000, 60000, width=32)
    x = torch.tensor(data.draw(st.lists(numbers, min_size=64, max_size=64)))
    once = fmt.unpack(fmt.pack(x), 64)
    assert torch.equal(bits(fmt.unpack(fmt.pack(once), 64)), bits(once))


def test_fp4_e4m3_rows_drift_below_the_normal_scales_only() -> None:
    """Why this format is packed from the original: at sigma 0.01 a second rounding moves some values."""
    fmt = FORMATS["fp4_g16_e4m3"]
    once = fmt.fake_quant(torch.randn(2000, 16))
    assert torch.equal(fmt.fake_quant(once), once)
    small = fmt.fake_quant(torch.randn(2000, 16) * 0.01)
    moved = (fmt.fake_quant(small) != small).float().mean()
    assert 0.005 < float(moved) < 0.1


@pytest.mark.parametrize("name", list(FORMATS))
def test_byte_report_adds_up(name: str) -> None:
    fmt = FORMATS[name]
    dim = some_dim(fmt)
    report = fmt.byte_report(dim)
    assert report.row_bytes == fmt.row_bytes(dim) == fmt.pack(torch.zeros(dim)).shape[-1]
    assert report.payload_bytes == fmt.payload_bytes(dim)
    assert report.scale_bytes + report.pad_bytes == fmt.scale_bytes(dim)
    assert name in str(report) and str(report.row_bytes) in str(report)
    paged = fmt.byte_report(dim, fmt.page.rows or 5)
    assert paged.page_bytes == fmt.page_bytes(dim, paged.page_rows) and 0 <= paged.page_pad_bytes
    assert paged.page_bytes % fmt.page.align_bytes == 0 and paged.page_pad_bytes < fmt.page.align_bytes
    assert paged.bits_per_value == pytest.approx(8 * paged.page_bytes / (dim * paged.page_rows))


def test_global_cache_of_the_release_is_890_bytes_a_token() -> None:
    """2.5 rows a token (three sources at ratio 2, one at ratio 1), each a compressed row and an index row."""
    row = FORMATS["fp4_g16_e4m3"].row_bytes(512) + FORMATS["fp4_g32_ue8m0"].row_bytes(128)
    assert 2.5 * row == 890


def test_errors_name_the_thing_the_value_and_what_is_allowed() -> None:
    fmt = FORMATS["fp4_g16_e4m3"]
    with pytest.raises(ValueError, match=r"fp4_g16_e4m3: dim 40, allowed: a positive multiple of the group 16"):
        fmt.pack(torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"dim 0, allowed: a positive multiple of the group 16"):
        fmt.encode(torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"dim 64, .* group 64 \+ 64 bf16 values"):
        FORMATS["vllm_sm90"].row_bytes(64)
    with pytest.raises(TypeError, match=r"x has dtype torch.float64, allowed: \['torch.float32', 'torch.bfloat16'"):
        fmt.fake_quant(torch.zeros(16, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"x has dtype torch.uint8"):
        FORMATS["bf16"].pack(torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"x has shape \(\), allowed: \[..., dim\]"):
        fmt.pack(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"rows have shape \(3, 287\), allowed: \[..., 288\]"):
        fmt.unpack(torch.zeros(3, 287, dtype=torch.uint8), 512)
    with pytest.raises(TypeError, match=r"rows have dtype torch.int8, allowed: torch.uint8"):
        fmt.unpack(torch.zeros(3, 288, dtype=torch.int8), 512)
    with pytest.raises(ValueError, match=r"scales have shape \(3, 31\), allowed: \[..., 32\]"):
        fmt.decode(torch.zeros(3, 256, dtype=torch.uint8), torch.zeros(3, 31, dtype=torch.uint8), 512)
    with pytest.raises(KeyError, match=r"format 'fp4', allowed: \['bf16', .*'fp4_g16_e4m3'"):
        FORMATS["fp4"]
    assert FORMATS.get("fp4") is None and "fp4" not in FORMATS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"payload": "int8"}, r"payload 'int8', allowed: \['e4m3', 'e2m1', 'bf16'"),
        ({"payload": "bf16", "group": 32}, "a plain bf16 row has no group, tail, pad or scale"),
        ({"payload": "e4m3", "group": 32, "amax_floor": 1.0}, r"scale 'none', allowed: \['ue8m0', 'e4m3', 'fp32'\]"),
        ({"payload": "e2m1", "group": 15, "scale": "e4m3", "amax_floor": 1.0}, "group 15, allowed: an even number"),
        ({"payload": "e2m1", "group": 16, "scale": "e4m3"}, "amax_floor 0.0, allowed: > 0"),
    ],
)
def test_a_record_that_cannot_work_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVFormat("mine", **fields)  # type: ignore[arg-type]


def test_a_new_format_is_a_record() -> None:
    """FP8 values with E4M3 scales in groups of 8: no code besides the record."""
    fmt = KVFormat("mine", "e4m3", 8, "e4m3", amax_floor=448 * 2.0**-9)
    x = torch.randn(5, 24) * 1000
    assert fmt.row_bytes(24) == 27
    assert (fmt.fake_quant(x) - x).norm() / x.norm() < 0.04
    assert torch.equal(unpack_by_table(fmt, fmt.pack(x), 24), fmt.fake_quant(x))
