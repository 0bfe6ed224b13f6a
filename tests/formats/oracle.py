"""The formats a second time, in numpy float64 with explicit grids: slow, and written apart from the product."""

import math
from dataclasses import dataclass

import numpy as np
import torch

E2M1_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def e4m3_value(code: int) -> float:
    """Value of a 7-bit E4M3 magnitude: exponent bias 7, code 127 is NaN."""
    if code == 127:
        return math.nan
    exponent, mantissa = code >> 3, code & 7
    return math.ldexp(mantissa / 8, -6) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7)


E4M3_GRID = np.array([e4m3_value(c) for c in range(127)], dtype=np.float64)


def nearest_code(grid: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Code of the nearest number of `grid`, ties to the even code, saturating."""
    midpoints = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(midpoints, magnitude, side="left")  # a tie goes down
    above = np.searchsorted(midpoints, magnitude, side="right")  # a tie goes up
    return np.where(below % 2 == 0, below, above)


def power_of_two_at_least(x: np.ndarray) -> np.ndarray:
    """Exponent k of the smallest 2^k >= x."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.where(mantissa == 0.5, exponent - 1, exponent)


@dataclass(frozen=True)
class Rounded:
    """One quantised batch: codes with the sign bit, scale bytes (or float32 scales), dequantised values."""

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray


def quantise(x: torch.Tensor, payload: str, group: int, scale: str, amax_floor: float) -> Rounded:
    """[N, D] with finite values -> codes [N, D], scales [N, D / group], values float64 [N, D]."""
    exact = x.to(torch.float64).numpy()
    groups = exact.reshape(exact.shape[0], -1, group)
    amax = np.maximum(np.abs(groups).max(-1), amax_floor).astype(np.float32)
    largest = np.float32(6 if payload == "e2m1" else 448)
    if scale == "e4m3":
        quotient = (amax / largest).astype(np.float64)
        stored = nearest_code(E4M3_GRID, np.minimum(quotient, 448.0)).astype(np.uint8)
        scale_value = E4M3_GRID[stored]
    else:
        quotient = amax * (np.float32(1) / largest)
        assert quotient.dtype == np.float32
        exponent = power_of_two_at_least(quotient)
        stored, scale_value = (exponent + 127).astype(np.uint8), np.ldexp(1.0, exponent)
        if scale == "fp32":
            stored, scale_value = quotient, quotient.astype(np.float64)
        if scale == "fp32_pow2":
            stored = scale_value.astype(np.float32)
    # The quotient is a float32: what the writer rounds to the grid, whatever the format.
    y = (groups.astype(np.float32) / scale_value.astype(np.float32)[..., None]).astype(np.float64)
    grid, sign_bit = (E2M1_GRID, 8) if payload == "e2m1" else (E4M3_GRID, 128)
    magnitude = nearest_code(grid, np.abs(y))
    negative = np.signbit(groups)
    values = np.where(negative, -grid[magnitude], grid[magnitude]) * scale_value[..., None]
    codes = (magnitude + sign_bit * negative).astype(np.uint8)
    return Rounded(codes.reshape(exact.shape), stored, values.reshape(exact.shape))


def nibbles_to_bytes(codes: np.ndarray) -> np.ndarray:
    """E2M1 codes [N, D] -> bytes [N, D / 2], the even element low."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)


def every_finite_bf16() -> torch.Tensor:
    """All 65280 finite bf16 numbers, both zeros included."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return values[values.isfinite()]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of x, so that -0 and NaN compare as they are stored."""
    return x.contiguous().view(torch.uint8)
