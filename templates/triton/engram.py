"""Engram: rows of a hashed table, and their gated addition to the residual streams."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.ops.engram import _MIN_SCORE
from dscompile.targets import Target
from dscompile.templates.triton import row_layout
from dscompile.templates.triton.device.formats import e4m3_value, spread, ue8m0_value
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

VALUES_PER_THREAD = 64
LARGEST_STREAM = 16384
MIN_SCORE = tl.constexpr(_MIN_SCORE)


@triton.jit
def engram_gather_kernel(
    table, scales, rows, out, count, capacity, table_stride, scale_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr, E4M3: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """out[i] = values of table[rows[i]], N of `count` rows a program; zeros if that is outside [0, capacity).

    E4M3: the table holds bytes of that type. With scales a group of GROUP values has one; GROUPED: tiles can be cut
    into groups, else each value loads its own scale.
    """
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)[:, None]
    live = place < count
    row = tl.load(rows + place, mask=live, other=-1).to(tl.int64)
    read = live & (row >= 0) & (row < capacity)
    column = tl.arange(0, BLOCK)[None, :]
    values = tl.load(table + row * table_stride + column, mask=read & (column < D), other=0)
    if E4M3:
        values = e4m3_value(values)
    if scales is not None:
        at = scales + row * scale_stride
        if GROUPED:
            group = tl.arange(0, BLOCK // GROUP)[None, :]
            factor = spread(tl.load(at + group, mask=read & (group < D // GROUP), other=0), N, BLOCK, GROUP)
        else:
            factor = tl.load(at + column // GROUP, mask=read & (column < D), other=0)
        values = values * ue8m0_value(factor)
    tl.store(out + place * D + column, values.to(out.dtype.element_ty), mask=live & (column < D))


def engram_gather(
    table: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype, *, config: Config, target: Target
) -> Tensor:
    """`dsv4::engram_gather`: table [N, d], scales [N, d / group] or None, rows int [..., R] -> [..., R * d] in `dtype`.

    A row outside the table gives zeros.
    """
    width, count = table.shape[1], rows.numel()
    out = rows.new_empty((*rows.shape[:-1], rows.shape[-1] * width), dtype=dtype)
    quantised = scales is not None or table.dtype == torch.float8_e4m3fn
    group = 1
    if scales is not None:
        scales, group = row_layout.as_rows(scales.view(torch.uint8)), width // scales.shape[1]
    tile = max(16, triton.next_power_of_2(width))
    launch(
        engram_gather_kernel, (triton.cdiv(count, config["N"]),),
        table.view(torch.uint8) if quantised else table, scales, rows.contiguous(), out, count, table.shape[0],
        table.stride(0), 0 if scales is None else scales.stride(0),
        config=config, D=width, BLOCK=tile, GROUP=group, GROUPED=group & (group - 1) == 0 and group <= tile,
        E4M3=quantised, N=config["N"],
    )  # fmt: skip
    return out


@triton.jit
def engram_gate_kernel(
    streams, key, value, q_weight, k_weight, mask, out, streams_stride, key_stride, value_stride, eps,
    STREAMS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, s] = streams[t, s] + gate * value[t], a stream of a token a program; streams[t, s] if mask[t] is False.

    Weights are dense. With a False mask nothing else is read.
    """
    row = tl.program_id(0).to(tl.int64)
    token, stream = row // STREAMS, row % STREAMS
    column = tl.arange(0, BLOCK)
    inside = column < D
    x = tl.load(streams + row * streams_stride + column, mask=inside, other=0.0).to(tl.float32)
    active = inside
    if mask is not None:
        active = column < tl.where(tl.load(mask + token) != 0, D, 0)
    k = tl.load(key + row * key_stride + column, mask=active, other=0.0).to(tl.float32)
    v = tl.load(value + token * value_stride + column, mask=active, other=0.0).to(tl.float32)
    weight = tl.load(q_weight + stream * D + column, mask=active, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight + stream * D + column, mask=active, other=0.0).to(tl.float32)
    score = tl.sum(x * weight * k, 0)
    score = score * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * tl.rsqrt(tl.sum(k * k, 0) / D + eps)
    score = score * D**-0.5
    size = tl.abs(score)
    root = tl.sqrt_rn(tl.where(size < MIN_SCORE, MIN_SCORE, size))
    signed = tl.where(score > 0, root, tl.where(score < 0, -root, score))  # 0 and NaN stay
    result = tl.where(active, x + tl.sigmoid(signed) * v, x)
    tl.store(out + row * D + column, result.to(out.dtype.element_ty), mask=inside)


def engram_gate(
    streams: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor | None, eps: float, *,
    config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::engram_gate`: streams, key [..., n, D], value [..., D], weights [n, D], mask bool [...] -> [..., n, D]."""
    count, width = streams.shape[-2:]
    out = streams.new_empty(streams.shape)
    x, k, v = (row_layout.as_rows(tensor) for tensor in (streams, key, value))
    launch(
        engram_gate_kernel, (x.shape[0],), x, k, v, q_weight.contiguous(), k_weight.contiguous(),
        None if mask is None else mask.contiguous().view(torch.uint8), out, x.stride(0), k.stride(0), v.stride(0), eps,
        config=config, STREAMS=count, D=width, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def _gather_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """Rows are far apart in a table larger than any cache: many loads in flight, 16 values a thread."""
    width = triton.next_power_of_2(sizes["d"])
    for warps, values in ((1, 16), (1, 32), (4, 16), (4, 32)):
        yield config(warps, 1, N=max(1, 32 * warps * values // width))
    for warps in (2, 4, 8):
        if width >= 2048:
            yield config(warps, 1, N=1)


def _gate_configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    usual = max(1, min(16, triton.next_power_of_2(sizes["D"]) // 1024))
    yield config(usual, 1)
    yield from (config(warps, 1) for warps in (1, 2, 4, 8, 16) if warps != usual)


def _gather_check(config: Config, sizes: Sizes, target: Target) -> str | None:
    return _held(config["N"] * triton.next_power_of_2(sizes["d"]), config)


def _gate_check(config: Config, sizes: Sizes, target: Target) -> str | None:
    return _held(triton.next_power_of_2(sizes["D"]), config)


def _held(values: int, config: Config) -> str | None:
    each = values // (32 * config.num_warps)
    return None if each <= VALUES_PER_THREAD else f"{each} values a thread, allowed: {VALUES_PER_THREAD}"


def _gatherable(meta: Meta) -> str | None:
    table = meta["table"]
    if table.shape[1] > 1 and table.stride(1) != 1:
        return f"table: {table.stride(1)} from one value to the next, allowed: 1 (it is too large to be copied)"
    return row_layout.refusal(row_layout.PLAIN, table.shape[1])


def _gateable(meta: Meta) -> str | None:
    width = meta["streams"].shape[-1]
    return None if 0 < width <= LARGEST_STREAM else f"streams of {width} values, allowed: 1 to {LARGEST_STREAM}"


TEMPLATES = (
    TritonTemplate("engram_gather", "dsv4::engram_gather", engram_gather, _gather_configs, _gather_check, _gatherable),
    TritonTemplate("engram_gate", "dsv4::engram_gate", engram_gate, _gate_configs, _gate_check, _gateable),
)
