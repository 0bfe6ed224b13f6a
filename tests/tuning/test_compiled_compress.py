"""Pooling compiled for each GPU, with the shapes of V4.1 (two tokens) and V4 (four with overlap, 128)."""

import pytest
import torch

from dscompile.targets import TARGETS, Target
from dscompile.templates.triton.compress import TEMPLATES
from support.offline import compiled, meta

GPUS = [target for target in TARGETS.values() if target.capability]
gpus = pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)


def arguments(groups: int, ratio: int, overlap: bool, kind: torch.dtype) -> tuple:
    width = 1024 if overlap else 512
    tokens = meta(8, groups, ratio, width, dtype=kind)
    prior = meta(8, ratio, 512, dtype=kind) if overlap else None
    ape = meta(ratio, width, dtype=torch.float32) if ratio > 2 else None
    return tokens, tokens, ape, prior, prior, overlap


@gpus
@pytest.mark.parametrize("groups", [1, pytest.param(512, marks=pytest.mark.slow)])
def test_two_tokens(groups: int, target: Target) -> None:
    ((_, facts),) = compiled(TEMPLATES[0], arguments(groups, 2, False, torch.float32), target).values()
    assert set(facts.loads) == {16} and set(facts.stores) <= {16, 8} and facts.registers <= 64


@gpus
@pytest.mark.parametrize(
    ("ratio", "overlap"), [(4, True), pytest.param(128, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_groups_of_v4(ratio: int, overlap: bool, target: Target) -> None:
    ((_, facts),) = compiled(TEMPLATES[0], arguments(64, ratio, overlap, torch.float32), target).values()
    assert set(facts.loads) == {16} and facts.registers <= 128


@gpus
@pytest.mark.slow
def test_bf16(target: Target) -> None:
    ((_, facts),) = compiled(TEMPLATES[0], arguments(64, 2, False, torch.bfloat16), target).values()
    assert set(facts.loads) == {16}
