"""The output projection of the released V4.1-Flash compiled for each target."""

import re

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton.grouped_output import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

(TEMPLATE,) = TEMPLATES
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]


def released(tokens: int, kind: torch.dtype = torch.bfloat16) -> tuple:
    return meta(tokens, 8, 4096, dtype=kind), meta(8, 1024, 4096, dtype=kind), meta(5120, 8192, dtype=kind)


CASES = [
    pytest.param(tokens, target, id=f"{tokens}-{target.name}",
                 marks=[pytest.mark.slow] if target.name == "sm_100a" else [])
    for target in TARGETS
    for tokens in (8, 256, 8192)
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "target"), CASES)
def test_released_shapes(tokens: int, target: Target) -> None:
    kernel, facts = compiled(TEMPLATE, released(tokens), target)["grouped_linear_kernel"]
    unit = "HMMA" if tokens == 8 else "HGMMA" if target.has("wgmma") else "UTCHMMA"
    assert set(facts.tensor_core) == {unit} and set(facts.stores) <= {8, 16}
    assert not facts.loads, "all through asynchronous copies"
    widths = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", kernel.ptx)
    assert {int(width, 0) for width in widths} == {16}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_every_config(kind: torch.dtype, target: Target) -> None:
    for tokens in (8, 256, 8192):
        for config in space(TEMPLATE, released(tokens, kind), target):
            compiled(TEMPLATE, released(tokens, kind), target, config)
