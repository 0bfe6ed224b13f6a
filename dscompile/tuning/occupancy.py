"""How many blocks of a kernel fit on a multiprocessor, and what limits them. Arithmetic on the kernel's resources.

Rules of compute capability 9.0, 10.0 and 10.3 (CUDA programming guide, tables of technical specifications):
registers are given out to a warp in units of 256, a block takes 1 KiB of shared memory for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from dscompile.targets import KIB, Target

REGISTERS = 65536
WARPS = 64
BLOCKS = 32
REGISTER_UNIT = 256
RESERVED_SHARED = KIB
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Occupancy:
    """blocks: per multiprocessor; share: of its warps that are then resident; limit: what does not let in one more."""

    blocks: int
    share: float
    limit: str


def occupancy(
    target: Target, warps: int, registers: int, shared_bytes: int, tensor_memory_columns: int = 0
) -> Occupancy:
    """Of a block of `warps` warps, each thread with `registers` registers; ValueError if not even one fits."""
    if target.smem_bytes_per_sm.value is None:
        raise ValueError(f"occupancy: target {target.name!r}, allowed: a GPU")
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    limits = {
        "blocks": BLOCKS,
        "warps": WARPS // warps,
        "registers": REGISTERS // (per_warp * warps) if per_warp else BLOCKS,
        "shared memory": int(target.smem_bytes_per_sm.value) // (shared_bytes + RESERVED_SHARED),
    }
    if tensor_memory_columns:
        limits["tensor memory"] = TENSOR_MEMORY_COLUMNS // tensor_memory_columns
    limit = min(limits, key=lambda name: limits[name])
    if limits[limit] < 1:
        raise ValueError(
            f"occupancy: a block of {warps} warps with {registers} registers and {shared_bytes} bytes of shared memory "
            f"does not fit on {target.name} ({limit})"
        )
    return Occupancy(limits[limit], limits[limit] * warps / WARPS, limit)
