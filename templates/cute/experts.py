"""Routed experts with FP8 activations and FP4 weights on block-scaled tensor cores. Compiled only.

    gather: the chosen rows of x, quantised, where their expert's tile wants them
    up:     act = clamped_silu(x w1^T, x w3^T) * routing weight, quantised
    down:   results[pair] = act w2^T

Slots are pairs of token and expert, sorted by expert; every expert has whole tiles of BLOCK_T slots. Weights are the
rows of a product and tokens its columns, so that few tokens fill the 128 rows that an instruction has. Columns do not
see each other: slots without a pair are left as they are, whatever bytes they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dscompile.formats import FORMATS
from dscompile.targets import Target
from dscompile.templates.cute import arithmetic
from dscompile.templates.cute.arithmetic import Rounding
from dscompile.templates.cute.layouts import BLOCK_BYTES, GROUP, ROWS, tensor_memory_columns
from dscompile.templates.cute.record import CuteTemplate, Request
from dscompile.templates.triton.record import Config, Meta, Sizes, config

BLOCK_K = 128  # of a stage: four scales, a block of them
EPILOGUE_WARPS = 4
THREADS = 32 * (EPILOGUE_WARPS + 2)  # and a warp that copies, and one that multiplies
SCALE_COLUMNS = 4  # of tensor memory, for a block of scales
VALUES = 16  # of a thread that quantises
_ACTIVATIONS = FORMATS["fp8_g32_ue8m0"]
ROUNDING = Rounding(_ACTIVATIONS.payload, _ACTIVATIONS.scale, _ACTIVATIONS.amax_floor)


@dataclass(frozen=True)
class GemmSpec:
    """Constants of one product. size: summed over. rows: of the result, for each of `parts` (w1 and w3, or w2)."""

    size: int
    rows: int
    parts: int
    block_t: int
    stages: int
    limit: float | None = None

    @property
    def up(self) -> bool:
        return self.parts == 2

    @property
    def steps(self) -> int:
        return self.size // BLOCK_K

    @property
    def row_tiles(self) -> int:
        return self.rows // ROWS

    @property
    def copied_bytes(self) -> int:
        """That a stage's barrier waits for: codes of FP4 count as they lie in global memory, two to a byte."""
        return self.parts * (ROWS * BLOCK_K // 2 + BLOCK_BYTES) + self.block_t * BLOCK_K + BLOCK_BYTES

    @property
    def stage_bytes(self) -> int:
        """In shared memory: FP4 is widened to a byte a value on the way."""
        return self.parts * (ROWS * BLOCK_K + BLOCK_BYTES) + self.block_t * BLOCK_K + BLOCK_BYTES

    @property
    def staging_bytes(self) -> int:
        """For turning the result around: E4M3 codes and their scales, or bf16."""
        return self.block_t * ROWS + BLOCK_BYTES if self.up else self.block_t * ROWS * 2

    @property
    def shared_bytes(self) -> int:
        """All of it; barriers take what the alignment of the first tile leaves them."""
        return 1024 + self.stages * self.stage_bytes + self.staging_bytes

    @property
    def columns(self) -> int:
        """Of tensor memory: sums of every part, scales of weights and of activations."""
        return tensor_memory_columns(self.parts * (self.block_t + SCALE_COLUMNS) + SCALE_COLUMNS)

    def scale_columns(self) -> tuple[list[int], int]:
        """Where the scales of each part, and those of the activations, begin."""
        first = self.parts * self.block_t
        return [first + SCALE_COLUMNS * part for part in range(self.parts)], first + SCALE_COLUMNS * self.parts


@dataclass(frozen=True)
class Plan:
    """Where pairs of token and expert go: tile_expert int32 [tiles]; slot_pair int32 and slot_weight fp32
    [tiles * BLOCK_T], with -1 and 0 where there is no pair. A pair is token * k + place."""

    tile_expert: torch.Tensor
    slot_pair: torch.Tensor
    slot_weight: torch.Tensor


def plan(indices: torch.Tensor, weights: torch.Tensor, experts: int, block_t: int) -> Plan:
    """What the sort before `experts_gather` makes; indices [N, k], those outside [0, experts) are left out."""
    chosen = indices.flatten().long()
    order = torch.sort(chosen, stable=True).indices
    order = order[(chosen[order] >= 0) & (chosen[order] < experts)]
    tile_expert: list[int] = []
    slot_pair: list[int] = []
    for expert in range(experts):
        pairs = order[chosen[order] == expert].tolist()
        tiles = -(-len(pairs) // block_t)
        tile_expert += [expert] * tiles
        slot_pair += pairs + [-1] * (tiles * block_t - len(pairs))
    pair = torch.tensor(slot_pair, dtype=torch.int32)
    weight = weights.flatten().float()[pair.long().clamp(min=0)] * (pair >= 0)
    return Plan(torch.tensor(tile_expert, dtype=torch.int32), pair, weight)


def gathered(m: Any, words: list[Any]) -> tuple[list[Any], Any]:
    """16 bf16 of a thread -> (four words of codes, the scale that it shares with its neighbour)."""
    values = [half for word in words for half in arithmetic.halves(m, word)]
    amax = arithmetic.over(m, m.max_int, arithmetic.magnitude(m, values), GROUP // VALUES)
    stored, scale = arithmetic.scale_of(m, amax, ROUNDING)
    return arithmetic.packed(m, arithmetic.scaled(m, values, scale, ROUNDING), ROUNDING), stored


def four_scales(m: Any, stored: Any, lane: Any) -> Any:
    """The scales of eight neighbouring threads, one for two of them, in a word that each of them gets."""
    word = stored << (lane // 2 % 4 * 8)
    for step in (2, 4):
        word = word | m.neighbour(word, step)
    return word


def specs(meta: Meta, config: Config) -> tuple[GemmSpec, GemmSpec]:
    size, inner = meta["x"].shape[1], meta["w13"].shape[1] // 2
    limit = meta["limit"] if 0 < meta["limit"] < math.inf else None
    block_t, stages = config["BLOCK_T"], config.num_stages
    return (
        GemmSpec(size, inner, 2, block_t, stages, limit),
        GemmSpec(inner, size, 1, block_t, 2 * stages if block_t <= 64 else stages + 1),
    )


def _request(name: str, spec: GemmSpec, config: Config) -> Request:
    def entry() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from dscompile.compat import require_extra

        require_extra("gpu")
        from dscompile.templates.cute.expert_kernels import GroupedGemm, arguments

        return GroupedGemm(spec), arguments(spec)

    return Request(name, entry, config, THREADS, spec.shared_bytes, {"spec": spec})


def _build(meta: Meta, config: Config, target: Target) -> tuple[Request, ...]:
    up, down = specs(meta, config)

    def entry() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from dscompile.compat import require_extra

        require_extra("gpu")
        from dscompile.templates.cute.gather_kernels import Gather, arguments

        return Gather(up.size, up.block_t), arguments()

    gather = Request("experts_gather", entry, config, up.size // VALUES, 0, {"size": up.size})
    return gather, _request("experts_up", up, config), _request("experts_down", down, config)


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    average = sizes["N"] * sizes["k"] / sizes["E"]
    small = [config(6, stages, BLOCK_T=t) for t, stages in ((16, 5), (32, 5))]
    large = [config(6, stages, BLOCK_T=t) for t, stages in ((64, 4), (128, 3))]
    yield from (*small, *large) if average <= 16 else (*large, *small)


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    meta = {
        "x": torch.empty(0, sizes["D"], device="meta"), "limit": 0.0,
        "w13": torch.empty(0, 2 * sizes["I"], 0, device="meta"),
    }  # fmt: skip
    for spec in specs(meta, config):
        if spec.shared_bytes > target.smem_bytes_per_block:
            return f"{spec.shared_bytes} bytes of shared memory, allowed: {target.smem_bytes_per_block}"
    return None


def _applies(meta: Meta, target: Target) -> str | None:
    if not target.has("block_scaled_mma"):
        return f"target {target.name}, allowed: those with block-scaled tensor cores"
    if meta["weight_format"] != "e2m1_1x32":
        return f"weight_format {meta['weight_format']!r}, allowed: 'e2m1_1x32'"
    if meta["x"].dtype != torch.bfloat16:
        return f"x: {meta['x'].dtype}, allowed: torch.bfloat16"
    x, w13 = meta["x"], meta["w13"]
    if x.stride(1) != 1 or x.stride(0) % 8 or not w13.is_contiguous():
        given = f"strides {x.stride()} of x and {w13.stride()} of w13"
        return f"{given}, allowed: rows at multiples of 16 bytes, dense weights"
    size, inner = x.shape[1], w13.shape[1] // 2
    if size % (32 * VALUES) or inner % BLOCK_K or size > 32 * 32 * VALUES:
        return f"{size} and {inner} values, allowed: multiples of {32 * VALUES} up to 16384, and of {BLOCK_K}"
    return None


TEMPLATES = (CuteTemplate("experts_packed", "dsv4::experts_packed", _build, _configs, _check, _applies),)
assert GROUP == _ACTIVATIONS.group
