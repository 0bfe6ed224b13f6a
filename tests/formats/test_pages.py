"""Page views and converters."""

import pytest
import torch
from formats.oracle import bits
from hypothesis import given
from hypothesis import strategies as st

from dscompile.formats import FORMATS, KVFormat, PageLayout

PAGED = [name for name, fmt in FORMATS.items() if fmt.page.order == "segregated"]
RELEASE = ["fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"]


def dim_of(fmt: KVFormat) -> int:
    """The release's width of a row of this format."""
    return 128 if "index" in fmt.name or fmt.group == 128 or fmt.name == "fp4_g32_ue8m0" else 512


@pytest.mark.parametrize(
    ("name", "rows", "row_bytes", "stride"),
    [
        ("flashmla_v41", 64, 528, 33792),
        ("flashmla_v41", 1, 528, 1024),
        ("flashmla_v41_fp4", 64, 288, 18432),
        ("flashmla_v41_fp4", 3, 288, 1024),
        ("flashmla_v4", 64, 584, 37440),
        ("vllm_sm90", None, 584, 37440),
        ("vllm_sm100_window", None, 528, 16896),
        ("vllm_sm100_fp8", None, 528, 67584),
        ("vllm_sm100_fp4", None, 288, 36864),
        ("vllm_sm100_index_fp4", None, 68, 8704),
        ("vllm_sm100_index_fp8", None, 132, 16896),
        ("deepgemm_index_fp4", 64, 68, 4608),
        ("deepgemm_index_fp8", 64, 132, 8704),
    ],
)
def test_page_strides(name: str, rows: int | None, row_bytes: int, stride: int) -> None:
    fmt = FORMATS[name]
    assert fmt.row_bytes(dim_of(fmt)) == row_bytes
    assert fmt.page_bytes(dim_of(fmt), rows) == stride


def test_segregated_page_byte_by_byte() -> None:
    """Where byte b of row r lies, written as plain index arithmetic."""
    fmt, dim, count = FORMATS["flashmla_v41_fp4"], 32, 3
    payload, row = 16, 18
    rows = torch.arange(count * row, dtype=torch.uint8).view(count, row)
    page = fmt.rows_to_pages(rows, dim)
    assert page.shape == (256,)
    for r in range(count):
        for b in range(row):
            at = r * payload + b if b < payload else count * payload + r * (row - payload) + b - payload
            assert page[at] == rows[r, b]
    assert (page[count * row :] == 0).all()


@given(st.data())
@pytest.mark.parametrize("name", [*PAGED, "fp4_g16_e4m3", "bf16"])
def test_rows_to_pages_and_back(name: str, data: st.DataObject) -> None:
    fmt = FORMATS[name]
    dim = data.draw(st.integers(1, 3)) * max(fmt.group, 1) + fmt.tail
    count = fmt.page.rows or data.draw(st.integers(1, 9))
    lead = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    rows = torch.randint(0, 256, (*lead, count, fmt.row_bytes(dim)), dtype=torch.uint8)
    pages = fmt.rows_to_pages(rows, dim)
    assert pages.shape == (*lead, fmt.page_bytes(dim, count))
    assert pages.shape[-1] % fmt.page.align_bytes == 0
    assert torch.equal(fmt.pages_to_rows(pages, dim, count), rows)
    payload, scales = fmt.page_parts(pages, dim, count)
    assert torch.equal(torch.cat((payload, scales), -1), rows)


@pytest.mark.parametrize("name", [*PAGED, *RELEASE])
def test_page_parts_are_views_that_read_and_write(name: str) -> None:
    fmt, dim = FORMATS[name], dim_of(FORMATS[name])
    count = fmt.page.rows or 4
    x = torch.randn(2, count, dim)
    pages = torch.zeros(2, fmt.page_bytes(dim, count), dtype=torch.uint8)
    payload, scales = fmt.page_parts(pages, dim, count)
    assert payload.data_ptr() == pages.data_ptr()
    assert scales.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
    for part, values in zip((payload, scales), fmt.encode(x)):
        part[:, 1:] = values[:, 1:]
    rows = fmt.pack(x)
    rows[:, 0] = 0
    assert torch.equal(pages, fmt.rows_to_pages(rows, dim))
    assert torch.equal(fmt.decode(payload, scales, dim)[:, 1:], fmt.fake_quant(x)[:, 1:])


def test_row_contiguous_pages_are_views_both_ways() -> None:
    fmt = FORMATS["fp4_g16_e4m3"]
    rows = torch.zeros(2, 5, 288, dtype=torch.uint8)
    pages = fmt.rows_to_pages(rows, 512)
    assert pages.data_ptr() == rows.data_ptr()
    assert fmt.pages_to_rows(pages, 512, 5).data_ptr() == rows.data_ptr()


def test_page_errors() -> None:
    fmt = FORMATS["vllm_sm100_fp4"]
    with pytest.raises(ValueError, match=r"pages have shape \(2, 100\), allowed: \[..., 36864\] for 128 rows"):
        fmt.page_parts(torch.zeros(2, 100, dtype=torch.uint8), 512)
    with pytest.raises(TypeError, match=r"pages have dtype torch.int8, allowed: torch.uint8"):
        fmt.pages_to_rows(torch.zeros(2, 36864, dtype=torch.int8), 512)
    with pytest.raises(ValueError, match=r"rows of a page have shape \(3, 288\), allowed: \[..., 128, 288\]"):
        fmt.rows_to_pages(torch.zeros(3, 288, dtype=torch.uint8), 512)
    with pytest.raises(ValueError, match=r"rows per page None, allowed: >= 1"):
        FORMATS["flashmla_v41"].page_bytes(512)
    with pytest.raises(ValueError, match=r"page order 'columns', allowed: \['rows', 'segregated'\]"):
        PageLayout("columns")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"page alignment 0 bytes, allowed: >= 1"):
        PageLayout(align_bytes=0)


def test_same_row_in_another_page_converts_without_touching_a_byte() -> None:
    window, paged = FORMATS["fp8_g32_ue8m0"], FORMATS["flashmla_v41"]
    rows = torch.randint(0, 256, (3, 528), dtype=torch.uint8)
    assert window.same_row(paged) and window.convert(rows, 512, paged) is rows
    assert FORMATS["fp8_g128_fp32"].same_row(FORMATS["fp8_g128_fp32_pow2"])
    assert not window.same_row(FORMATS["vllm_sm90"])


@given(st.data())
@pytest.mark.parametrize("source", RELEASE)
@pytest.mark.parametrize("target", ["bf16", "fp32"])
def test_release_rows_convert_to_bf16_and_fp32_without_loss(source: str, target: str, data: st.DataObject) -> None:
    src, dst = FORMATS[source], FORMATS[target]
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    x = torch.tensor(data.draw(st.lists(numbers, min_size=32, max_size=32)))
    rows = src.pack(x)
    converted = src.convert(rows, 32, dst)
    assert converted.shape == (dst.row_bytes(32),)
    assert torch.equal(bits(dst.unpack(converted, 32)), bits(src.unpack(rows, 32)))


@given(st.data())
@pytest.mark.parametrize("target", list(FORMATS))
@pytest.mark.parametrize("source", ["fp4_g16_e4m3", "fp8_g32_ue8m0", "vllm_sm90", "fp16"])
def test_convert_is_pack_of_the_read_values(source: str, target: str, data: st.DataObject) -> None:
    src, dst = FORMATS[source], FORMATS[target]
    numbers = st.floats(-1000, 1000, width=16)
    x = torch.tensor(data.draw(st.lists(numbers, min_size=2, max_size=2))).repeat(192) * torch.linspace(0.1, 2, 384)
    if not src.is_plain and (384 - src.tail) % src.group or not dst.is_plain and (384 - dst.tail) % dst.group:
        return
    rows = src.pack(x)
    right = rows if src.same_row(dst) else dst.pack(src.unpack(rows, 384))
    assert torch.equal(src.convert(rows, 384, dst), right)


def test_convert_checks_the_rows() -> None:
    with pytest.raises(ValueError, match=r"rows have shape \(3, 288\), allowed: \[..., 528\]"):
        FORMATS["fp8_g32_ue8m0"].convert(torch.zeros(3, 288, dtype=torch.uint8), 512, FORMATS["flashmla_v41"])
