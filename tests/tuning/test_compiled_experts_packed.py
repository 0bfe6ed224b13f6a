"""The quantised experts of the released V4.1-Flash compiled for each target."""

import re

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton.experts_packed import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

(TEMPLATE,) = TEMPLATES
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]
FORMATS = {"e2m1_1x32": (2, 1), "e4m3_32x32": (1, 32)}


def released(tokens: int, kind: str) -> tuple:
    packed, rows = FORMATS[kind]
    octets = torch.uint8
    return (
        meta(tokens, 5120), meta(tokens, 6, dtype=torch.int64), meta(tokens, 6, dtype=torch.float32),
        meta(384, 4608, 5120 // packed, dtype=octets), meta(384, 4608 // rows, 160, dtype=octets),
        meta(384, 5120, 2304 // packed, dtype=octets), meta(384, 5120 // rows, 72, dtype=octets),
        10.0, kind, torch.float32,
    )  # fmt: skip


CASES = [
    pytest.param(tokens, kind, target, id=f"{tokens}-{kind}-{target.name}", marks=[] if quick else [pytest.mark.slow])
    for target in TARGETS
    for kind in FORMATS
    for tokens in (8, 256, 8192)
    for quick in [target.name != "sm_100a" and tokens != 256 and (kind == "e2m1_1x32" or tokens == 8)]
]


@pytest.mark.parametrize(("tokens", "kind", "target"), CASES)
def test_released_shapes(tokens: int, kind: str, target: Target) -> None:
    found = compiled(TEMPLATE, released(tokens, kind), target)
    unit, scaled = ("HGMMA", False) if target.has("wgmma") else ("UTCQMMA", True)
    for name in ("packed_up_kernel", "packed_down_kernel"):
        kernel, facts = found[name]
        assert set(facts.tensor_core) == {unit}
        assert ("block_scale" in kernel.ptx) == scaled
        # Codes come 16 bytes at a time, scales four at a time; nothing that is read in the loop is narrower.
        widths = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", kernel.ptx)
        assert {int(width, 0) for width in widths} <= {4, 8, 16} and "0x10" in widths
        assert 1 not in facts.loads
        assert max(facts.stores) >= 8
    if kind == "e2m1_1x32" and not scaled:
        assert "mul.rn.bf16x2" in found["packed_up_kernel"][0].ptx


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_config(kind: str, target: Target) -> None:
    """None of the space spills."""
    args = released(8, kind)
    for config in space(TEMPLATE, args, target):
        compiled(TEMPLATE, args, target, config)
