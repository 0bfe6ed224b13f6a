"""Routing on the CPU: the logits in one product, then scores, choice and weights of a token in one pass.

The choice walks the experts once and keeps a sorted list of k, so that of equal scores the lowest index wins.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.linear import few_rows
from dscompile.templates.cpu.native import ELEMENT, plain, pointer
from dscompile.templates.cpu.record import CpuTemplate

# Rows of fp32 up to which dot products beat a library's matrix product.
_FEW = 8
_SCORES = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}


def _logits(x: Tensor, weight: Tensor, fp32: bool) -> Tensor:
    """x @ weight^T in fp32 or in x.dtype, contiguous."""
    if not fp32:
        out = few_rows(x, weight)
        return F.linear(x, weight) if out is None else out
    if x.dtype != weight.dtype or (x.dtype != torch.bfloat16 and x.shape[0] <= _FEW):
        x, weight = x.float(), weight.float()
    kernel = None
    own = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.shape[0] <= _FEW)
    if own and x.stride(1) == 1 and weight.stride(1) == 1:
        kernel = native.function("router", "router_logits", "pqpqqqqpi", x.dtype)
    if kernel is None:
        return F.linear(x.float(), weight.float())
    logits = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    kernel(
        x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), x.shape[0], x.shape[1],
        weight.shape[0], logits.data_ptr(), native.threads(),
    )  # fmt: skip
    return logits


def _score_dtype(x: Tensor, fp32: bool) -> torch.dtype:
    return torch.float32 if fp32 else x.dtype


def router(
    x: Tensor, weight: Tensor, bias: Tensor | None, forced_indices: Tensor | None, top_k: int, score_fn: str,
    normalize: bool, norm_eps: float, scale: float, fp32: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`dsv4::router`: x [N, D], weight [E, D] -> weights [N, k], indices int64 [N, k]."""
    fits = (
        x.dim() == 2
        and weight.dim() == 2
        and weight.shape[1] == x.shape[1]
        and 0 < top_k <= weight.shape[0]
        and score_fn in _SCORES
        and x.dtype in ELEMENT
        and weight.dtype in ELEMENT
        and (fp32 or weight.dtype == x.dtype)
        and (bias is None or bias.shape == weight.shape[:1])
        and (forced_indices is None or forced_indices.shape == (x.shape[0], top_k))
    )
    # The scores have the dtype of the logits, and so has the library that turns them into weights.
    kernel = native.function("router", "router_choose", "ppipqqqiiffppi", _score_dtype(x, fp32)) if fits else None
    if kernel is not None:
        logits = _logits(x, weight, fp32)
        shape = (x.shape[0], top_k)
        weights, indices = logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)
        wide = bias is not None and torch.promote_types(bias.dtype, logits.dtype) != logits.dtype
        bias32 = None if bias is None else plain(bias, torch.float32)
        forced = None if forced_indices is None else plain(forced_indices, torch.int64)
        failed = kernel(
            logits.data_ptr(), pointer(bias32), int(wide), pointer(forced), x.shape[0],
            weight.shape[0], top_k, _SCORES[score_fn], int(normalize), norm_eps, scale, weights.data_ptr(),
            indices.data_ptr(), native.threads(),
        )  # fmt: skip
        if not failed:
            return weights, indices
    reference: tuple[Tensor, Tensor] = OPS["router"].reference(
        x, weight, bias, forced_indices, top_k, score_fn, normalize, norm_eps, scale, fp32
    )
    return reference


TEMPLATES: tuple[CpuTemplate, ...] = (CpuTemplate("router", "dsv4::router", "opaque", router),)
