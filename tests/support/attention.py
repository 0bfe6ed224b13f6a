"""Calls of sparse attention for its templates, and their results in float64 with the bound that roundings give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.templates.triton.record import Config, config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8, FP4 = "fp8_g32_ue8m0", "fp4_g16_e4m3"


def blocks(
    splits: int = 1, swap: int = 0, tokens: int = 1, keys: int = 16, heads: int = 16, combine: int = 0
) -> Config:
    return config(
        4, 1, BLOCK_H=heads, TOKENS=tokens, BLOCK_N=keys, SPLITS=splits, SWAP=swap, COMBINE=combine
    )  # fmt: skip


# One pass, split over keys, transposed, several tokens together; parts combined by the last program or by a kernel
CONFIGS = (
    blocks(), blocks(splits=3, combine=1), blocks(swap=1, tokens=2, splits=2, keys=32), blocks(tokens=4),
    blocks(splits=2, tokens=2, heads=8, combine=1), blocks(splits=4, heads=32, combine=1), blocks(splits=3),
)  # fmt: skip


def case(
    batch: int = 2, tokens: int = 3, heads: int = 4, dim: int = 32, rows: int = 20, window: int = 8, comp: int = 33,
    picks: int = 9, dtype: torch.dtype = torch.bfloat16, mode: str = "list",
    formats: tuple[str, str] = ("none", "none"), rope_q: bool = True, position: int = 13, half: int = 4,
) -> list[Any]:  # fmt: skip
    """Arguments of the op. mode: "list" (with -1 and duplicates), "count" or "none"."""
    q = torch.randn(batch, tokens, heads, dim).to(dtype)
    window_kv, comp_kv = torch.randn(batch, rows, dim).to(dtype), torch.randn(batch, comp, dim).to(dtype)
    window_kv = window_kv if formats[0] == "none" else FORMATS[formats[0]].pack(window_kv)
    comp_kv = comp_kv if formats[1] == "none" else FORMATS[formats[1]].pack(comp_kv)
    q_pos = (torch.arange(tokens) + position).repeat(batch, 1)
    start = torch.full((batch,), position + tokens - rows)
    index = count = cos = sin = None
    if mode == "list":
        index = torch.randint(-1, comp, (batch, tokens, picks)) if comp else torch.full((batch, tokens, picks), -1)
    elif mode == "count":
        count = torch.randint(-2, comp + 3, (batch, tokens))
    if half:
        angle = torch.rand(batch, tokens, half) * 6
        cos, sin = angle.cos(), angle.sin()
    return [q, window_kv, q_pos, start, window, None if mode == "none" else comp_kv, index, count, torch.randn(heads),
            dim**-0.5, cos, sin, rope_q and half > 0, *formats]  # fmt: skip


def values(rows: Tensor, name: str, dim: int, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype) if name == "none" else FORMATS[name].unpack(rows.contiguous(), dim, dtype)


def exact(args: list[Any], there: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result in float64, and for every element the sum of its terms' absolute values.

    there [B, S]: the window rows that exist.
    """
    q, window_kv, q_pos, start, window, comp_kv, index, count, sink, scale, cos, sin, rope_q, *formats = args
    if rope_q:
        q = torch.ops.dsv4.rope(q, cos.unsqueeze(2), sin.unsqueeze(2), False)
    dim, out = q.shape[3], torch.zeros(q.shape, dtype=torch.float64)
    size = torch.zeros_like(out)
    near = values(window_kv, formats[0], dim, q.dtype).double()
    far = None if comp_kv is None else values(comp_kv, formats[1], dim, q.dtype).double()
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            at = torch.arange(near.shape[1]) + start[b]
            keys = (at >= 0) & (at <= q_pos[b, t]) & (q_pos[b, t] - at < window)
            keys = near[b, keys if there is None else keys & there[b]]
            if far is not None and index is not None:
                keys = torch.cat((keys, far[b, index[b, t][index[b, t] >= 0].long()]))
            elif far is not None:
                keys = torch.cat((keys, far[b, : max(0, int(count[b, t]))]))
            if len(keys) == 0:
                continue
            z = q[b, t].double() @ keys.T * scale
            top = z.amax(-1, keepdim=True)
            p = torch.exp(z - top)
            total = p.sum(-1, keepdim=True)
            if sink is not None:
                total = total + torch.exp(sink.double()[:, None] - top)
            out[b, t], size[b, t] = p @ keys / total, p @ keys.abs() / total
    if cos is not None:
        out = torch.ops.dsv4.rope(out.float(), cos.unsqueeze(2), sin.unsqueeze(2), True).double()
        kept = dim - 2 * cos.shape[-1]
        pairs = size[..., kept:].unflatten(-1, (-1, 2)).sum(-1, keepdim=True)
        size[..., kept:] = pairs.expand(*pairs.shape[:-1], 2).flatten(-2)
    return out, size


def assert_close(got: Tensor, args: list[Any], there: Tensor | None = None) -> None:
    """A rounding of p, one of the result, and with rotation two more; the rest is fp32."""
    want, size = exact(args, there)
    assert got.dtype == args[0].dtype and got.shape == args[0].shape
    unit = torch.finfo(got.dtype).eps / 2
    bound = (4 * unit + 3e-6) * size + torch.finfo(got.dtype).tiny
    worst = ((got.double() - want).abs() - bound).max() if got.numel() else torch.tensor(0.0)
    assert worst <= 0, f"{float(worst)} beyond the bound"
