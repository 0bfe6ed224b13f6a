"""Products of the released V4.1-Flash compiled for the GPUs: several weights of one input; a norm and its product."""

import re

import pytest
import torch

from dscompile.targets import TARGETS, Target
from dscompile.templates.triton import linears, norm_linear
from support.kernels import space
from support.offline import compiled, meta

(LINEARS,), (NORM_LINEAR,) = linears.TEMPLATES, norm_linear.TEMPLATES
GPUS = [target for target in TARGETS.values() if target.capability]


def latents(tokens: int, kind: torch.dtype = torch.bfloat16) -> tuple:
    """The query's latent of 1,280 and the window row of 512, from a hidden size of 5,120."""
    return meta(tokens, 5120, dtype=kind), meta(1280, 5120, dtype=kind), meta(512, 5120, dtype=kind), None, None


def copies(ptx: str) -> set[int]:
    """Widths of asynchronous copies."""
    return {int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)}


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("tokens", [8, 256])
def test_linears(tokens: int, target: Target) -> None:
    """Weights stream through shared memory, 16 bytes at a time; K is split, in one launch."""
    chosen = space(LINEARS, latents(tokens), target)[0]
    kernel, facts = compiled(LINEARS, latents(tokens), target, chosen)["linears_kernel"]
    assert set(facts.tensor_core) == {"UTCHMMA" if target.has("tcgen05") else "HGMMA"}
    assert copies(kernel.ptx) == {16} and set(facts.stores) <= {4, 8, 16}
    tiles = -(-tokens // chosen["BLOCK_T"]) * 1792 // chosen["BLOCK_N"]
    assert chosen["SPLITS"] > 1 and tiles * chosen["SPLITS"] > 0.7 * target.sm_count.value
    assert facts.registers <= 168


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_every_config_of_linears(kind: torch.dtype, target: Target) -> None:
    for tokens in (8, 64, 256, 8192):
        for chosen in space(LINEARS, latents(tokens, kind), target):
            compiled(LINEARS, latents(tokens, kind), target, chosen)


def queries(tokens: int, kind: torch.dtype = torch.bfloat16) -> tuple:
    """64 heads of 512 from the query's latent."""
    return meta(tokens, 1280, dtype=kind), meta(1280, dtype=torch.float32), 1e-6, "fp32", meta(32768, 1280, dtype=kind)


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("tokens", [8, 256])
def test_norm_linear(tokens: int, target: Target) -> None:
    kernel, facts = compiled(NORM_LINEAR, queries(tokens), target)["norm_linear_kernel"]
    assert set(facts.tensor_core) == {"UTCHMMA" if target.has("tcgen05") else "HGMMA"}
    assert copies(kernel.ptx) <= {4, 8, 16} and 16 in copies(kernel.ptx)  # of the norm's weight a few bytes a thread
    assert set(facts.loads) == set(facts.stores) == {16}


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_every_config_of_norm_linear(kind: torch.dtype, target: Target) -> None:
    for tokens in (8, 64, 256):
        for chosen in space(NORM_LINEAR, queries(tokens, kind), target):
            compiled(NORM_LINEAR, queries(tokens, kind), target, chosen)
