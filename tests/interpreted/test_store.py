"""Rows written into a pool: bit for bit the reference's, in their slots and nowhere else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.formats.registry import RECORDS
from dscompile.ops.layout import row_dtype
from dscompile.targets import Target, get_target
from dscompile.templates.triton.record import config
from dscompile.templates.triton.store import TEMPLATES
from support.kernels import named, reference, runs, spec_of
from support.triton_interpreter import count_traffic

FUSED, STORE = TEMPLATES
TARGET = get_target("sm_103a")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
RELEASE = {"fp8_g32_ue8m0": (512, 528), "fp4_g16_e4m3": (512, 288), "fp4_g32_ue8m0": (128, 68), "none": (512, 512)}
ROWS = ["none", *(record.name for record in RECORDS if record.page == FORMATS["bf16"].page)]
SOME = config(1, 1, N=8)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def width_of(name: str, dim: int) -> int:
    return dim if name == "none" else FORMATS[name].row_bytes(dim)


def pool_of(name: str, dim: int, slots: int, dtype: torch.dtype) -> Tensor:
    """A pool between two guard rows, and something in each of them."""
    return torch.full((slots + 2, width_of(name, dim)), 77).to(row_dtype(name, dtype))


def angles(rows: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, half) * 6
    return angle.cos(), angle.sin()


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", RELEASE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_rows_are_exact(name: str, dtype: torch.dtype, target: Target) -> None:
    """Without a norm nothing depends on the order of a sum."""
    dim, width = RELEASE[name]
    x = torch.randn(7, dim).to(dtype)
    x[3] = 0.0
    slots = torch.tensor([3, -1, 0, 15, 7, 8, -1])
    want_pool = pool_of(name, dim, 16, dtype)
    assert want_pool.shape[1] == width
    args = (x, None, *angles(7, 32), slots, 0.0, name)
    want = reference(FUSED, want_pool[1:-1], *args)
    for _ in range(2):
        pool = pool_of(name, dim, 16, dtype)
        for got in runs(FUSED, (pool[1:-1], *args), target):
            assert got.dtype == want.dtype and torch.equal(raw(got), raw(want))
            assert torch.equal(raw(pool), raw(want_pool))


@pytest.mark.parametrize("name", ROWS)
def test_no_rotation_is_plain_packing(name: str) -> None:
    """cos 1 and sin 0, or no angles at all."""
    dim = 512 if name == "none" else FORMATS[name].tail + 3 * max(FORMATS[name].group, 16)
    x = torch.randn(5, dim).bfloat16() * 100
    want = x if name == "none" else FORMATS[name].pack(x)
    for half in (0, dim // 2):
        pool = pool_of(name, dim, 5, x.dtype)
        args = (pool[1:-1], x, None, torch.ones(5, half), torch.zeros(5, half), torch.arange(5), 0.0, name)
        got = FUSED.fn(*args, config=SOME, target=TARGET)
        assert torch.equal(raw(got), raw(want)) and torch.equal(raw(pool[1:-1]), raw(want))


def codes_of(rows: Tensor, name: str, dim: int) -> Tensor:
    """Payload codes as integers that rise with the value."""
    payload = rows[:, : FORMATS[name].payload_bytes(dim)].to(torch.int32)
    if FORMATS[name].payload == "e2m1":
        payload = torch.stack((payload & 15, payload >> 4), -1).flatten(1)
        return torch.where(payload >= 8, 8 - payload, payload)
    return torch.where(payload >= 128, 128 - payload, payload)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_normalised_rows(dtype: torch.dtype, weights: torch.dtype, target: Target) -> None:
    """The sum of squares may be added up in another order, which changes the scale by a few units of 2^-24.

    A value then lands on the other side of a boundary of its own type with a probability of a few 2^-16 (bf16), and of
    the codes with less: next to none of them may differ, and those by one step.
    """
    for name, (dim, _) in RELEASE.items():
        count = 24
        x = (torch.randn(count, dim) * torch.exp2(torch.randint(-8, 8, (count, 1)).float())).to(dtype)
        weight = (torch.rand(dim) + 0.5).to(weights)
        args = (x, weight, *angles(count, 32), torch.arange(count), 1e-20, name)
        want = reference(FUSED, pool_of(name, dim, count, dtype)[1:-1], *args)
        pool = pool_of(name, dim, count, dtype)
        got = FUSED.fn(pool[1:-1], *args, config=SOME, target=target)
        assert torch.equal(raw(pool[1:-1]), raw(got)) and pool[0].eq(77).all() and pool[-1].eq(77).all()
        if name == "none":
            torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            if dtype != torch.float32:
                assert (got != want).float().mean() <= 2e-3
        else:
            step = (codes_of(got, name, dim) - codes_of(want, name, dim)).abs()
            scales = FORMATS[name].payload_bytes(dim)
            assert torch.equal(got[:, scales:], want[:, scales:])
            assert step.max() <= 1 and (step > 0).float().mean() <= 2e-3


def test_rounding_comes_after_the_norm_and_after_the_rotation() -> None:
    """A kernel that kept fp32 in between would differ in thousands of codes; this one in none for these rows."""
    x, weight = torch.randn(16, 512).bfloat16(), torch.rand(512) + 0.5
    cos, sin = angles(16, 256)
    got = FUSED.fn(
        pool_of("none", 512, 16, x.dtype)[1:-1], x, weight, cos, sin, torch.arange(16), 1e-20, "none",
        config=SOME, target=TARGET,
    )  # fmt: skip
    wide = x.float()
    normed = (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-20))).bfloat16().float()
    even, odd = normed[:, ::2], normed[:, 1::2]
    want = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(1).bfloat16()
    assert (got != want).float().mean() <= 1e-3


@settings(max_examples=40)
@given(
    st.sampled_from(ROWS), st.integers(0, 9), st.integers(1, 5), st.sampled_from(DTYPES), st.booleans(), st.data(),
)  # fmt: skip
def test_any_shape(name: str, count: int, groups: int, dtype: torch.dtype, gaps: bool, data: st.DataObject) -> None:
    """Rows that are no power of two or odd, any part rotated, rows and angles of wider tensors, a wider pool."""
    plain = name == "none" or FORMATS[name].is_plain
    if not plain and FORMATS[name].scale == "fp32":
        count = max(count, 1)  # the reference cannot pack zero rows with one such scale each
    dim = data.draw(st.integers(1, 70)) if plain else FORMATS[name].tail + groups * FORMATS[name].group
    half = data.draw(st.integers(0, dim // 2))
    size = 2 if name in ("bf16", "fp16") else 4 if name == "fp32" else 1
    x = torch.randn(count, dim + 3).to(dtype)[:, 3:] if gaps else torch.randn(count, dim).to(dtype)
    cos, sin = angles(count, half)
    if gaps:
        cos, sin = torch.cat((cos, sin), 1)[:, :half], torch.cat((cos, sin), 1)[:, half:]
    slots = torch.randperm(12)[:count] - 2
    slots[slots == -2] = -1
    wide = torch.zeros(12, width_of(name, dim) + 2 * size).to(row_dtype(name, dtype))
    want_wide = wide.clone()
    pool, want_pool = (p[1:-1, size:-size] if gaps else p[1:-1, : -2 * size].contiguous() for p in (wide, want_wide))
    args = (x, None, cos, sin, slots, 0.0, name)
    want = reference(FUSED, want_pool, *args)
    for got in runs(FUSED, (pool, *args), TARGET, most=1):
        assert torch.equal(raw(got), raw(want))
    assert torch.equal(raw(pool), raw(want_pool)) and torch.equal(raw(wide), raw(want_wide))


def test_strided_weight_slots_and_angles() -> None:
    x, (cos, sin), slots = torch.randn(4, 64), angles(8, 32), torch.arange(8)[::2]
    args = (x.bfloat16(), torch.rand(128)[::2], cos.t()[:16, :4].t(), sin[:4, ::2], slots, 1e-6, "fp8_g32_ue8m0")
    want_pool, pool = (pool_of("fp8_g32_ue8m0", 64, 8, torch.bfloat16) for _ in range(2))
    want = reference(FUSED, want_pool[1:-1], *args)
    got = FUSED.fn(pool[1:-1], *args, config=SOME, target=TARGET)
    assert torch.equal(got, want) and torch.equal(pool, want_pool)


def test_long_rows(target: Target) -> None:
    x, weight = torch.randn(2, 5120).bfloat16(), torch.rand(5120) + 0.5
    args = (x, weight, *angles(2, 64), torch.tensor([1, 0]), 1e-6, "fp8_g32_ue8m0")
    want = reference(FUSED, pool_of("fp8_g32_ue8m0", 5120, 2, x.dtype)[1:-1], *args)
    for got in runs(FUSED, (pool_of("fp8_g32_ue8m0", 5120, 2, x.dtype)[1:-1], *args), target, most=9):
        assert (got != want).float().mean() <= 1e-3


# -- R03 to R05 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASE)
def test_r03_and_r04_skipped_rows_may_hold_anything(name: str) -> None:
    dim, _ = RELEASE[name]
    clean = torch.randn(4, dim).bfloat16()
    x = clean.clone()
    x[1] = x[3] = torch.nan
    weight, (cos, sin) = torch.rand(dim), angles(4, 32)
    cos[1], sin[3] = torch.nan, torch.inf
    pools = []
    for rows in (clean, x):
        pools.append(pool_of(name, dim, 16, x.dtype))
        args = (pools[-1][1:-1], rows, weight, cos, sin, torch.tensor([3, -1, 5, -1]), 1e-6, name)
        got = FUSED.fn(*args, config=SOME, target=TARGET)
        assert torch.equal(raw(pools[-1][4]), raw(got[0])) and torch.equal(raw(pools[-1][6]), raw(got[2]))
    assert torch.equal(raw(pools[0]), raw(pools[1]))
    kept = [i for i in range(18) if i not in (4, 6)]
    assert pools[0][kept].eq(77).all()


@pytest.mark.parametrize("name", ["fp8_g32_ue8m0", "none"])
def test_r05_slots_are_compared_in_64_bits(name: str) -> None:
    slots = torch.tensor([15, 16, 2**40 + 17, -(2**40), -2, 2**32 + 3, 2**63 - 1])
    x = torch.randn(7, 64)
    pool = pool_of(name, 64, 16, x.dtype)
    args = (pool[1:-1], x, None, *angles(7, 8), slots, 0.0, name)
    got = FUSED.fn(*args, config=SOME, target=TARGET)
    assert torch.equal(raw(pool[16]), raw(got[0]))
    assert pool[:16].eq(77).all() and pool[17].eq(77).all()

    pool = pool_of(name, 64, 16, x.dtype)
    STORE.fn(pool[1:-1], got, slots, config=config(1, 1, BLOCK=64, N=2), target=TARGET)
    assert torch.equal(raw(pool[16]), raw(got[0]))
    assert pool[:16].eq(77).all() and pool[17].eq(77).all()


def test_of_equal_slots_the_last_row_stays_here() -> None:
    """Only because the interpreter runs programs one after the other; a GPU promises one of them, see the docstring."""
    x = torch.randn(5, 64)
    slots = torch.tensor([2, 1, 2, 1, 2])
    want_pool, pool = (pool_of("fp4_g32_ue8m0", 64, 4, x.dtype) for _ in range(2))
    args = (x, None, *angles(5, 8), slots, 0.0, "fp4_g32_ue8m0")
    reference(FUSED, want_pool[1:-1], *args)
    FUSED.fn(pool[1:-1], *args, config=config(1, 1, N=1), target=TARGET)
    assert torch.equal(pool, want_pool)


# -- rows as they are --------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.sampled_from([torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, *DTYPES]), st.integers(0, 9),
    st.sampled_from([1, 2, 17, 68, 132, 288, 528, 1030]), st.booleans(),
)  # fmt: skip
def test_store_rows(dtype: torch.dtype, count: int, width: int, gaps: bool) -> None:
    """Any dtype, any length, rows and pool that are parts of wider ones."""
    size = dtype.itemsize
    wide = torch.randint(0, 2, (14, (width + 3) * size), dtype=torch.uint8).view(dtype)
    rows = torch.randint(0, 2, (count, (width + 5) * size), dtype=torch.uint8).view(dtype)
    rows = rows[:, 2:-3] if gaps else rows[:, :width].contiguous()
    slots = torch.randperm(14)[:count] - 2
    want_wide, got_wide = wide.clone(), wide.clone()
    reference(STORE, want_wide[1:-1, 3:].view(torch.uint8), rows.contiguous().view(torch.uint8), slots.clamp(min=-1))
    for _ in runs(STORE, (got_wide[1:-1, 3:], rows, slots), TARGET):
        assert torch.equal(raw(got_wide), raw(want_wide))


def test_store_reads_no_skipped_row() -> None:
    rows, pool = torch.randint(0, 255, (4, 64)).to(torch.uint8), torch.zeros(8, 64, dtype=torch.uint8)
    with count_traffic() as traffic:
        next(runs(STORE, (pool, rows, torch.tensor([3, -1, 8, 0])), TARGET))
    assert traffic.loaded == 4 * 8 + 2 * 64 and traffic.stored == 2 * 64


# -- bytes, refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASE)
def test_bytes(name: str) -> None:
    """Each input once, the row twice: into the pool and as the result."""
    dim, width = RELEASE[name]
    x, weight, pool = torch.randn(16, dim).bfloat16(), torch.rand(dim), pool_of(name, dim, 16, torch.bfloat16)
    args = (pool[1:-1], x, weight, *angles(16, 32), torch.randperm(16), 1e-20, name)
    with count_traffic() as traffic:
        next(runs(FUSED, args, TARGET))
    cost = spec_of(FUSED).cost_of(*args).numbers()
    assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
    assert traffic.distinct_loaded == cost["read_bytes"]
    rows = pool[1:-1].clone()
    with count_traffic() as traffic:
        next(runs(STORE, (pool[1:-1], rows, torch.randperm(16)), TARGET))
    cost = spec_of(STORE).cost_of(pool[1:-1], rows, args[5]).numbers()
    assert traffic.stored == traffic.distinct_stored == cost["write_bytes"]
    assert traffic.loaded == traffic.distinct_loaded == cost["read_bytes"]


def test_refuses() -> None:
    x, none, slots = torch.zeros(2, 16), torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64)
    across = torch.zeros(16, 4).t()
    args = (across, x, None, none, none, slots, 0.0, "none")
    assert "pool: 4 from one value to the next" in str(FUSED.applies(named(FUSED, args)))
    assert "pool: 4 from one value to the next" in str(STORE.applies(named(STORE, (across, x, slots))))
    pool = torch.zeros(4, 65, dtype=torch.uint8)[:, 1:]
    assert "multiples of 4 (fp32)" in str(FUSED.applies(named(FUSED, (pool, x, None, none, none, slots, 0.0, "fp32"))))
    pool, x = torch.zeros(4, 8200), torch.zeros(2, 8200)
    assert "rows of 8200" in str(FUSED.applies(named(FUSED, (pool, x, None, none, none, slots, 0.0, "none"))))
    sizes = {"D": 8192, "N": 1, "R": 0, "row_bytes": 16384}
    assert FUSED.check(config(1, 1, N=1), sizes, TARGET) == "256 values a thread, allowed: 32"
