"""The mixture of experts of the released V4.1-Flash on stored weights, compiled for each target."""

import re
from typing import Any

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton.moe_packed import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

(TEMPLATE,) = TEMPLATES
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]
FORMATS = {"e2m1_1x32": (2, 1), "e4m3_32x32": (1, 32)}
FP32 = torch.float32


def released(tokens: int, kind: str) -> tuple[Any, ...]:
    packed, rows = FORMATS[kind]

    def octets(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=torch.uint8)

    return (
        meta(tokens, 5120), meta(tokens, 6, dtype=torch.int64), meta(tokens, 6, dtype=FP32),
        octets(384, 4608, 5120 // packed), octets(384, 4608 // rows, 160), octets(384, 5120, 2304 // packed),
        octets(384, 5120 // rows, 72), octets(2304, 5120), octets(72, 160), octets(2304, 5120), octets(72, 160),
        octets(5120, 2304), octets(160, 72), 10.0, kind, FP32,
        meta(tokens, 4, 5120), meta(tokens, 4, dtype=FP32), meta(tokens, 4, 4, dtype=FP32), True,
    )  # fmt: skip


CASES = [
    pytest.param(tokens, kind, target, id=f"{tokens}-{kind}-{target.name}", marks=[] if quick else [pytest.mark.slow])
    for target in TARGETS
    for kind in FORMATS
    for tokens in (8, 256, 8192)
    for quick in [target.name != "sm_100a" and tokens == 8 and kind == "e2m1_1x32"]
]


@pytest.mark.parametrize(("tokens", "kind", "target"), CASES)
def test_released_shapes(tokens: int, kind: str, target: Target) -> None:
    found = compiled(TEMPLATE, released(tokens, kind), target)
    few = {"quantise_kernel", "moe_packed_up_kernel", "moe_packed_down_kernel", "moe_sum_kernel"}
    assert set(found) - few == (set() if tokens < 300 else {"count_kernel", "place_kernel"})
    unit, scaled = ("HGMMA", False) if target.has("wgmma") else ("UTCQMMA", True)
    for name in ("moe_packed_up_kernel", "moe_packed_down_kernel"):
        kernel, facts = found[name]
        assert set(facts.tensor_core) == {unit}
        assert ("block_scale" in kernel.ptx) == scaled
        # Codes come 16 bytes at a time, scales four at a time; nothing that is read in the loops is narrower.
        widths = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", kernel.ptx)
        assert {int(width, 0) for width in widths} <= {4, 8, 16} and "0x10" in widths
        assert 1 not in facts.loads
        assert max(facts.stores) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_config(kind: str, target: Target) -> None:
    """None of the space spills."""
    args = released(8, kind)
    for config in space(TEMPLATE, args, target):
        compiled(TEMPLATE, args, target, config)
