"""Rows written into a pool in one launch: norm, rotation, quantisation, packing and store. Compiled only.

Window rows (FP8), compressed rows (FP4 with E4M3 scales) and index rows (MXFP4) are one kernel with other constants.
It uses nothing that sm_90a lacks but, where there is one, the conversion instruction to E2M1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dscompile.formats import FORMATS
from dscompile.formats.record import KVFormat
from dscompile.ops.layout import PLAIN
from dscompile.targets import Target
from dscompile.templates.cute import arithmetic
from dscompile.templates.cute.arithmetic import PER_BYTE, Rounding
from dscompile.templates.cute.record import CuteTemplate, Request
from dscompile.templates.triton.record import Config, Meta, Sizes, config

LANES = 32


@dataclass(frozen=True)
class RowSpec:
    """Constants of one kernel. A thread holds the values that become 16 bytes of payload.

    dim: values of a row; rotated: of them, at the end; group: values that share a scale. stride_unit: what the distance
    of the pool's rows is a multiple of, in bytes; warps: of a block.
    """

    dim: int
    rotated: int
    rounding: Rounding
    group: int
    normed: bool
    stride_unit: int
    warps: int

    @property
    def values(self) -> int:
        """Of a thread."""
        return 16 * PER_BYTE[self.rounding.payload]

    @property
    def lanes(self) -> int:
        """Threads of a row."""
        return self.dim // self.values

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.warps * LANES // self.lanes

    @property
    def first_rotated(self) -> int:
        """The first thread of a row whose values are rotated."""
        return (self.dim - self.rotated) // self.values

    @property
    def group_lanes(self) -> int:
        """Threads that share a scale."""
        return max(1, self.group // self.values)

    @property
    def scales(self) -> int:
        """Scales that a thread has."""
        return max(1, self.values // self.group)

    @property
    def payload_bytes(self) -> int:
        return self.dim // PER_BYTE[self.rounding.payload]

    @property
    def row_bytes(self) -> int:
        return self.payload_bytes + self.dim // self.group

    @property
    def rows_unit(self) -> int:
        """What the distance of returned rows, which are dense, is a multiple of."""
        return math.gcd(self.row_bytes, 16)

    def place(self, lane: int) -> tuple[range, range]:
        """(bytes of payload, bytes of scales) of a row that a thread of it writes."""
        payload = range(16 * lane, 16 * lane + 16)
        if lane % self.group_lanes:
            return payload, range(0)
        first = self.payload_bytes + lane // self.group_lanes * self.scales
        return payload, range(first, first + self.scales)


def row(
    m: Any, spec: RowSpec, words: list[Any], weight: list[Any] | None, angles: tuple[Any, ...], turns: Any, eps: Any
) -> tuple[list[Any], Any]:
    """What a thread makes of its values: bf16 words -> (four words of payload, its scales in a word).

    weight: a number for each value, None without a norm. angles: cosines and sines of its pairs; turns: whether its
    values are rotated.
    """
    values = [half for word in words for half in arithmetic.halves(m, word)]
    if weight is not None:
        total = arithmetic.over(m, m.add, arithmetic.sum_of_squares(m, values), spec.lanes)
        scale = m.rsqrt(m.add(m.mul(total, 1.0 / spec.dim), eps))
        values = arithmetic.normed(m, values, weight, scale)
    if spec.rotated:
        # Selected, not branched: a warp would take both ways anyway.
        turned = arithmetic.rotated(m, values, *angles)
        values = [m.select(turns, new, old) for new, old in zip(turned, values)]
    if spec.group_lanes == 1:
        payload, scales = arithmetic.quantised(m, values, spec.rounding, spec.group)
        return payload, arithmetic.joined(scales, 8)[0]
    amax = arithmetic.over(m, m.max_int, arithmetic.magnitude(m, values), spec.group_lanes)
    stored, shared_scale = arithmetic.scale_of(m, amax, spec.rounding)
    return arithmetic.packed(m, arithmetic.scaled(m, values, shared_scale, spec.rounding), spec.rounding), stored


def rounding_of(record: KVFormat, target: Target) -> Rounding:
    hardware = record.payload == "e2m1" and target.has("e2m1_cvt")
    return Rounding(record.payload, record.scale, record.amax_floor, hardware)


def spec_of(meta: Meta, config: Config, target: Target) -> RowSpec:
    record = FORMATS[meta["format"]]
    return RowSpec(
        dim=meta["x"].shape[1], rotated=2 * meta["cos"].shape[1], rounding=rounding_of(record, target),
        group=record.group, normed=meta["weight"] is not None, stride_unit=math.gcd(meta["pool"].stride(0), 16),
        warps=config.num_warps,
    )  # fmt: skip


def refusal(meta: Meta, target: Target) -> str | None:
    """Why no kernel can be made for these arguments, or None."""
    format, x, half = meta["format"], meta["x"], meta["cos"].shape[1]
    if format == PLAIN or FORMATS[format].is_plain:
        return f"format {format!r}, allowed: a quantised one"
    record = FORMATS[format]
    if record.tail or record.pad_bytes or record.scale not in ("ue8m0", "e4m3"):
        return f"format {format!r}, allowed: scales of a byte and no unquantised tail"
    if x.dtype != torch.bfloat16:
        return f"x: {x.dtype}, allowed: torch.bfloat16"
    wrong = {n: str(meta[n].dtype) for n in ("cos", "sin", "weight") if meta[n] is not None}
    if set(wrong.values()) - {"torch.float32"}:
        return f"cos, sin, weight: {wrong}, allowed: torch.float32"
    values = 16 * PER_BYTE[record.payload]
    lanes, rest = divmod(x.shape[1], values)
    if rest or not 0 < lanes <= LANES or lanes & (lanes - 1):
        allowed = ", ".join(str(values * 2**i) for i in range(6))
        return f"rows of {x.shape[1]} values, allowed: {allowed}"
    if (x.shape[1] - 2 * half) % values:
        return f"{2 * half} rotated values of {x.shape[1]}, allowed: all but a multiple of {values}"
    if x.shape[1] % record.group or max(record.group, values) % min(record.group, values):
        return f"groups of {record.group} values, allowed: a power of two"
    strides = {"x": 2 * x.stride(0) % 16, "cos": 4 * meta["cos"].stride(0) % 16, "sin": 4 * meta["sin"].stride(0) % 16}
    if half == 0:
        strides = {"x": strides["x"]}
    strides["pool"] = meta["pool"].stride(0) % 4
    bad = [name for name, rest in strides.items() if rest]
    inner = [n for n in ("x", "pool", *(("cos", "sin") if half else ())) if meta[n].stride(1) != 1]
    if bad or inner:
        return f"strides of {', '.join(bad or inner)}, allowed: dense rows at multiples of 16 bytes (4 in the pool)"
    return None


def _build(meta: Meta, config: Config, target: Target) -> tuple[Request, ...]:
    spec = spec_of(meta, config, target)

    def entry() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from dscompile.compat import require_extra

        require_extra("gpu")
        from dscompile.templates.cute.row_kernels import RowWriter, arguments

        return RowWriter(spec), arguments(spec)

    details = {"format": meta["format"], "spec": spec}
    return (Request("norm_rope_store", entry, config, threads=LANES * spec.warps, details=details),)


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """A row stays within a warp. Few rows are spread over as many multiprocessors as there are."""
    yield config(1, 1)
    yield config(4, 1)


TEMPLATES = (CuteTemplate("norm_rope_store", "dsv4::norm_rope_store", _build, _configs, applies=refusal),)
