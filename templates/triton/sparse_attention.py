"""Sparse attention over window rows and selected compressed rows, read as they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.keys import key_rows, refusal
from dscompile.templates.triton.launching import counters, interpreting, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config
from dscompile.templates.triton.sparse_attention_kernels import combine_kernel, sparse_attention_kernel

LARGEST_HEAD = 1024
LARGEST_SPLIT = 16
MOST_CONFIGS = 8


def sparse_attention(
    q: Tensor, window_kv: Tensor, q_pos: Tensor, window_start: Tensor, window: int, comp_kv: Tensor | None,
    comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float, cos: Tensor | None,
    sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str, *, config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::sparse_attention`: q [B, T, H, D] -> [B, T, H, D].

    An index outside [0, C) is skipped like -1: a kernel cannot raise. With TOKENS > 1, several neighbouring tokens
    share the rows that they load; a token that sees a row with a NaN or an infinity then becomes NaN as a whole.
    """
    return _launch(q, window_kv, None, q_pos, window_start, window, comp_kv, comp_idx, n_visible, sink, scale, cos, sin,
                   rope_q, window_format, comp_format, config)  # fmt: skip


def sparse_attention_paged(
    q: Tensor, window_pool: Tensor, window_slots: Tensor, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float,
    cos: Tensor | None, sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str, *, config: Config,
    target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::sparse_attention_paged`: the same kernel, which reads the window's rows where the pool has them.

    A slot outside [0, P) is a key that nobody sees, like -1: a kernel cannot raise.
    """
    return _launch(q, window_pool.unsqueeze(0), window_slots, q_pos, window_start, window, comp_kv, comp_idx, n_visible,
                   sink, scale, cos, sin, rope_q, window_format, comp_format, config)  # fmt: skip


def _launch(
    q: Tensor, window_kv: Tensor, slots: Tensor | None, q_pos: Tensor, window_start: Tensor, window: int,
    comp_kv: Tensor | None, comp_idx: Tensor | None, n_visible: Tensor | None, sink: Tensor | None, scale: float,
    cos: Tensor | None, sin: Tensor | None, rope_q: bool, window_format: str, comp_format: str, config: Config,
) -> Tensor:  # fmt: skip
    """window_kv [B, S, row], or with slots [B, S] the pool [1, P, row]."""
    batch, tokens, heads, dim = q.shape
    if comp_kv is not None and comp_kv.shape[1] == 0:
        comp_kv = comp_idx = n_visible = None
    q = q if q.stride()[2:] == (dim, 1) else q.contiguous()
    window_rows = key_rows(window_kv, window_format)
    comp_rows = key_rows(window_kv if comp_kv is None else comp_kv, window_format if comp_kv is None else comp_format)
    comp = None if comp_kv is None else comp_rows.data
    if comp_idx is not None and comp_idx.stride(2) != 1:
        comp_idx = comp_idx.contiguous()
    half = 0 if cos is None else cos.shape[2]
    block_d = max(16, triton.next_power_of_2(dim))
    if slots is not None and slots.stride(1) != 1:
        slots = slots.contiguous()
    block_h, splits = config["BLOCK_H"], config["SPLITS"]
    together = 1 if comp_idx is not None else config["TOKENS"]
    out = q.new_empty(q.shape)
    if 0 in q.shape:
        return out
    blocks = batch * -(-tokens // together) * -(-heads // block_h)
    combine = int(splits > 1 and config["COMBINE"])
    part = ends = counter = None
    if splits > 1:
        part = q.new_empty((batch * tokens, splits, heads, dim), dtype=torch.float32)
        ends = q.new_empty((batch * tokens, splits, 2, heads), dtype=torch.float32)
    if combine:
        counter = counters(q, blocks)
    q_pos, window_start = q_pos.contiguous(), window_start.contiguous()
    n_visible, sink, cos, sin = (None if x is None else x.contiguous() for x in (n_visible, sink, cos, sin))
    launch(
        sparse_attention_kernel, (blocks, splits),
        q, window_rows.data, slots, q_pos, window_start, comp, comp_idx, n_visible, sink, cos, sin, out, part, ends,
        counter, *q.stride()[:2], *window_rows.data.stride()[:2], 0 if slots is None else slots.stride(0),
        *comp_rows.data.stride()[:2], *((0, 0) if comp_idx is None else comp_idx.stride()[:2]),
        tokens, heads, (window_kv if slots is None else slots).shape[1], window_kv.shape[1], window,
        0 if comp_kv is None else comp_kv.shape[1], 0 if comp_idx is None else comp_idx.shape[2], scale,
        config=config, D=dim, BLOCK_D=block_d, HALF=half, TURNED=triton.next_power_of_2(2 * half),
        ROPE_Q=int(rope_q and half > 0), BLOCK_H=block_h, TOKENS=together, BLOCK_N=config["BLOCK_N"], SPLITS=splits,
        SWAP=config["SWAP"], COMBINE=combine, PADDED=triton.next_power_of_2(splits),
        EVEN=int(heads % block_h == 0 and tokens % together == 0), ASM=int(not interpreting()),
        **window_rows.constants("W_"), **comp_rows.constants("C_"),
    )  # fmt: skip
    if splits > 1 and not combine:
        combined = min(4, triton.next_power_of_2(heads))
        launch(
            combine_kernel, (batch * tokens, -(-heads // combined)), part, ends, sink, cos, sin, out, heads,
            config=Config(4, config.num_stages), D=dim, BLOCK_D=block_d, HALF=half, BLOCK_H=combined, SPLITS=splits,
            PADDED=triton.next_power_of_2(splits),
        )  # fmt: skip
    return out


def _tiles(sizes: Sizes, target: Target) -> Iterable[Config]:
    """Tiles in the order of trust, for as many programs as the queries need."""
    heads, narrow = sizes["H"], sizes["x_bytes"] == 2
    listed = sizes["index_bytes"] > 0 or sizes["T"] == 1
    if not narrow:
        yield config(8, 1, BLOCK_H=16, TOKENS=1, BLOCK_N=16, SWAP=0)  # exact fp32 has no matrix instruction
        return
    for tokens in (1,) if listed else (2, 1):
        if target.has("tcgen05"):
            # 64 rows of queries fill the instruction; fewer become its columns, and keys or head values its rows.
            if heads * tokens > 32:
                yield config(8, 1, BLOCK_H=64 // tokens, TOKENS=tokens, BLOCK_N=32, SWAP=0)
            if heads * tokens > 16:
                yield config(8, 1, BLOCK_H=32 // tokens, TOKENS=tokens, BLOCK_N=64, SWAP=1)
            yield config(8, 1, BLOCK_H=16 // tokens, TOKENS=tokens, BLOCK_N=64, SWAP=1)
        if heads * tokens > 16:
            # Its sums leave no registers for loading ahead what hangs on slots.
            yield config(8, 1 if "P" in sizes else 2, BLOCK_H=32 // tokens, TOKENS=tokens, BLOCK_N=32, SWAP=0)
        yield config(8, 2, BLOCK_H=16 // tokens, TOKENS=tokens, BLOCK_N=32, SWAP=0)
    yield config(8, 2, BLOCK_H=16, TOKENS=1, BLOCK_N=16, SWAP=0)


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """The tiles, each with the best splits for one launch and for two, by `_effort`."""
    processors = int(target.sm_count.value or 1)
    keys = min(sizes["window"], sizes["S"]) + sizes["K"]
    found: dict[Config, float] = {}
    for tile in _tiles(sizes, target):
        programs = max(1, sizes["B"] * -(-sizes["T"] // tile["TOKENS"]) * -(-sizes["H"] // tile["BLOCK_H"]))
        blocks = max(1, -(-keys // tile["BLOCK_N"]))
        splits = {}
        for wanted in (processors // programs, 2 * processors // programs, 1):
            share = -(-blocks // max(1, min(wanted, LARGEST_SPLIT)))
            splits[-(-blocks // share)] = share
        for combine in (1, 0):
            choices = [
                (_effort(choice, programs * count / processors, share, sizes["D"]), share, choice)
                for count, share in splits.items()
                for choice in [replace(tile, constants=(*tile.constants, ("SPLITS", count), ("COMBINE", combine)))]
                if count > 1 or not combine
            ]
            if choices:
                effort, _, choice = min(choices, key=lambda each: each[:2])
                found[choice] = effort
    return sorted(found, key=found.__getitem__)[:MOST_CONFIGS]


def _effort(config: Config, waves: float, share: int, dim: int) -> float:
    """A guess at the time, in decoded keys: rows to decode and to multiply in each wave, parts to combine.

    One multiprocessor that combines all parts of its queries reads them with its own share of the cache's rate only; a
    second launch spreads them, and costs what starting it costs.
    """
    queries = config["BLOCK_H"] * config["TOKENS"]
    work = math.ceil(waves) * (24 + share * config["BLOCK_N"] * (1 + queries / 64))
    if config["SPLITS"] == 1:
        return work
    if config["COMBINE"]:
        return work + 8 + config["SPLITS"] * queries * dim / 1024
    return work + 80 + 4 * config["SPLITS"]


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    queries = config["BLOCK_H"] * config["TOKENS"]
    if queries < 16 or config["BLOCK_N"] < 16:
        return f"tiles of {queries} queries and {config['BLOCK_N']} keys, allowed: 16 or more"
    dim = max(16, triton.next_power_of_2(sizes["D"]))
    row = max(sizes["window_row_bytes"], sizes["comp_row_bytes"])
    shared = (queries + config["BLOCK_N"]) * dim * sizes["x_bytes"] + (config.num_stages - 1) * config["BLOCK_N"] * row
    if shared > target.smem_bytes_per_block:
        return f"about {shared} bytes of shared memory, allowed: {target.smem_bytes_per_block}"
    many = queries * dim >= 64 * 32 * config.num_warps and config["BLOCK_H"] < 64 and not config["SWAP"]
    if config["COMBINE"] and many and (target.has("tcgen05") or "P" in sizes):
        return f"sums of {queries} queries in registers, allowed with COMBINE: fewer"  # seen to spill
    # Values a thread holds of the sums and of a block of keys while it is decoded; sums of tcgen05 lie elsewhere.
    most = 32 if sizes["x_bytes"] > 2 else 128 if target.has("tcgen05") else 64
    values = max(queries, config["BLOCK_N"]) * dim // (32 * config.num_warps)
    return f"tiles of {values} values a thread, allowed: {most}" if values > most else None


def _applies(meta: Meta) -> str | None:
    q, half = meta["q"], 0 if meta["cos"] is None else meta["cos"].shape[2]
    dim = q.shape[3]
    if not 0 < dim <= LARGEST_HEAD:
        return f"heads of {dim} values, allowed: 1 to {LARGEST_HEAD}"
    if half and dim % 2:
        return f"heads of {dim} values with rotation, allowed: an even number"
    window_kv = meta["window_kv"] if "window_kv" in meta else meta["window_pool"].unsqueeze(0)
    for rows, name in ((window_kv, meta["window_format"]), (meta["comp_kv"], meta["comp_format"])):
        reason = None if rows is None else refusal(rows, name)
        if reason:
            return reason
    return None


TEMPLATES = (
    TritonTemplate("sparse_attention", "dsv4::sparse_attention", sparse_attention, _configs, _check, _applies),
    TritonTemplate(
        "sparse_attention_paged", "dsv4::sparse_attention_paged", sparse_attention_paged, _configs, _check, _applies
    ),
)
