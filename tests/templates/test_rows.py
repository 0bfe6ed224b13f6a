"""Cache rows: packing is bit-exact, damaged rows stay alone, slots are checked before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.ops import OPS
from dscompile.templates.cpu import rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELEASE = ("fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0")


def dim_of(name: str) -> int:
    fmt = FORMATS[name]
    return fmt.tail + 3 * max(fmt.group, 32)


def hard_values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every magnitude, exact ties of E2M1, zeros of both signs."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 13, (*shape[:-1], 1)).float())
    ties = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0, 0.0, -0.0])
    x[0] = ties[torch.randint(0, 10, shape[1:])]
    x[1] = 0.0
    x[2] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_bits_are_those_of_the_format(fast: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    fmt, dim = FORMATS[name], dim_of(name)
    x = hard_values((40, dim), dtype)
    packed = fast(rows.quant_pack, x, name)
    assert torch.equal(packed, fmt.pack(x))
    assert torch.equal(fast(rows.fake_quant, x, name).view(torch.int8), fmt.fake_quant(x).view(torch.int8))
    for out in DTYPES:
        assert torch.equal(
            fast(rows.unpack, packed, name, dim, out).view(torch.int8), fmt.unpack(packed, dim, out).view(torch.int8)
        )


@pytest.mark.parametrize("name", ["fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"])
def test_every_payload_byte_and_scale_byte_decodes(fast: Callable[..., Any], name: str) -> None:
    dim = 512
    packed = torch.arange(256).repeat(40, 4)[:, : FORMATS[name].row_bytes(dim)].to(torch.uint8)
    packed[:, FORMATS[name].payload_bytes(dim) :] = torch.randint(0, 256, (40, FORMATS[name].scale_bytes(dim)))
    for dtype in (torch.float32, torch.bfloat16):  # bf16 has a way of its own
        got, want = fast(rows.unpack, packed, name, dim, dtype), FORMATS[name].unpack(packed, dim, dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        finite = want == want
        assert torch.equal(got[finite].signbit(), want[finite].signbit())


@pytest.mark.parametrize("name", RELEASE)
def test_nan_and_infinity_stay_in_their_group(fast: Callable[..., Any], name: str) -> None:
    """Case R03."""
    x = torch.randn(6, 128)
    x[1, 40], x[2, 70], x[3, 100] = torch.nan, torch.inf, -torch.inf
    packed, want = fast(rows.quant_pack, x, name), FORMATS[name].pack(x)
    got = fast(rows.unpack, packed, name, 128, torch.float32)
    torch.testing.assert_close(got, FORMATS[name].unpack(want, 128), rtol=0, atol=0, equal_nan=True)
    clean = [0, 4, 5]
    assert torch.equal(packed[clean], want[clean])
    group = FORMATS[name].group
    assert got[1].isnan().sum() == group and got[1, 40 // group * group :][:group].isnan().all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    st.sampled_from(RELEASE),
)
def test_any_group_packs_exactly(fast: Callable[..., Any], values: list[float], name: str) -> None:
    x = torch.tensor(values)
    assert torch.equal(fast(rows.quant_pack, x, name), FORMATS[name].pack(x))


def test_shapes_and_strides(fast: Callable[..., Any]) -> None:
    for shape in ((0, 64), (2, 0, 64), (64,), (2, 3, 5, 64)):
        x = torch.randn(shape)
        packed = fast(rows.quant_pack, x, "fp4_g16_e4m3")
        assert torch.equal(packed, FORMATS["fp4_g16_e4m3"].pack(x))
        assert torch.equal(
            fast(rows.unpack, packed, "fp4_g16_e4m3", 64, torch.float32), FORMATS["fp4_g16_e4m3"].unpack(packed, 64)
        )
    x = torch.randn(64, 5).t()
    assert torch.equal(fast(rows.quant_pack, x, "fp8_g32_ue8m0"), FORMATS["fp8_g32_ue8m0"].pack(x))
    pool = FORMATS["fp8_g32_ue8m0"].pack(torch.randn(9, 64))
    wide = torch.cat((pool, pool), 1)[::2, : pool.shape[1]]
    assert torch.equal(
        fast(rows.unpack, wide, "fp8_g32_ue8m0", 64, torch.bfloat16),
        FORMATS["fp8_g32_ue8m0"].unpack(wide, 64, torch.bfloat16),
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_store(fast: Callable[..., Any], dtype: torch.dtype) -> None:
    pool = torch.zeros(16, 24).to(dtype)
    rows_ = torch.randint(1, 99, (5, 24)).to(dtype)
    slots = torch.tensor([3, -1, 15, 3, 0])
    want = pool.clone()
    OPS["store_rows"].reference(want, rows_, slots)
    fast(rows.store_rows, pool, rows_, slots)
    assert torch.equal(pool, want) and torch.equal(pool[3], rows_[3])
    fast(rows.store_rows, pool, rows_[:0], slots[:0])
    assert torch.equal(pool, want)


@pytest.mark.parametrize("slot", [16, 2**40 + 17, -2, -(2**40)])
def test_a_slot_out_of_range_writes_nothing(slot: int) -> None:
    """Case R05: guard rows around the pool, one good slot next to the bad one."""
    guarded = torch.zeros(18, 8)
    with pytest.raises(IndexError, match="slots"):
        rows.store_rows(guarded[1:17], torch.ones(2, 8), torch.tensor([15, slot]))
    assert guarded.eq(0).all()


def test_store_into_a_slice_of_wider_rows(fast: Callable[..., Any]) -> None:
    wide = torch.zeros(4, 30)
    fast(rows.store_rows, wide[:, 10:20], torch.ones(1, 10), torch.tensor([2]))
    assert wide.sum() == 10 and wide[2, 10:20].eq(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*RELEASE, "none", "bf16"])
def test_norm_rope_store(fast: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    count, dim, half = 33, 128, 16
    x = torch.randn(count, dim).to(dtype)
    x[5], x[6] = torch.nan, 0.0
    angle = torch.rand(count, half) * 6
    slots = torch.randperm(64)[:count]
    slots[::4] = -1
    width = dim if name == "none" else FORMATS[name].row_bytes(dim)
    for weight in (torch.rand(dim) + 0.5, None):
        pool = torch.zeros(64, width, dtype=dtype if name == "none" else torch.uint8)
        want_pool = pool.clone()
        args = (x, weight, angle.cos(), angle.sin(), slots, 1e-6, name)
        want = OPS["norm_rope_store"].reference(want_pool, *args)
        got = fast(rows.norm_rope_store, pool, *args)
        same = (got == want) | (got.isnan() & want.isnan())
        keep = [i for i in range(count) if i != 5]
        if name == "none":
            torch.testing.assert_close(got[keep], want[keep], rtol=1.6e-2 if dtype == torch.bfloat16 else 2e-3, atol=0)
            same[:] = True
        # The sum of squares may differ in its last bit and move a value that sits on a rounding boundary.
        assert same[keep].all() if weight is None else same[keep].float().mean() > 0.98
        stored = slots >= 0
        assert torch.equal(pool[slots[stored]].view(torch.uint8), got[stored].view(torch.uint8))
        untouched = torch.ones(64, dtype=torch.bool)
        untouched[slots[stored]] = False
        assert pool[untouched].eq(0).all()


def test_skipped_rows_may_hold_anything(fast: Callable[..., Any]) -> None:
    """Case R04."""
    x = torch.randn(4, 64)
    clean_pool, pool = torch.zeros(8, 68, dtype=torch.uint8), torch.zeros(8, 68, dtype=torch.uint8)
    angle, slots = torch.rand(4, 8), torch.tensor([3, -1, 5, -1])
    tail = (torch.rand(64), angle.cos(), angle.sin(), slots, 1e-6, "fp8_g32_ue8m0")
    clean_pool, pool = (p[:, :66].contiguous() for p in (clean_pool, pool))
    fast(rows.norm_rope_store, clean_pool, x, *tail)
    x[1] = x[3] = torch.nan
    fast(rows.norm_rope_store, pool, x, *tail)
    assert torch.equal(pool, clean_pool)
