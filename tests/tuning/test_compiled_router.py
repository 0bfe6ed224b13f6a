"""The router of the released V4.1-Flash compiled for each target."""

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton.router import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

(TEMPLATE,) = TEMPLATES
FP32, BF16 = torch.float32, torch.bfloat16
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]


def released(tokens: int, weights: torch.dtype, experts: int = 384) -> tuple:
    bias = meta(experts, dtype=FP32)
    return (
        meta(tokens, 5120),
        meta(experts, 5120, dtype=weights),
        bias,
        None,
        6,
        "sqrtsoftplus",
        True,
        1e-20,
        1.5,
        True,
    )


CASES = [
    pytest.param(tokens, weights, target, id=f"{tokens}-{weights}-{target.name}".replace("torch.", ""),
                 marks=[pytest.mark.slow] if target.name == "sm_100a" else [])
    for target in TARGETS
    for weights in (BF16, FP32)
    for tokens in (8, 256, 8192)
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "weights", "target"), CASES)
def test_released_shapes(tokens: int, weights: torch.dtype, target: Target) -> None:
    found = compiled(TEMPLATE, released(tokens, weights), target)
    if tokens == 8:
        assert list(found) == ["router_one_kernel"]
        kernel, one = found["router_one_kernel"]
        assert set(one.tensor_core) == {"HMMA"} and one.async_copies and 16 in one.loads and one.registers <= 200
        assert kernel.ptx.count("atom.global.gpu.acq_rel") == 1
        assert kernel.ptx.count("redux.sync") >= 3 * 6  # a value, its index, its score
        return
    logits, choose = found["router_logits_kernel"], found["router_choose_kernel"]
    assert set(logits[1].tensor_core) == {"HGMMA" if target.has("wgmma") else "UTCHMMA"}
    assert logits[1].async_copies and set(logits[1].stores) == {16}
    # A warp a token: no shared memory but for the layout of what is loaded.
    assert 16 in choose[1].loads and choose[1].registers <= 128


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_1024_experts(target: Target) -> None:
    compiled(TEMPLATE, released(8, BF16, 1024), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("weights", [BF16, FP32], ids=str)
def test_every_config(weights: torch.dtype, target: Target) -> None:
    for tokens in (8, 8192):
        args = released(tokens, weights)
        for config in space(TEMPLATE, args, target):
            compiled(TEMPLATE, args, target, config)


@pytest.mark.parametrize("kind", [FP32, torch.float16], ids=str)
def test_tokens_that_are_not_bf16(kind: torch.dtype) -> None:
    """Products in fp32, without tensor cores."""
    for tokens in (8, 8192):
        args = (meta(tokens, 5120, dtype=kind), *released(tokens, kind)[1:])
        assert not any(facts.tensor_core for _, facts in compiled(TEMPLATE, args, TARGETS[0]).values())
