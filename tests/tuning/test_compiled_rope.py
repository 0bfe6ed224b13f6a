"""The rotation compiled for each GPU."""

import pytest
import torch

from dscompile.targets import TARGETS, Target
from dscompile.templates.triton.rope import TEMPLATES
from support.offline import compiled, meta

GPUS = [target for target in TARGETS.values() if target.capability]


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize(("heads", "dim"), [(64, 512), pytest.param(32, 128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inverse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_queries_of_the_released_model(heads: int, dim: int, inverse: bool, target: Target) -> None:
    angles = meta(8, 1, 1, 32, dtype=torch.float32)
    ((kernel, facts),) = compiled(TEMPLATES[0], (meta(8, 1, heads, dim), angles, angles, inverse), target).values()
    assert set(facts.loads) == {16} and set(facts.stores) == {16}
    assert kernel.shared_bytes == 0 and facts.registers <= 64
