"""Pooling of token groups on the CPU: softmax and weighted sum per channel, in one pass over values and gates."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.native import ELEMENT, plain, pointer
from dscompile.templates.cpu.record import CpuTemplate


def compress(
    kv: Tensor, gate: Tensor, ape: Tensor | None, prior_kv: Tensor | None, prior_gate: Tensor | None, overlap: bool
) -> Tensor:
    """`dsv4::compress`: kv, gate [B, n, r, C] -> [B, n, D] in kv.dtype."""
    fits = (
        kv.dim() == 4
        and kv.shape == gate.shape
        and kv.dtype in ELEMENT
        and gate.dtype in (kv.dtype, torch.float32)
        and kv.shape[2] > 0
        and kv.shape[3] > 0
        and (ape is None or (ape.shape == kv.shape[2:] and ape.dtype in ELEMENT))
        and (prior_kv is None) == (prior_gate is None)
        and (overlap or prior_kv is None)
        and not (overlap and kv.shape[3] % 2)
    )
    width = kv.shape[3] // 2 if fits and overlap else kv.shape[-1]
    if fits and prior_kv is not None and prior_gate is not None:
        fits = prior_kv.shape == prior_gate.shape == (kv.shape[0], kv.shape[2], width)
    kernel = native.function("compress", "compress_groups", "ipppppqqqqqiipi", kv.dtype) if fits else None
    if kernel is None:
        reference: Tensor = OPS["compress"].reference(kv, gate, ape, prior_kv, prior_gate, overlap)
        return reference
    batch, groups, ratio, channels = kv.shape
    if ape is not None and torch.promote_types(gate.dtype, ape.dtype) != gate.dtype:
        gate = gate.to(torch.promote_types(gate.dtype, ape.dtype))
    kv, gate = kv.contiguous(), gate.contiguous()
    ape32 = None if ape is None else plain(ape, torch.float32)
    prior_kv = None if prior_kv is None else plain(prior_kv, kv.dtype)
    prior_gate = None if prior_gate is None else plain(prior_gate, gate.dtype)
    out = kv.new_empty((batch, groups, width))
    kernel(
        int(gate.dtype != kv.dtype), kv.data_ptr(), gate.data_ptr(), pointer(ape32),
        pointer(prior_kv), pointer(prior_gate), batch, groups, ratio, channels, width, int(overlap),
        int(ape is not None and gate.dtype != torch.float32), out.data_ptr(), native.threads(),
    )  # fmt: skip
    return out


TEMPLATES: tuple[CpuTemplate, ...] = (CpuTemplate("compress", "dsv4::compress", "opaque", compress),)
