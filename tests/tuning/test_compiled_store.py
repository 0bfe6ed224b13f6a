"""Row writers compiled for each GPU: one warp and no barrier a row, wide accesses, conversions in hardware."""

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.targets import TARGETS, Target
from dscompile.templates.triton.store import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

FUSED, STORE = TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]
#: Rows of the released V4.1: values, and the widest store that a row of that many bytes allows its payload.
RELEASE = {"fp8_g32_ue8m0": (512, 16), "fp4_g16_e4m3": (512, 8), "fp4_g32_ue8m0": (128, 4), "none": (512, 16)}
gpus = pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)


def arguments(name: str, batch: int, dim: int) -> tuple:
    width, kind = (dim, torch.bfloat16) if name == "none" else (FORMATS[name].row_bytes(dim), torch.uint8)
    angles = meta(batch, 32, dtype=torch.float32)
    return (
        meta(4096, width, dtype=kind), meta(batch, dim), meta(dim, dtype=torch.float32), angles, angles,
        meta(batch, dtype=torch.int64), 1e-20, name,
    )  # fmt: skip


@gpus
@pytest.mark.parametrize("name", RELEASE)
@pytest.mark.parametrize("batch", [8, pytest.param(256, marks=pytest.mark.slow)])
def test_fused_writer(name: str, batch: int, target: Target) -> None:
    dim, payload = RELEASE[name]
    ((kernel, facts),) = compiled(FUSED, arguments(name, batch, dim), target).values()
    assert kernel.warps == 1 and kernel.shared_bytes == 0 and "bar.sync" not in kernel.ptx
    assert facts.registers <= 96
    # Two rows of x, the weight, the angles: all 16 bytes; 8 for the slot.
    assert set(facts.loads) == {8, 16} and facts.loads[16] >= 3
    # The row goes to two places. What is narrower than the payload are the scales, of which a row has 16, 32 or 4.
    assert max(facts.stores) == payload and facts.stores[payload] >= 2
    assert name == "none" or facts.stores == {1: 2, payload: 2}
    fp4 = "fp4" in name
    assert ("cvt.rn.satfinite.e2m1x2.f32" in kernel.ptx) == (fp4 and target.has("e2m1_cvt"))
    assert name != "fp8_g32_ue8m0" or "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx
    # Where scales are no powers of two: two divisions for each of the two groups that a thread has a part of.
    assert kernel.ptx.count("div.rn") <= (4 if name == "fp4_g16_e4m3" else 0)


@gpus
def test_code_is_short(target: Target) -> None:
    """Instructions that a warp executes for a row of 512 values, 16 to a thread: a few dozen each at most."""
    most = {"fp8_g32_ue8m0": 560, "fp4_g16_e4m3": 900, "fp4_g32_ue8m0": 520, "none": 330}
    for name, limit in most.items():
        ((_, facts),) = compiled(FUSED, arguments(name, 8, RELEASE[name][0]), target).values()
        assert facts.instructions <= limit, name


@gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_g64_ue8m0_tail64", "fp8_g128_fp32", "fp8_g128_fp32_pow2", "bf16"])
def test_other_records(name: str, target: Target) -> None:
    ((_, facts),) = compiled(FUSED, arguments(name, 8, 512), target).values()
    assert 16 in facts.loads and max(facts.stores) >= 4


@gpus
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "aligned"), [(96, 1), (448, 2), (5120, 16)])
def test_rows_that_are_no_power_of_two(dim: int, aligned: int, target: Target) -> None:
    """Packed rows are stored as widely as they are aligned: 99, 462 or 5280 bytes apart."""
    for name, widest in (("fp8_g32_ue8m0", aligned), ("none", 16)):
        ((_, facts),) = compiled(FUSED, arguments(name, 8, dim), target).values()
        assert 16 in facts.loads and max(facts.stores) == widest


@gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASE)
def test_every_config(name: str, target: Target) -> None:
    """None of them spills; those with more rows a program move values between threads, and need more registers."""
    args = arguments(name, 256, RELEASE[name][0])
    found = [compiled(FUSED, args, target, each)["make_rows_kernel"][1] for each in space(FUSED, args, target)]
    assert len(found) >= 3 and all(facts.registers <= 128 for facts in found)
    assert found[0].instructions == min(facts.instructions for facts in found)


@gpus
@pytest.mark.parametrize(("width", "access"), [(528, 16), (288, 16), (68, 4)])
def test_rows_as_they_are(width: int, access: int, target: Target) -> None:
    rows, pool = meta(256, width, dtype=torch.uint8), meta(4096, width, dtype=torch.uint8)
    ((_, facts),) = compiled(STORE, (pool, rows, meta(256, dtype=torch.int64)), target).values()
    assert set(facts.stores) == {access} and access in facts.loads and facts.registers <= 40
