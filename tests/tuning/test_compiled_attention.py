"""Sparse attention compiled for the GPUs, in the shapes of the released V4.1-Flash."""

from typing import Any

import pytest
import torch

from dscompile.targets import TARGETS, Target, get_target
from dscompile.templates.triton.record import Config
from dscompile.templates.triton.sparse_attention import TEMPLATES
from dscompile.tuning.disassembly import Facts
from support.kernels import space, spec_of
from support.offline import compiled, meta

TEMPLATE, PAGED = TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]
FP8, FP4 = "fp8_g32_ue8m0", "fp4_g16_e4m3"


def arguments(
    batch: int, tokens: int = 1, heads: int = 64, rows: int = 8192, picks: int | None = 512
) -> tuple[Any, ...]:  # fmt: skip
    """Heads of 512, a window of 128 rows of 528 bytes, 512 of the rows of 288 bytes; or all of them, or none."""
    int64, window = torch.int64, 128
    angle = meta(batch, tokens, 32, dtype=torch.float32)
    return (
        meta(batch, tokens, heads, 512), meta(batch, window + tokens - 1, 528, dtype=torch.uint8),
        meta(batch, tokens, dtype=int64), meta(batch, dtype=int64), window,
        None if picks is None else meta(batch, rows, 288, dtype=torch.uint8),
        meta(batch, tokens, picks, dtype=int64) if picks else None,
        None if picks is None or picks else meta(batch, tokens, dtype=int64),
        meta(heads, dtype=torch.float32), 512**-0.5, angle, angle, True, FP8, FP4,
    )  # fmt: skip


def paged(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same call with the window's rows in a pool."""
    q, window_kv, *rest = args
    return q, meta(100_000, 528, dtype=torch.uint8), meta(*window_kv.shape[:2], dtype=torch.int64), *rest


def first_with(target: Target, args: tuple[Any, ...], **constants: int) -> Config:
    space = TEMPLATE.space(spec_of(TEMPLATE).sizes(*args), target)
    return next(c for c in space if all(c[name] == value for name, value in constants.items()))


def check(facts: Facts, core: str) -> None:
    assert set(facts.tensor_core) == {core}
    # Payloads, queries and results 16 bytes at a time; scales, lists and positions are what is narrower.
    assert facts.loads[16] >= 8 and facts.stores[16] >= 4 and 1 not in facts.loads
    assert facts.registers <= 255


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("batch", [8, 256])
def test_decode(target: Target, batch: int) -> None:
    """64 rows of queries fill tcgen05. Hopper's wgmma would need them too, but its sums are registers: 64 heads of 512
    leave none for keys. There 16 or 32 rows go through mma.sync.
    """
    args = arguments(batch)
    if target.has("tcgen05"):
        chosen = first_with(target, args, BLOCK_H=64)
    else:
        chosen = TEMPLATE.space(spec_of(TEMPLATE).sizes(*args), target)[0]
    kernels = compiled(TEMPLATE, args, target, chosen)
    assert (chosen["SPLITS"] > 1) == (batch == 8)
    assert ("combine_kernel" in kernels) == (batch == 8 and not chosen["COMBINE"])
    kernel, facts = kernels["sparse_attention_kernel"]
    check(facts, "UTCHMMA" if target.has("tcgen05") else "HMMA")
    assert kernel.tensor_memory_columns <= 512
    if "combine_kernel" in kernels:
        assert kernels["combine_kernel"][1].registers <= 128 and kernels["combine_kernel"][1].loads[16] >= 8


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("batch", [8, 256])
def test_decode_from_a_pool_in_one_launch(target: Target, batch: int) -> None:
    """The window's rows through slots. Of 8 sequences the last program of a tile of heads puts the parts together."""
    args = paged(arguments(batch))
    chosen = PAGED.space(spec_of(PAGED).sizes(*args), target)[0]
    assert (chosen["SPLITS"] > 1) == bool(chosen["COMBINE"]) == (batch == 8)
    ((kernel, facts),) = compiled(PAGED, args, target, chosen).values()
    check(facts, "UTCHMMA" if kernel.tensor_memory_columns else "HMMA")


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_few_heads(target: Target) -> None:
    """8 heads of a rank, padded to 16: as columns of tcgen05, whose rows are then keys and values of the heads."""
    args = arguments(8, heads=8)
    chosen = first_with(target, args, SWAP=1 if target.has("tcgen05") else 0)
    check(compiled(TEMPLATE, args, target, chosen)["sparse_attention_kernel"][1],
          "UTCHMMA" if target.has("tcgen05") else "HMMA")  # fmt: skip


def test_prompt() -> None:
    """A layer with a window only: neighbouring tokens share its rows."""
    target = get_target("sm_103a")
    args = arguments(1, 4096, heads=8, picks=None)
    chosen = first_with(target, args, TOKENS=2)
    facts = compiled(TEMPLATE, args, target, chosen)["sparse_attention_kernel"][1]
    check(facts, "UTCHMMA" if chosen["SWAP"] else "HMMA")


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize(
    "args",
    [arguments(1, 4096), arguments(8, picks=0), arguments(1, 4096, picks=0), arguments(1, 4096, heads=20, picks=None)],
    ids=["prompt", "all rows", "prompt, all rows", "prompt, window"],
)
def test_other_shapes(target: Target, args: tuple[Any, ...]) -> None:
    assert compiled(TEMPLATE, args, target)["sparse_attention_kernel"][1].tensor_core


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_plain_rows(target: Target) -> None:
    """bf16 rows as a model without quantisation has them, and fp32, whose products are exact fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        args = list(arguments(8, heads=16))
        args[0], args[1] = meta(8, 1, 16, 512, dtype=dtype), meta(8, 128, 512, dtype=dtype)
        args[5] = meta(8, 8192, 512, dtype=dtype)
        args[13] = args[14] = "none"
        facts = compiled(TEMPLATE, tuple(args), target)["sparse_attention_kernel"][1]
        assert bool(facts.tensor_core) == (dtype == torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_every_config(target: Target) -> None:
    """All tiles that the check lets through compile without spills."""
    for template, args in ((TEMPLATE, arguments(8)), (PAGED, paged(arguments(8))), (TEMPLATE, arguments(8, heads=128))):
        for chosen in space(template, args, target):
            compiled(template, args, target, chosen)
