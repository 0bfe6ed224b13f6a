"""Sinkhorn normalisation, several matrices a program."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.sinkhorn import sinkhorn_matrices
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

LARGEST = 32


@triton.jit
def sinkhorn_kernel(logits, out, MATRICES, iters, eps, SIZE: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """logits, out: dense [MATRICES, SIZE, SIZE]."""
    matrix = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None, None]
    row, column = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    at = (matrix * SIZE + row) * SIZE + column
    inside = (matrix < MATRICES) & (row < SIZE) & (column < SIZE)
    given = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, sinkhorn_matrices(given, iters, eps, SIZE, P), mask=inside)


def sinkhorn(logits: Tensor, iters: int, eps: float, *, config: Config, target: Target) -> Tensor:
    """`dsv4::sinkhorn`: logits [..., n, n] -> fp32 [..., n, n]."""
    size = logits.shape[-1]
    dense = logits.contiguous()
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    matrices = logits.numel() // (size * size)
    launch(
        sinkhorn_kernel, (triton.cdiv(matrices, config["BLOCK"]),), dense, out, matrices, iters, eps,
        config=config, SIZE=size, P=triton.next_power_of_2(size), BLOCK=config["BLOCK"],
    )  # fmt: skip
    return out


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    values = triton.next_power_of_2(int(sizes["n"])) ** 2
    for warps in (1, 4):
        # 4 to 16 values a thread: what reductions need is in few threads.
        yield from (config(warps, 1, BLOCK=max(1, each * 32 * warps // values)) for each in (4, 16))


def _applies(meta: Meta) -> str | None:
    size = meta["logits"].shape[-1]
    return None if 0 < size <= LARGEST else f"matrices of {size} rows, allowed: 1 to {LARGEST}"


TEMPLATES = (TritonTemplate("sinkhorn", "dsv4::sinkhorn", sinkhorn, _configs, applies=_applies),)
