"""Engram: rows of a hashed n-gram table, and their gated addition to the residual streams."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

_GATHER, _GATE = Check("engram_gather"), Check("engram_gate")
_MIN_SCORE = 1e-6
"""Floor of |score| under the square root."""


def _validate_gather(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> None:
    _GATHER.rank("table", table, 2, "[N, d]")
    _GATHER.min_rank("rows", rows, 1, "[..., R]")
    _GATHER.dtype("rows", rows, INTEGERS)
    if dtype not in FLOATS:
        raise TypeError(_GATHER.message("dtype", dtype, ", ".join(map(str, FLOATS))))
    if scales is None:
        _GATHER.dtype("table", table, (*FLOATS, torch.float8_e4m3fn))
        return
    _GATHER.dtype("table", table, (torch.float8_e4m3fn, torch.uint8))
    _GATHER.dtype("scales", scales, (torch.float8_e8m0fnu, torch.uint8))
    _GATHER.rank("scales", scales, 2, "[N, d / group]")
    _GATHER.shape("scales", scales, (table.shape[0], scales.shape[1]))
    ok = scales.shape[1] > 0 and table.shape[1] % scales.shape[1] == 0
    _GATHER.that(ok, "scales a row (axis 1 of scales)", scales.shape[1], f"a divisor of row length {table.shape[1]}")


def engram_gather(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """table [N, d], rows int [..., R] -> the rows side by side, [..., R * d] in `dtype`.

    With scales [N, d / group] (E8M0, one power of two per group of values) the table is E4M3; uint8 stands for either
    as bytes. A row outside [0, N) raises IndexError.
    """
    _validate_gather(table, scales, rows, dtype)
    _GATHER.index_range("rows", rows, 0, table.shape[0], "rows of the table")
    if scales is None:
        return table[rows].to(dtype).flatten(-2)
    values = table.view(torch.uint8)[rows].view(torch.float8_e4m3fn).float().unflatten(-1, (scales.shape[1], -1))
    powers = scales.view(torch.uint8)[rows].view(torch.float8_e8m0fnu).float()
    return (values * powers.unsqueeze(-1)).flatten(-3).to(dtype)


def _validate_gate(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor | None, eps: float
) -> None:
    _GATE.min_rank("streams", streams, 2, "[..., n, D]")
    shapes = {
        "streams": (streams, streams.shape), "key": (key, streams.shape),
        "value": (value, (*streams.shape[:-2], streams.shape[-1])),
        "q_weight": (q_weight, streams.shape[-2:]), "k_weight": (k_weight, streams.shape[-2:]),
    }  # fmt: skip
    for name, (tensor, shape) in shapes.items():
        _GATE.dtype(name, tensor, FLOATS)
        _GATE.shape(name, tensor, shape)
    _GATE.that(eps >= 0, "eps", eps, ">= 0")
    if mask is not None:
        _GATE.dtype("mask", mask, (torch.bool,))
        _GATE.shape("mask", mask, streams.shape[:-2])


def engram_gate(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor | None, eps: float
) -> Tensor:
    """streams and key [..., n, D], value [..., D], q_weight and k_weight [n, D], mask bool [...] -> [..., n, D].

    Per stream: score = <stream * q_weight, key * k_weight> / (rms(stream) rms(key) sqrt(D)), with eps under each root;
    gate = sigmoid(sign(score) sqrt(max(|score|, 1e-6))); stream += gate * value, in fp32, rounded to streams.dtype.
    Where the mask is False (image tokens) the streams pass unchanged.
    """
    _validate_gate(streams, key, value, q_weight, k_weight, mask, eps)
    x, k = streams.float(), key.float()
    score = (x * (q_weight.float() * k_weight.float()) * k).sum(-1)
    score = score * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    score = score * streams.shape[-1] ** -0.5
    gate = torch.sigmoid(score.sign() * score.abs().clamp_min(_MIN_SCORE).sqrt())
    out = x + gate.unsqueeze(-1) * value.float().unsqueeze(-2)
    if mask is not None:
        out = torch.where(mask[..., None, None], out, x)
    return out.to(streams.dtype)


def _gather_fake(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    _validate_gather(table, scales, rows, dtype)
    return table.new_empty((*rows.shape[:-1], rows.shape[-1] * table.shape[1]), dtype=dtype)


def _gate_fake(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor | None, eps: float
) -> Tensor:
    _validate_gate(streams, key, value, q_weight, k_weight, mask, eps)
    return streams.new_empty(streams.shape)


@costed
def _gather_cost(N: Any, R: Any, d: Any, row_bytes: Any, out_bytes: Any = 2) -> Cost:
    """N tokens, R rows of `row_bytes` bytes (values and scales) each, at random places."""
    return Cost(N * R * (row_bytes + 8), N * R * d * out_bytes, N * R * d)


@costed
def _gate_cost(N: Any, n: Any, D: Any, x_bytes: Any = 2, weight_bytes: Any = 2) -> Cost:
    """N tokens of n streams; 9 operations a value: three sums of products and the update."""
    read = N * (2 * n + 1) * D * x_bytes + 2 * n * D * weight_bytes
    return Cost(read, N * n * D * x_bytes, 9 * N * n * D)


def _gather_sizes(table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    row_bytes = table.shape[1] * table.element_size() + (0 if scales is None else scales.shape[1])
    return {
        "N": math.prod(rows.shape[:-1]), "R": rows.shape[-1], "d": table.shape[1], "row_bytes": row_bytes,
        "out_bytes": dtype.itemsize,
    }  # fmt: skip


def _gate_sizes(streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, *rest: Any) -> dict[str, Any]:
    n, width = streams.shape[-2:]
    return {
        "N": math.prod(streams.shape[:-2]), "n": n, "D": width, "x_bytes": streams.element_size(),
        "weight_bytes": q_weight.element_size(),
    }  # fmt: skip


define(
    "engram_gather(Tensor table, Tensor? scales, Tensor rows, ScalarType dtype) -> Tensor",
    family="engram", reference=engram_gather, fake=_gather_fake, cost=_gather_cost, sizes=_gather_sizes,
)  # fmt: skip
define(
    "engram_gate(Tensor streams, Tensor key, Tensor value, Tensor q_weight, Tensor k_weight, Tensor? mask, float eps) "
    "-> Tensor",
    family="engram", reference=engram_gate, fake=_gate_fake, cost=_gate_cost, sizes=_gate_sizes,
)  # fmt: skip
