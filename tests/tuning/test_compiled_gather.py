"""Rows decoded by index, compiled for each GPU."""

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.targets import TARGETS, Target
from dscompile.templates.triton.gather import TEMPLATES
from support.offline import compiled, meta

GATHER, USED = TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]
RELEASE = {"fp8_g32_ue8m0": (512, 16), "fp4_g16_e4m3": (512, 8), "fp4_g32_ue8m0": (128, 4)}
gpus = pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)


@gpus
@pytest.mark.parametrize("name", RELEASE)
def test_gathered_rows(name: str, target: Target) -> None:
    """What is narrower than the payload: scales, one a group; indices have 8 bytes."""
    dim, payload = RELEASE[name]
    rows = meta(8, 65536, FORMATS[name].row_bytes(dim), dtype=torch.uint8)
    args = (rows, meta(8, 512, dtype=torch.int64), name, dim, torch.bfloat16)
    ((kernel, facts),) = compiled(GATHER, args, target).values()
    assert set(facts.loads) == {1, 8, payload} and set(facts.stores) == {16}
    assert ("cvt.rn.f16x2.e2m1x2" in kernel.ptx) == ("fp4" in name and target.has("e2m1_cvt"))
    assert kernel.shared_bytes == 0 and facts.registers <= 64


@gpus
@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASE)
def test_used_rows(name: str, target: Target) -> None:
    dim, payload = RELEASE[name]
    rows = meta(8, 65536, FORMATS[name].row_bytes(dim), dtype=torch.uint8)
    found = compiled(USED, (rows, meta(8, 256, 512, dtype=torch.int64), name, dim, torch.bfloat16), target)
    facts = found["decode_rows_kernel"][1]
    assert payload in facts.loads and set(facts.stores) == {16}
    assert set(found["last_index_kernel"][1].loads) == {16}
