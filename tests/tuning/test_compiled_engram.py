"""Engram compiled for each GPU, with the released table's rows and streams."""

import pytest
import torch

from dscompile.targets import TARGETS, Target
from dscompile.templates.triton.engram import TEMPLATES
from support.offline import compiled, meta

GATHER, GATE = TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]
gpus = pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)


@gpus
def test_rows_of_the_table(target: Target) -> None:
    """24 rows a token of 256 bytes and 8 scales; offsets into 98 GB need 64 bits."""
    table, scales = meta(384_006_168, 256, dtype=torch.uint8), meta(384_006_168, 8, dtype=torch.uint8)
    args = (table, scales, meta(8, 1, 24, dtype=torch.int64), torch.bfloat16)
    ((kernel, facts),) = compiled(GATHER, args, target).values()
    assert set(facts.loads) == {1, 8, 16} and set(facts.stores) == {16}
    assert kernel.shared_bytes == 0 and facts.registers <= 64


@gpus
@pytest.mark.parametrize("batch", [8, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gate(batch: int, masked: bool, target: Target) -> None:
    streams, weight = meta(batch, 1, 4, 5120), meta(4, 5120)
    mask = meta(batch, 1, dtype=torch.bool) if masked else None
    args = (streams, streams, meta(batch, 1, 5120), weight, weight, mask, 1e-20)
    ((_, facts),) = compiled(GATE, args, target).values()
    assert set(facts.loads) == ({1, 16} if masked else {16}) and set(facts.stores) == {16}
    assert facts.registers <= 128
