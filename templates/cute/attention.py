"""Sparse attention decode over packed rows, 64 heads a block. Compiled only.

Everything is the other way round: keys are the rows of the first product and heads its columns, values' columns are the
rows of the second. So sums of 512 values for 64 heads and the scores of 128 keys fit into tensor memory together, and
one tile of keys in shared memory is an operand of both products, as it lies.

    scores [128 keys, 64 heads] = keys [128, 512] q^T      sums [4 x 128 values, 64 heads] += values^T [512, 128] p
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dscompile.formats import FORMATS
from dscompile.targets import Target
from dscompile.templates.cute import arithmetic
from dscompile.templates.cute.layouts import tensor_memory_columns
from dscompile.templates.cute.record import CuteTemplate, Request
from dscompile.templates.triton.record import Config, Meta, Sizes, config

DIM, ROTATED = 512, 64
HEADS, KEYS, SLAB = 64, 128, 64  # of a block; of a tile; values that lie side by side in shared memory
SLABS = DIM // SLAB
THREADS = 256
WINDOW, COMPRESSED = FORMATS["fp8_g32_ue8m0"], FORMATS["fp4_g16_e4m3"]
START = -1e30  # where the running maximum starts: finite, so that a query without keys gives 0 and not NaN

KEY_BYTES, QUERY_BYTES, WEIGHT_BYTES = KEYS * DIM * 2, HEADS * DIM * 2, KEYS * HEADS * 2
#: Running maxima, denominators, factors of a tile; and maxima and sums of each of four warps.
TABLES = {"top": HEADS, "total": HEADS, "factor": HEADS, "maxima": 4 * HEADS, "sums": 4 * HEADS}
SHARED_BYTES = 1024 + KEY_BYTES + QUERY_BYTES + WEIGHT_BYTES + 4 * sum(TABLES.values())
SUMS_AT, SCORES_AT = 0, 4 * HEADS  # columns of tensor memory
COLUMNS = tensor_memory_columns(SCORES_AT + HEADS)


@dataclass(frozen=True)
class AttentionSpec:
    """Constants of one kernel. window: keys; selected: compressed rows a query lists; heads: of the model."""

    heads: int
    window: int
    selected: int
    scale: float
    rope_q: bool
    sink: bool

    @property
    def tiles(self) -> list[tuple[bool, int]]:
        """(whether it holds window rows, the place of its first row among them or in the list)."""
        return [(True, first) for first in range(0, self.window, KEYS)] + [
            (False, first) for first in range(0, self.selected, KEYS)
        ]


def chunk_place(row: int, chunk: int) -> int:
    """The byte of 8 values in a slab of rows of 64 values: 16-byte chunks change places with the row."""
    return row * 128 + (chunk ^ row % 8) * 16


def window_chunk(m: Any, words: list[Any], scale_byte: Any) -> list[Any]:
    """8 E4M3 codes in two words, and their UE8M0 scale -> 8 bf16 in four words, exact."""
    ends = m.select((scale_byte == 0) | (scale_byte == 255), m.integer(1 << 22), m.integer(0))  # 2^-127, NaN
    scale = m.from_bits((scale_byte << 23) | ends)
    return [_scaled_pair(m, m.from_e4m3x2(word >> shift), scale) for word in words for shift in (0, 16)]


def compressed_chunk(m: Any, word: Any, scale_byte: Any) -> list[Any]:
    """8 E2M1 codes in a word, and their E4M3 scale -> 8 bf16 in four words, exact."""
    scale = m.from_e4m3(scale_byte)
    return [_scaled_pair(m, m.from_e2m1x2(word >> shift), scale) for shift in (0, 8, 16, 24)]


def _scaled_pair(m: Any, pair: tuple[Any, Any], scale: Any) -> Any:
    return m.bf16x2(m.mul(pair[0], scale), m.mul(pair[1], scale))


def byte_of(words: list[Any], place: int) -> Any:
    return (words[place // 4] >> (8 * (place % 4))) & 0xFF


def half_row(m: Any, window: bool, payload: list[Any], scales: list[Any]) -> list[list[Any]]:
    """256 values of a row -> 32 chunks of 8 bf16. payload: 64 words (window) or 32; scales: 8 or 16 bytes in words."""
    if window:
        return [window_chunk(m, payload[2 * i : 2 * i + 2], byte_of(scales, i // 4)) for i in range(32)]
    return [compressed_chunk(m, payload[i], byte_of(scales, i // 2)) for i in range(32)]


def sums_of_lanes(m: Any, values: list[Any], lane: Any) -> Any:
    """32 values of each of 32 threads -> in lane i, the sum of all values i."""
    step = 16
    while step:
        upper = (lane & step) != 0
        keep = [m.select(upper, b, a) for a, b in zip(values[:step], values[step:])]
        give = [m.select(upper, a, b) for a, b in zip(values[:step], values[step:])]
        values = [m.add(mine, m.neighbour(other, step)) for mine, other in zip(keep, give)]
        step //= 2
    return values[0]


def maxima_of_lanes(m: Any, values: list[Any], lane: Any) -> Any:
    """32 values of each of 32 threads -> in lane i, the largest of all values i."""
    mine = values[0]
    for place, value in enumerate(values):
        mine = m.select(lane == place, m.max_float_of_warp(value), mine)
    return mine


def weights_of(m: Any, scores: list[Any], tops: list[Any], valid: Any) -> list[Any]:
    """exp(score - top) of a key for several heads; 0 where the key is not seen."""
    return [m.select(valid, m.exp(m.sub(s, t)), m.number(0.0)) for s, t in zip(scores, tops)]


def _refusal(meta: Meta, target: Target) -> str | None:
    if not target.has("tcgen05"):
        return f"target {target.name}, allowed: those with tensor memory"
    q, window, compressed, indices = meta["q"], meta["window_kv"], meta["comp_kv"], meta["comp_idx"]
    if q.dtype != torch.bfloat16 or q.shape[3] != DIM or q.shape[2] % HEADS:
        return f"q: {q.dtype}, {q.shape[2]} heads of {q.shape[3]}, allowed: bfloat16, multiples of {HEADS} of {DIM}"
    names = WINDOW.name, COMPRESSED.name
    if (meta["window_format"], meta["comp_format"]) != names or compressed is None or indices is None:
        return f"formats {meta['window_format']}, {meta['comp_format']}, allowed: {names} and a list of rows"
    if meta["cos"] is None or 2 * meta["cos"].shape[2] != ROTATED or meta["cos"].dtype != torch.float32:
        return f"cos, allowed: float32 angles of {ROTATED} rotated values"
    if not window.shape[1] or not compressed.shape[1] or not indices.shape[2] or indices.dtype != torch.int32:
        return f"{window.shape[1]} and {compressed.shape[1]} rows, {indices.dtype} indices, allowed: some, torch.int32"
    if {meta["q_pos"].dtype, meta["window_start"].dtype} != {torch.int64}:
        return f"q_pos, window_start: {meta['q_pos'].dtype}, {meta['window_start'].dtype}, allowed: torch.int64"
    if meta["sink"] is not None and meta["sink"].dtype != torch.float32:
        return f"sink: {meta['sink'].dtype}, allowed: torch.float32"
    tensors = {name: meta[name] for name in ("q", "window_kv", "comp_kv", "comp_idx", "cos", "sin")}
    loose = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
    return f"strides of {', '.join(loose)}, allowed: dense" if loose else None


def spec_of(meta: Meta) -> AttentionSpec:
    return AttentionSpec(
        meta["q"].shape[2], meta["window"], meta["comp_idx"].shape[2], meta["scale"], meta["rope_q"],
        meta["sink"] is not None,
    )  # fmt: skip


def _build(meta: Meta, config: Config, target: Target) -> tuple[Request, ...]:
    spec = spec_of(meta)

    def entry() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from dscompile.compat import require_extra

        require_extra("gpu")
        from dscompile.templates.cute.attention_kernels import Attention, arguments

        return Attention(spec), arguments(spec)

    return (Request("sparse_attention", entry, config, THREADS, SHARED_BYTES, {"spec": spec}),)


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    yield config(THREADS // 32, 1)


TEMPLATES = (CuteTemplate("sparse_attention", "dsv4::sparse_attention", _build, _configs, applies=_refusal),)
assert (WINDOW.group, COMPRESSED.group) == (32, 16) and arithmetic.PER_BYTE["e2m1"] == 2
