"""Compiling what a template would launch for a target, and the facts that every kernel must have."""

from __future__ import annotations

from typing import Any

import torch

from dscompile.targets import Target
from dscompile.templates.triton.record import Config, TritonTemplate
from dscompile.tuning.disassembly import Facts, read
from dscompile.tuning.offline import CompiledKernel, compile_launch, launches_of
from support.kernels import space


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(
    template: TritonTemplate, args: tuple[Any, ...], target: Target, config: Config | None = None
) -> dict[str, tuple[CompiledKernel, Facts]]:
    """Every kernel of a call on meta tensors, by name (the last of a name), compiled and read.

    All must be free of spills and local arrays, and fit into a block's shared memory.
    """
    config = config or space(template, args, target)[0]
    found = {}
    for launch in launches_of(template, args, config, target):
        kernel = compile_launch(launch, target)
        facts = read(kernel.cubin)
        assert facts.spills == 0 and facts.stack_bytes == 0, f"{kernel.name} on {target.name} spills: {facts}"
        assert kernel.shared_bytes <= target.smem_bytes_per_block, f"{kernel.name}: {kernel.shared_bytes} bytes shared"
        found[kernel.name] = kernel, facts
    assert found
    return found
