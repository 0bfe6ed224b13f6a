"""Row stores: slots, padding, bounds, duplicates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401
from dscompile.formats import FORMATS

store = torch.ops.dsv4.store_rows
fused = torch.ops.dsv4.norm_rope_store
NAN = float("nan")


@given(st.data())
def test_store_equals_a_loop(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 9))
    slots = data.draw(st.lists(st.integers(-1, capacity - 1), max_size=12))
    pool, rows = torch.randn(capacity, 3), torch.randn(len(slots), 3)
    want = pool.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            want[slot] = row
    store(pool, rows, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(pool, want)


def test_the_last_of_many_equal_slots_wins() -> None:
    """Enough rows that a plain scatter is split over threads, which then write in any order."""
    count, capacity = 200_000, 7
    slots = torch.randint(-1, capacity, (count,))
    pool, rows = torch.zeros(capacity, 4), torch.arange(count).float()[:, None].expand(count, 4).contiguous()
    store(pool, rows, slots)
    assert pool[:, 0].tolist() == [float((slots == s).nonzero().max()) for s in range(capacity)]


def guarded(capacity: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A pool between two guard rows, and the whole buffer."""
    buffer = torch.randint(0, 255, (capacity + 2, width), dtype=torch.uint8)
    buffer = buffer if dtype == torch.uint8 else torch.randn(capacity + 2, width, dtype=dtype)
    return buffer[1:-1], buffer


def test_padding_rows_write_nothing() -> None:
    """Case R04: slot -1 is skipped; NaN in a skipped row reaches neither values nor scales of any other."""
    fmt = FORMATS["fp4_g16_e4m3"]
    pool, buffer = guarded(8, fmt.row_bytes(64), torch.uint8)
    before = buffer.clone()
    x = torch.randn(4, 64)
    x[1] = x[3] = NAN
    none = torch.zeros(4, 0)
    fused(pool, x, None, none, none, torch.tensor([3, -1, 5, -1]), 1e-6, "fp4_g16_e4m3")
    want = before.clone()
    want[1 + 3], want[1 + 5] = fmt.pack(x[0]), fmt.pack(x[2])
    assert torch.equal(buffer, want)


@pytest.mark.parametrize("bad", [16, 17, 2**31 + 3, 2**40 + 17, 2**32 + 15, -2, -(2**40)])
def test_a_slot_out_of_range_is_refused_and_nothing_is_written(bad: int) -> None:
    """Case R05: the bound is tested in 64 bits, before anything is written."""
    pool, buffer = guarded(16, 4, torch.float32)
    before = buffer.clone()
    slots = torch.tensor([15, bad])
    with pytest.raises(IndexError, match=rf"dsv4::store_rows: slots is {bad}; allowed: -1 <= slots < 16"):
        store(pool, torch.ones(2, 4), slots)
    none = torch.zeros(2, 0)
    with pytest.raises(IndexError, match=f"dsv4::norm_rope_store: slots is {bad}"):
        fused(pool, torch.ones(2, 4), None, none, none, slots, 1e-6, "none")
    assert torch.equal(buffer, before)
    store(pool, torch.full((1, 4), 7.0), torch.tensor([15]))
    before[16] = 7.0
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("format", ["none", "fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_store_is_the_chain_of_its_parts(format: str, dtype: torch.dtype) -> None:
    x, weight, angle = torch.randn(5, 64).to(dtype), torch.rand(64) + 0.5, torch.rand(5, 16) * 6
    cos, sin, slots = angle.cos(), angle.sin(), torch.tensor([4, -1, 0, 4, 2])
    ops = torch.ops.dsv4
    rows = ops.quant_pack(ops.rope(ops.rms_norm(x, weight, 1e-20, "fp32"), cos, sin, False), format)
    want = torch.zeros(6, rows.shape[1], dtype=rows.dtype)
    pool = want.clone()
    store(want, rows, slots)
    assert torch.equal(fused(pool, x, weight, cos, sin, slots, 1e-20, format), rows)
    assert torch.equal(pool, want)
    assert torch.equal(pool[4], rows[3]), "of equal slots the last row stays"


def test_a_quantised_row_is_the_fake_quantised_value() -> None:
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for name in ("fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0", "bf16", "none"):
        rows = torch.ops.dsv4.quant_pack(x, name)
        back = torch.ops.dsv4.unpack(rows, name, 64, torch.bfloat16)
        assert torch.equal(back, torch.ops.dsv4.fake_quant(x, name)), name


def test_arguments_are_checked() -> None:
    pool, rows, slots = torch.zeros(4, 8), torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    none = torch.zeros(2, 0)
    with pytest.raises(TypeError, match=r"dtype of slots is torch.int32; allowed: torch.int64"):
        store(pool, rows, slots.int())
    with pytest.raises(TypeError, match=r"dtype of rows is torch.float16; allowed: torch.float32"):
        store(pool, rows.half(), slots)
    with pytest.raises(ValueError, match=r"shape of rows is \[2, 7\]; allowed: \[2, 8\]"):
        store(pool, rows[:, :7], slots)
    with pytest.raises(ValueError, match=r"shape of slots is \[1\]; allowed: \[2\]"):
        store(pool, rows, slots[:1])
    with pytest.raises(ValueError, match=r"norm_rope_store: format is 'fp9'; allowed: 'none', .*'fp4_g16_e4m3'"):
        fused(pool, rows, None, none, none, slots, 1e-6, "fp9")
    with pytest.raises(ValueError, match=r"format is 'fp8_g32_ue8m0'; allowed: .*multiple of the group 32"):
        fused(pool, rows, None, none, none, slots, 1e-6, "fp8_g32_ue8m0")
    with pytest.raises(ValueError, match=r"shape of pool is \[4, 8\]; allowed: \[slots, 33\]"):
        fused(pool, torch.zeros(2, 32), None, none, none, slots, 1e-6, "fp8_g32_ue8m0")
    with pytest.raises(TypeError, match=r"dtype of pool is torch.float32; allowed: torch.uint8"):
        fused(torch.zeros(4, 33), torch.zeros(2, 32), None, none, none, slots, 1e-6, "fp8_g32_ue8m0")
    with pytest.raises(ValueError, match=r"2 \* last axis of cos is 10; allowed: <= 8"):
        fused(pool, rows, None, torch.zeros(2, 5), torch.zeros(2, 5), slots, 1e-6, "none")
    with pytest.raises(ValueError, match=r"shape of weight is \[7\]; allowed: \[8\]"):
        fused(pool, rows, torch.zeros(7), none, none, slots, 1e-6, "none")
