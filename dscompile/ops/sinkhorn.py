"""Sinkhorn normalisation of the stream-mixing matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

_CHECK = Check("sinkhorn")


def _validate(logits: Tensor, iters: int, eps: float) -> None:
    _CHECK.dtype("logits", logits, FLOATS)
    _CHECK.min_rank("logits", logits, 2, "[..., n, n]")
    _CHECK.that(logits.shape[-1] == logits.shape[-2], "shape of logits", list(logits.shape), "[..., n, n]")
    _CHECK.positive("iters", iters)
    _CHECK.that(eps >= 0, "eps", eps, ">= 0")


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """logits [..., n, n] -> fp32 [..., n, n], nearly doubly stochastic.

    softmax over the last axis plus eps; columns (axis -2) divided by their sum + eps; then iters - 1 times rows, then
    columns. It ends on columns, so those sum to 1 and the rows to 1 only in the limit.
    """
    _validate(logits, iters, eps)
    matrix = torch.softmax(logits.float(), -1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def _fake(logits: Tensor, iters: int, eps: float) -> Tensor:
    _validate(logits, iters, eps)
    return logits.new_empty(logits.shape, dtype=torch.float32)


@costed
def _cost(N: Any, n: Any, iters: Any, x_bytes: Any = 4) -> Cost:
    """N matrices n x n; the softmax counts 4 an element, each half step an add and a divide."""
    return Cost(N * n * n * x_bytes, N * n * n * 4, N * n * n * (4 + 2 * (2 * iters - 1)))


def _sizes(logits: Tensor, iters: int, eps: float) -> dict[str, Any]:
    rows = math.prod(logits.shape[:-2])
    return {"N": rows, "n": logits.shape[-1], "iters": iters, "x_bytes": logits.element_size()}


define(
    "sinkhorn(Tensor logits, int iters, float eps) -> Tensor",
    family="mhc", reference=sinkhorn, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
