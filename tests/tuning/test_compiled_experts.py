"""The experts of the released V4.1-Flash compiled for each target: tensor cores, 16-byte accesses, no spills."""

import re

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton.experts import TEMPLATES
from support.offline import compiled, meta

(TEMPLATE,) = TEMPLATES
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]


def released(tokens: int, kind: torch.dtype = torch.bfloat16) -> tuple:
    return (
        meta(tokens, 5120, dtype=kind), meta(tokens, 6, dtype=torch.int64), meta(tokens, 6, dtype=torch.float32),
        meta(384, 4608, 5120, dtype=kind), meta(384, 5120, 2304, dtype=kind), 10.0, True, torch.float32,
    )  # fmt: skip


def copies(ptx: str) -> set[int]:
    """Widths of the asynchronous copies to shared memory."""
    found = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)
    return {int(width, 0) for width in found}


CASES = [
    pytest.param(tokens, target, id=f"{tokens}-{target.name}", marks=[pytest.mark.slow] if slow else [])
    for target in TARGETS
    for tokens, slow in ((8, False), (256, True), (8192, target.name == "sm_100a"))
]


@pytest.mark.parametrize(("tokens", "target"), CASES)
def test_released_shapes(tokens: int, target: Target) -> None:
    found = compiled(TEMPLATE, released(tokens), target)
    sort = {"sort_few_kernel"} if tokens < 300 else {"count_kernel", "place_kernel"}
    assert set(found) == {"expert_up_kernel", "expert_down_kernel", "combine_kernel"} | sort
    unit = "HGMMA" if target.has("wgmma") else "UTCHMMA"
    for name in ("expert_up_kernel", "expert_down_kernel"):
        kernel, facts = found[name]
        assert set(facts.tensor_core) == {unit}
        assert copies(kernel.ptx) == {16} and set(facts.stores) == {16}
    assert 16 in found["combine_kernel"][1].stores


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[2]], ids=lambda target: target.name)
def test_fp32_needs_no_tensor_core(target: Target) -> None:
    found = compiled(TEMPLATE, released(8, torch.float32), target)
    assert not found["expert_up_kernel"][1].tensor_core
