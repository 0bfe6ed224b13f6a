"""How long a call would take on a target, from its compiled kernels: a model for ranking configs, not a measurement.

For each kernel, with the launch's grid and what fits on a multiprocessor at a time:

- traffic: the op's least bytes (for the kernel that takes its arguments) plus the scratch tensors that the template's
  kernels hand to each other, at the memory's rate times the share of it that the loads in flight can keep busy;
- arithmetic: the op's FLOPs at the tensor core's rate for the instruction found in the code, or at the rate of ordinary
  arithmetic if there is none, times the share of multiprocessors that have a block;
- issue: instructions of the code, run once by each warp, as if the code had no loops; a lower bound;
- a wave that is only partly full takes as long as a full one; every launch costs `LAUNCH_US`.

The three overlap, so the largest counts. Known weaknesses: loops are not unrolled in the count of instructions, caches
are ignored, and constants below are guesses where they say so. Order between configs of one template is what it is for.
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
    per_thread = sum(width * count for width, count in facts.loads.items()) + 16 * facts.async_copies
    in_flight = resident * kernel.warps * 32 * min(per_thread, 256) + resident * kernel.shared_bytes * bool(facts.tma)
    busy = min(1.0, in_flight / (rate * LATENCY_US * 1e-6)) if in_flight else 1.0
    used = min(1.0, resident / processors)
    if facts.tensor_core:
        peak = target.flops_per_s["fp8" if FP8_CORES & set(facts.tensor_core) else "bf16"].value or 1.0
    else:
        peak = processors * FP32_FLOPS_PER_SM_CYCLE * CLOCK_HZ
    seconds = {
        "memory": moved / (rate * busy),
        "arithmetic": share * cost["flops"] / (peak * used),
        "issue": facts.instructions * kernel.warps * blocks / (4 * CLOCK_HZ * processors * used),
    }
    bound = max(seconds, key=lambda name: seconds[name])
    time_us = max(LATENCY_US, seconds[bound] * 1e6 * rounding) + LAUNCH_US
    return Prediction(time_us, bound if seconds[bound] * 1e6 > LATENCY_US else "latency")
