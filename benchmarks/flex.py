"""FlexAttention as a peer of sparse attention, for steps of one token.

It knows neither packed rows nor lists of rows nor a sink. Rows are therefore gathered and decoded in front, and the
queries rotated, outside of what is timed; the sink is applied to its result by way of the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.ops.layout import decode_rows
from dscompile.ops.rope import rope

SERVES = ("sparse_attention", "sparse_attention_paged")


def flex_call(op: str, args: tuple[Any, ...], compiled: bool = True) -> Callable[[], Tensor] | None:
    """What computes the attention of a call, [B, 1, H, D] before it is rotated back; None for calls of more tokens."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    given = dict(zip((a.name for a in OPS[op].op._schema.arguments), args))
    q = given["q"]
    batch, tokens, heads, dim = q.shape
    if op not in SERVES or tokens != 1 or (given["comp_kv"] is not None and given["comp_idx"] is None):
        return None
    if given["rope_q"]:
        q = rope(q, given["cos"].unsqueeze(2), given["sin"].unsqueeze(2), False)
    if op == "sparse_attention":
        rows = given["window_kv"]
        there = torch.ones(rows.shape[:2], dtype=torch.bool, device=q.device)
    else:
        slots = given["window_slots"]
        rows, there = given["window_pool"][slots.clamp_min(0)], slots >= 0
    age = given["q_pos"] - (given["window_start"].unsqueeze(1) + torch.arange(rows.shape[1], device=q.device))
    valid = there & (age >= 0) & (age < given["window"]) & (age <= given["q_pos"])
    keys = decode_rows(rows, given["window_format"], dim, q.dtype)
    if given["comp_kv"] is not None:
        index = given["comp_idx"].squeeze(1)
        picked = given["comp_kv"][torch.arange(batch, device=q.device).unsqueeze(1), index.clamp_min(0)]
        keys = torch.cat((keys, decode_rows(picked, given["comp_format"], dim, q.dtype)), 1)
        valid = torch.cat((valid, index >= 0), 1)
    keys = keys.masked_fill(~valid.unsqueeze(-1), 0.0).unsqueeze(1).contiguous()
    count = keys.shape[2]
    mask = create_block_mask(lambda b, h, i, j: valid[b, j], batch, None, 1, count, device=str(q.device))
    run = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    query = q.transpose(1, 2).contiguous()
    sink = given["sink"]

    def call() -> Tensor:
        out, lse = run(query, keys, keys, block_mask=mask, scale=given["scale"], enable_gqa=heads > 1, return_lse=True)
        if sink is not None:
            out = (out * torch.sigmoid(lse - sink.float().view(1, -1, 1)).unsqueeze(-1)).to(q.dtype)
        return out.transpose(1, 2)

    return call
