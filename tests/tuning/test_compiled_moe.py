"""The mixture of experts of the released V4.1-Flash compiled: tensor cores, 16-byte accesses, no spills."""

from typing import Any

import pytest
import torch
from tuning.test_compiled_experts import copies

from dscompile.targets import Target, get_target
from dscompile.templates.triton.moe import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

(TEMPLATE,) = TEMPLATES
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]
FP32 = torch.float32


def released(tokens: int, shared: int = 2304) -> tuple[Any, ...]:
    return (
        meta(tokens, 5120), meta(tokens, 6, dtype=torch.int64), meta(tokens, 6, dtype=FP32), meta(384, 4608, 5120),
        meta(384, 5120, 2304), meta(shared, 5120), meta(shared, 5120), meta(5120, shared), 10.0, True, FP32,
        meta(tokens, 4, 5120), meta(tokens, 4, dtype=FP32), meta(tokens, 4, 4, dtype=FP32), True,
    )  # fmt: skip


CASES = [
    pytest.param(tokens, target, id=f"{tokens}-{target.name}", marks=[pytest.mark.slow] if slow else [])
    for target in TARGETS
    for tokens, slow in ((8, False), (256, target.name != "sm_103a"), (8192, target.name != "sm_90a"))
]


@pytest.mark.parametrize(("tokens", "target"), CASES)
def test_released_shapes(tokens: int, target: Target) -> None:
    found = compiled(TEMPLATE, released(tokens), target)
    sort = {"sort_few_kernel"} if tokens < 300 else {"count_kernel", "place_kernel"}
    assert set(found) == {"moe_up_kernel", "moe_down_kernel", "moe_sum_kernel"} | sort
    unit = "HGMMA" if target.has("wgmma") else "UTCHMMA"
    for name in ("moe_up_kernel", "moe_down_kernel"):
        kernel, facts = found[name]
        assert set(facts.tensor_core) == {unit}
        assert copies(kernel.ptx) == {16} and set(facts.stores) == {16}
    loads, stores = found["moe_sum_kernel"][1].loads, found["moe_sum_kernel"][1].stores
    assert set(stores) == {16} and loads[16] >= 6 + 1 + 4


@pytest.mark.parametrize(
    "target", [pytest.param(t, id=t.name, marks=[pytest.mark.slow] if "100" in t.name else []) for t in TARGETS]
)
def test_copies_by_descriptor(target: Target) -> None:
    """Everything that the loops read, but for tokens on Hopper; on Blackwell by warps of their own."""
    args = released(8192)
    config = space(TEMPLATE, args, target)[1]
    found = compiled(TEMPLATE, args, target, config)
    blackwell = target.has("tcgen05")
    for name in ("moe_up_tma_kernel", "moe_down_tma_kernel"):
        kernel, facts = found[name]
        assert set(facts.tensor_core) == {"UTCHMMA" if blackwell else "HGMMA"}
        assert "cp.async.bulk.tensor" in kernel.ptx and set(facts.stores) == {16}
        assert ("setmaxnreg" in kernel.ptx) == blackwell
        assert copies(kernel.ptx) == (set() if blackwell or "down" in name else {16})
    assert ("tile::gather4" in found["moe_up_tma_kernel"][0].ptx) == blackwell


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_config(target: Target) -> None:
    """None of the space spills."""
    for config in space(TEMPLATE, released(8192), target):
        compiled(TEMPLATE, released(8192), target, config)


def test_a_wider_shared_expert() -> None:
    found = compiled(TEMPLATE, released(8, 4608), TARGETS[2])
    kernel, facts = found["moe_down_kernel"]
    assert copies(kernel.ptx) == {16} and set(facts.tensor_core) == {"UTCHMMA"}
