"""How long a call would take on a target, from its compiled kernels: a model for ranking configs, not a measurement.

For each kernel, with the launch's grid and what fits on a multiprocessor at a time:

- traffic: the op's least bytes (for the kernel that takes its arguments) plus the scratch tensors that the template's
  kernels hand to each other, at the memory's rate times the share of it that the loads in flight can keep busy;
- arithmetic: the op's FLOPs at the tensor core's rate for the instruction found in the code, or at the rate of ordinary
  arithmetic if there is none, times the share of multiprocessors that have a block;
- issue: instructions of the code, run by each warp, those in loops as often as it takes to load the bytes that the
  kernel has to read (`trips`); once where that cannot be told;
- a wave that is only partly full takes as long as a full one; every launch costs `LAUNCH_US`.

The three overlap, so the largest counts. Known weaknesses: what blocks read again is not counted, so loops run longer
than the model thinks; loops that copy by TMA or load nothing count once; caches are ignored; constants below are
guesses where they say so. Order between configs of one template is what it is for. docs/cost_model.md compares it with
other orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dscompile.targets import Target
from dscompile.tuning.build import Built
from dscompile.tuning.occupancy import occupancy

LAUNCH_US = 2.0  # guess: a kernel inside a CUDA graph
LATENCY_US = 0.8  # guess: of a load from HBM
CLOCK_HZ = 1.8e9  # guess
FP32_FLOPS_PER_SM_CYCLE = 256  # 128 lanes, two operations each
FP8_CORES = frozenset(("UTCQMMA", "QGMMA", "QMMA"))


@dataclass(frozen=True)
class Prediction:
    """Of one call. bound: what takes longest in its slowest kernel."""

    time_us: float
    bound: str


def predict(built: Sequence[Built], target: Target) -> Prediction:
    """Of a call whose kernels are `built`. Raises ValueError for a kernel that does not fit on the target."""
    parts = [_kernel(each, target, sum(b.main for b in built)) for each in built]
    slowest = max(parts, key=lambda part: part.time_us)
    return Prediction(sum(part.time_us for part in parts), slowest.bound)


def trips(built: Built, mains: int = 1) -> float:
    """How often the loops of a kernel run, at least 1: until they have loaded what is left of the bytes to read.

    mains: kernels of the call that take its arguments.
    """
    facts, blocks = built.facts, math.prod(built.grid)
    if not facts.loop_bytes or not blocks:
        return 1.0
    share = 1 / mains if built.main else 0.0
    needed = (share * built.job.call.cost().numbers()["read_bytes"] + built.scratch_bytes) / blocks
    threads = 32 * built.kernel.warps
    before = threads * (facts.loaded_bytes - facts.loop_bytes)
    return max(1.0, (needed - before) / (threads * facts.loop_bytes))


def issued(built: Built, mains: int = 1) -> float:
    """Instructions that all warps of a launch run, as far as `trips` can tell."""
    facts = built.facts
    of_a_warp = facts.instructions + (trips(built, mains) - 1.0) * facts.loop_instructions
    return of_a_warp * built.kernel.warps * math.prod(built.grid)


def bytes_in_flight(built: Built, target: Target) -> float:
    """What the resident blocks can have asked for at a time: loads of all threads (256 bytes each at most), and TMA."""
    kernel, facts = built.kernel, built.facts
    fits = occupancy(target, kernel.warps, facts.registers, kernel.shared_bytes, kernel.tensor_memory_columns)
    resident = min(math.prod(built.grid), fits.blocks * int(target.sm_count.value or 0))
    return resident * (kernel.warps * 32 * min(facts.loaded_bytes, 256) + kernel.shared_bytes * bool(facts.tma))


def _kernel(built: Built, target: Target, mains: int) -> Prediction:
    kernel, facts = built.kernel, built.facts
    fits = occupancy(target, kernel.warps, facts.registers, kernel.shared_bytes, kernel.tensor_memory_columns)
    processors, rate = target.sm_count.value, target.hbm_bytes_per_s.value
    assert processors and rate
    blocks = math.prod(built.grid)
    if blocks == 0:
        return Prediction(0.0, "nothing to do")
    resident = min(blocks, fits.blocks * processors)
    rounding = math.ceil(blocks / resident) * resident / blocks
    cost = built.job.call.cost().numbers()
    share = 1 / mains if built.main else 0.0
    moved = share * (cost["read_bytes"] + cost["write_bytes"]) + built.scratch_bytes
    in_flight = bytes_in_flight(built, target)
    busy = min(1.0, in_flight / (rate * LATENCY_US * 1e-6)) if in_flight else 1.0
    used = min(1.0, resident / processors)
    if facts.tensor_core:
        peak = target.flops_per_s["fp8" if FP8_CORES & set(facts.tensor_core) else "bf16"].value or 1.0
    else:
        peak = processors * FP32_FLOPS_PER_SM_CYCLE * CLOCK_HZ
    seconds = {
        "memory": moved / (rate * busy),
        "arithmetic": share * cost["flops"] / (peak * used),
        "issue": issued(built, mains) / (4 * CLOCK_HZ * processors * used),
    }
    bound = max(seconds, key=lambda name: seconds[name])
    time_us = max(LATENCY_US, seconds[bound] * 1e6 * rounding) + LAUNCH_US
    return Prediction(time_us, bound if seconds[bound] * 1e6 > LATENCY_US else "latency")
