"""The indexer: the best rows of every query, and the candidates for the index layers that follow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.targets import Target
from dscompile.templates.triton.device.keys import key_rows, refusal
from dscompile.templates.triton.index_kernels import (
    index_candidates_kernel,
    index_merge_kernel,
    index_order_kernel,
    index_scores_kernel,
)
from dscompile.templates.triton.launching import interpreting, launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

LARGEST_K = 2048
LARGEST_MERGE = 8192
"""Entries that a program holds when it merges lists; more are merged in turns."""
LARGEST_SPLIT = 256
LARGEST_HEAD = 512
HELD_BLOCKS = 16384
MASK_ROWS = 8192


def _kind(q: torch.dtype, keys: torch.dtype, name: str) -> int:
    """In which type products are exact: 0 fp32, 1 bf16, 2 fp16; see `index_scores_kernel`."""
    if q == torch.float16 and keys == torch.float16:
        return 2
    exact = keys == torch.bfloat16 if name == "none" or FORMATS[name].is_plain else FORMATS[name].scale != "fp32"
    return int(q == torch.bfloat16 and exact)


def _scored(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor | None, top_k: int,
    scale: float, key_format: str, ascending: bool, newest: bool, block_size: int, config: Config,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The chosen indices, and with block_size > 0 the best score of every block, fp32 [B, T, blocks]."""
    batch, tokens, heads, dim = q.shape
    rows = keys.shape[1]
    best = min(top_k, rows)
    out = q.new_empty((batch, tokens, best), dtype=torch.int64)
    maxima = q.new_empty((batch, tokens, -(-rows // block_size)), dtype=torch.float32) if block_size else None
    if not (batch and tokens and rows):
        return out, maxima
    q = q if q.stride()[2:] == (dim, 1) else q.contiguous()
    stored = key_rows(keys, key_format)
    if candidates is not None:
        candidates = candidates.contiguous().view(torch.uint8)
    head_weights, n_visible = head_weights.contiguous(), n_visible.contiguous()
    splits, together, block_n = config["SPLITS"], config["TOKENS"], config["BLOCK_N"]
    each = max(block_n, triton.next_power_of_2(best))
    block_h = max(triton.next_power_of_2(heads), 16 // together)
    short = int(ascending and candidates is None and not block_size)
    direct = splits == 1 and ascending
    buffer = q.new_empty((batch * tokens, splits, 2 * each), dtype=torch.int64)
    counts = None if direct else q.new_empty((batch * tokens, splits), dtype=torch.int32)
    # Rows of 68 bytes: what both strides are multiples of decides how many bytes a load takes.
    strides = stored.data.stride()[:2]
    unit = math.gcd(16, *strides)
    # Queries behind the last of a tile have a place of their own: their stores are masked, their counts are 0.
    launch(
        index_scores_kernel, (batch * -(-tokens // together), splits),
        q, stored.data, head_weights, n_visible, candidates, buffer, counts, out if direct else None,
        maxima, *q.stride()[:2], *(stride // unit for stride in strides), tokens, rows, best, scale,
        config=config, UNIT=unit, H=heads, D=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_H=block_h, TOKENS=together, BLOCK_N=block_n, SPLITS=splits, CAPACITY=2 * each, BLOCK_SIZE=block_size,
        DTYPE=_kind(q.dtype, stored.data.dtype, key_format), NEWEST=int(newest), SHORT=short,
        ASM=int(not interpreting()), **stored.constants(""),
    )  # fmt: skip
    if direct:
        return out, maxima
    lists, number, stride = buffer, splits, 2 * each
    fan = max(2, LARGEST_MERGE // each)
    while True:
        groups = -(-number // fan)
        last = groups == 1
        merged = out if last and ascending else q.new_empty((batch * tokens, groups, best), dtype=torch.int64)
        taken = min(fan, triton.next_power_of_2(number))
        launch(
            index_merge_kernel, (batch * tokens, groups), lists, counts, n_visible, merged, number, rows, best,
            config=Config(min(8, max(4, taken * each // 1024)), 1), STRIDE=stride, EACH=each, FAN=taken,
            NEWEST=int(newest), SHORT=short, ENTRIES=int(not (last and ascending)),
        )  # fmt: skip
        if last:
            break
        lists, counts, number, stride = merged, None, groups, best
    if not ascending:
        block_k = min(64, triton.next_power_of_2(best))
        launch(
            index_order_kernel, (batch * tokens, -(-best // block_k)), merged, out, best,
            config=Config(4, 1), BLOCK_K=block_k, NEWEST=int(newest),
        )  # fmt: skip
    return out, maxima


def index_topk(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, candidates: Tensor | None, top_k: int,
    scale: float, key_format: str, ascending: bool, newest: bool = False, *, config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::index_topk`: q [B, T, H, d], keys [B, S, row] -> int64 [B, T, min(top_k, S)].

    Scores stay in registers. What is kept of them are the chosen rows, while a program runs at most twice as many.
    """
    return _scored(
        q, keys, head_weights, n_visible, candidates, top_k, scale, key_format, ascending, newest, 0, config
    )[0]


def index_topk_candidates(
    q: Tensor, keys: Tensor, head_weights: Tensor, n_visible: Tensor, top_k: int, scale: float, key_format: str,
    ascending: bool, candidate_blocks: int, block_size: int, newest: bool = False, *, config: Config, target: Target,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`dsv4::index_topk_candidates`: as `index_topk`, and bool [B, T, S].

    Between the two kernels stands the best score of every block of `block_size` rows.
    """
    batch, tokens, rows = q.shape[0], q.shape[1], keys.shape[1]
    out, maxima = _scored(
        q, keys, head_weights, n_visible, None, top_k, scale, key_format, ascending, newest, block_size, config
    )
    marked = q.new_empty((batch, tokens, rows), dtype=torch.bool)
    blocks = -(-rows // block_size)
    held = min(HELD_BLOCKS, max(16, triton.next_power_of_2(blocks)))
    launch(
        index_candidates_kernel, (batch * tokens, -(-rows // max(MASK_ROWS, block_size))), maxima,
        n_visible.contiguous(), marked.view(torch.uint8), rows, min(candidate_blocks, blocks),
        config=Config(min(16, max(4, held // 1024)), 1), BLOCK_SIZE=block_size, TILE=held, TILES=-(-blocks // held),
        ROWS=max(MASK_ROWS, block_size), NEWEST=int(newest),
    )  # fmt: skip
    return out, marked


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """The split that fills the machine first, then twice and half of it; several tokens of a prompt share decoding."""
    processors = int(target.sm_count.value or 1)
    tokens = [1] if sizes["T"] == 1 else [2, 1]
    tiles = [config(8, 1, TOKENS=n, BLOCK_N=rows) for rows in (128, 64) for n in tokens]
    for power in (0, 1, -1):
        for tile in tiles:
            programs = max(1, sizes["B"] * -(-sizes["T"] // tile["TOKENS"]))
            most = max(1, min(LARGEST_SPLIT, -(-sizes["S"] // (4 * tile["BLOCK_N"]))))
            usual = min(most, 1 << (max(1, processors // programs).bit_length() - 1))
            splits = min(most, max(1, int(usual * 2**power)))
            if power == 0 or splits != usual:
                yield Config(tile.num_warps, tile.num_stages, (*tile.constants, ("SPLITS", splits)))


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    each = max(config["BLOCK_N"], triton.next_power_of_2(sizes["k"]))
    held = config["TOKENS"] * 2 * each // (32 * config.num_warps)
    if held > 32:
        return f"{held} entries a thread while a buffer is cut down, allowed: 32"
    columns = config["TOKENS"] * triton.next_power_of_2(sizes["H"])
    if columns * config["BLOCK_N"] // (32 * config.num_warps) > 64:
        return f"tiles of {config['BLOCK_N']} rows for {columns} heads of all tokens, too many registers"
    return None


def _applies(meta: Meta) -> str | None:
    q, block_size = meta["q"], meta.get("block_size", 1)
    if not 0 < q.shape[3] <= LARGEST_HEAD:
        return f"heads of {q.shape[3]} values, allowed: 1 to {LARGEST_HEAD}"
    if not 0 < q.shape[2] <= 128:
        return f"{q.shape[2]} heads, allowed: 1 to 128"
    if min(meta["top_k"], meta["keys"].shape[1]) > LARGEST_K:
        return f"top_k of {meta['top_k']}, allowed: up to {LARGEST_K}"
    if block_size & (block_size - 1) or block_size > 64:
        return f"blocks of {block_size} rows, allowed: a power of two up to 64"
    return refusal(meta["keys"], meta["key_format"])


TEMPLATES = (
    TritonTemplate("index_topk", "dsv4::index_topk", index_topk, _configs, _check, _applies),
    TritonTemplate(
        "index_topk_candidates", "dsv4::index_topk_candidates", index_topk_candidates, _configs, _check, _applies
    ),
)
