"""The stored linear maps of the released V4.1-Flash compiled for each target."""

import pytest
import torch

from dscompile.targets import Target, get_target
from dscompile.templates.triton.linear_packed import TEMPLATES
from support.kernels import space
from support.offline import compiled, meta

LINEAR, PAIR, OUTPUT = TEMPLATES
TARGETS = [get_target(name) for name in ("sm_90a", "sm_100a", "sm_103a")]
#: wq_a, wq_b, wkv: columns and size.
SHAPES = {"wq_a": (1280, 5120), "wq_b": (32768, 1280), "wkv": (512, 5120)}


def released(rows: int, name: str) -> tuple:
    columns, size = SHAPES[name]
    scale = meta(columns // 32, size // 32, dtype=torch.uint8)
    return meta(rows, size), meta(columns, size, dtype=torch.float8_e4m3fn), scale


CASES = [
    pytest.param(rows, name, target, id=f"{rows}-{name}-{target.name}", marks=[] if quick else [pytest.mark.slow])
    for target in TARGETS
    for name in SHAPES
    for rows in (8, 256, 8192)
    for quick in [target.name != "sm_100a" and rows != 256 and (name == "wq_a" or rows == 8)]
]


@pytest.mark.parametrize(("rows", "name", "target"), CASES)
def test_released_shapes(rows: int, name: str, target: Target) -> None:
    found = compiled(LINEAR, released(rows, name), target)
    facts = found["linear_packed_kernel"][1]
    assert set(facts.tensor_core) == {"UTCQMMA" if target.has("block_scaled_mma") else "HGMMA"}
    assert facts.async_copies and 1 not in facts.loads
    assert ("round_rows_kernel" in found) == (rows > 64)


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[2]], ids=lambda target: target.name)
def test_queries_and_window_rows(target: Target) -> None:
    x, *weight = released(8, "wq_a")
    facts = compiled(PAIR, (x, *weight, *released(8, "wkv")[1:]), target)["linear_packed_kernel"][1]
    assert set(facts.tensor_core) == {"UTCQMMA" if target.has("block_scaled_mma") else "HGMMA"} and facts.async_copies


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_config(target: Target) -> None:
    for rows in (8, 64, 8192):
        args = released(rows, "wq_a")
        for config in space(LINEAR, args, target):
            compiled(LINEAR, args, target, config)
    output = (meta(8, 8, 4096), meta(8, 1024, 4096), meta(5120, 8192, dtype=torch.float8_e4m3fn),
              meta(160, 256, dtype=torch.uint8))  # fmt: skip
    for config in space(OUTPUT, output, target):
        compiled(OUTPUT, output, target, config)
