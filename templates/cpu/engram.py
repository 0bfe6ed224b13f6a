"""Engram on the CPU: table rows are dequantised as they are gathered; the gate is one pass over the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.native import ELEMENT, plain, pointer
from dscompile.templates.cpu.record import CpuTemplate


def engram_gather(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`dsv4::engram_gather`: table [N, d], rows int [..., R] -> [..., R d] in dtype."""
    kernel = None
    if (
        scales is not None
        and table.dim() == 2
        and scales.dim() == 2
        and scales.shape[0] == table.shape[0]
        and scales.shape[1] > 0
        and table.shape[1] % scales.shape[1] == 0
        and table.stride(1) == 1
        and scales.stride(1) == 1
        and table.dtype in (torch.float8_e4m3fn, torch.uint8)
        and scales.dtype in (torch.float8_e8m0fnu, torch.uint8)
        and rows.dim() > 0
        and dtype in ELEMENT
    ):
        kernel = native.function("engram", "engram_rows", "pqpqqqqpqpi", dtype)
    if kernel is not None:
        assert scales is not None
        width = table.shape[1]
        index = plain(rows, torch.int64)
        out = table.new_empty((*rows.shape[:-1], rows.shape[-1] * width), dtype=dtype)
        failed = kernel(
            table.data_ptr(), table.stride(0), scales.data_ptr(), scales.stride(0), table.shape[0],
            width, width // scales.shape[1], index.data_ptr(), index.numel(), out.data_ptr(), native.threads(),
        )  # fmt: skip
        if not failed:
            return out
    reference: Tensor = OPS["engram_gather"].reference(table, scales, rows, dtype)
    return reference


def engram_gate(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor | None, eps: float
) -> Tensor:
    """`dsv4::engram_gate`: streams, key [..., n, D], value [..., D] -> [..., n, D]."""
    fits = (
        streams.dim() >= 2
        and streams.shape == key.shape
        and value.shape == (*streams.shape[:-2], streams.shape[-1])
        and q_weight.shape == k_weight.shape == streams.shape[-2:]
        and all(t.dtype in ELEMENT for t in (streams, key, value, q_weight, k_weight))
        and (mask is None or (mask.dtype == torch.bool and mask.shape == streams.shape[:-2]))
        and streams.shape[-1] > 0
        and streams.shape[-2] > 0
    )
    kernel = native.function("engram", "engram_gate", "pppippqqqfpi", streams.dtype) if fits else None
    if kernel is None:
        reference: Tensor = OPS["engram_gate"].reference(streams, key, value, q_weight, k_weight, mask, eps)
        return reference
    n, width = streams.shape[-2:]
    both = streams.dtype if key.dtype == value.dtype == streams.dtype else torch.float32
    streams, key, value = streams.contiguous(), plain(key, both), plain(value, both)
    weights = (q_weight.float() * k_weight.float()).contiguous()
    mask = None if mask is None else mask.contiguous()
    out = torch.empty_like(streams)
    kernel(
        streams.data_ptr(), key.data_ptr(), value.data_ptr(), int(both != streams.dtype), weights.data_ptr(),
        pointer(mask), streams.numel() // (n * width), n, width, eps, out.data_ptr(), native.threads(),
    )  # fmt: skip
    return out


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("engram_gather", "dsv4::engram_gather", "opaque", engram_gather),
    CpuTemplate("engram_gate", "dsv4::engram_gate", "opaque", engram_gate),
)
