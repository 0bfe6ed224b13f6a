"""Packing, fake quantisation and unpacking compiled for each GPU."""

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.targets import TARGETS, Target
from dscompile.templates.triton.quant import TEMPLATES
from support.offline import compiled, meta

PACK, FAKE_QUANT, UNPACK = TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]
RELEASE = {"fp8_g32_ue8m0": (512, 16), "fp4_g16_e4m3": (512, 8), "fp4_g32_ue8m0": (128, 4)}
gpus = pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)


@gpus
@pytest.mark.parametrize("name", RELEASE)
def test_values_to_rows(name: str, target: Target) -> None:
    dim, payload = RELEASE[name]
    ((kernel, facts),) = compiled(PACK, (meta(256, dim), name), target).values()
    assert set(facts.loads) == {16} and facts.stores == {1: 1, payload: 1}
    assert kernel.shared_bytes == 0 and facts.registers <= 64
    assert ("cvt.rn.satfinite.e2m1x2.f32" in kernel.ptx) == ("fp4" in name and target.has("e2m1_cvt"))


@gpus
@pytest.mark.parametrize("name", RELEASE)
def test_rows_to_values(name: str, target: Target) -> None:
    dim, payload = RELEASE[name]
    rows = meta(256, FORMATS[name].row_bytes(dim), dtype=torch.uint8)
    ((kernel, facts),) = compiled(UNPACK, (rows, name, dim, torch.bfloat16), target).values()
    assert set(facts.loads) == {1, payload} and set(facts.stores) == {16}
    assert ("cvt.rn.f16x2.e2m1x2" in kernel.ptx) == ("fp4" in name and target.has("e2m1_cvt"))
    assert kernel.shared_bytes == 0 and facts.registers <= 64


@gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", [*RELEASE, "fp8_g64_ue8m0_tail64", "fp8_g128_fp32", "fp16"])
def test_there_and_back(name: str, target: Target) -> None:
    ((_, facts),) = compiled(FAKE_QUANT, (meta(256, 512), name), target).values()
    assert set(facts.loads) == {16} and set(facts.stores) == {16}


@gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_g64_ue8m0_tail64", "fp8_g128_fp32", "bf16", "none"])
def test_other_records_are_read_widely(name: str, target: Target) -> None:
    width, kind = (512, torch.bfloat16) if name == "none" else (FORMATS[name].row_bytes(512), torch.uint8)
    ((_, facts),) = compiled(UNPACK, (meta(256, width, dtype=kind), name, 512, torch.bfloat16), target).values()
    assert max(facts.loads) >= 8 and 16 in facts.stores
