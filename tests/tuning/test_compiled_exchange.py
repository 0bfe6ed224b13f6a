"""The exchange of the released V4.1-Flash compiled for each target: one launch, 16-byte accesses."""

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton.exchange import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

PACK, COMBINE = TEMPLATES
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]


def indices(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int64)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("tokens", [8, 256])
def test_pack(tokens: int, target: Target) -> None:
    args = (meta(tokens, 5120), indices(6 * tokens), "fp8_g32_ue8m0")
    found = compiled(PACK, args, target)
    assert list(found) == ["pack_rows_kernel"]
    kernel, facts = found["pack_rows_kernel"]
    # Sixteen values a thread: twice 16 bytes in, 16 bytes of codes out, and a scale for every other thread.
    assert facts.loads[16] == 2 and facts.stores == {1: 1, 16: 1} and facts.registers <= 40
    # Two values are converted an instruction; a group is reduced within two threads.
    assert kernel.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 8 and "bar.sync" not in kernel.ptx
    for config in space(PACK, args, target):
        compiled(PACK, args, target, config)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("tokens", [8, 256])
def test_combine(tokens: int, target: Target) -> None:
    args = (meta(6 * tokens, 5120), indices(tokens, 6), meta(tokens, 6, dtype=torch.float32))
    found = compiled(COMBINE, args, target)
    assert list(found) == ["combine_rows_kernel"]
    facts = found["combine_rows_kernel"][1]
    # Six rows of eight values a thread, all on their way at once; eight values of fp32 out.
    assert facts.loads[16] == 6 and facts.stores[16] == 2 and facts.registers <= 64
