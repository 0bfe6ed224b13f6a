"""The arithmetic of kernels, written once: for the scalars of a thread, and for tensors on a CPU.

Every function takes a machine `m` first. `device.Device` is a GPU's, one instruction a primitive; `host.Host` is the
same on torch tensors, with which the tests compare all of this to `dscompile.formats`. Numbers are fp32 or int32;
products and sums are rounded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
PER_BYTE = {"e4m3": 1, "e2m1": 2}


@dataclass(frozen=True)
class Rounding:
    """How a group of values becomes codes and a scale: of a `KVFormat`, what arithmetic depends on.

    hardware: E2M1 by the conversion instruction of sm_100a and newer.
    """

    payload: str  # "e4m3" or "e2m1"
    scale: str  # "ue8m0" or "e4m3"
    floor: float  # smallest amax
    hardware: bool = False

    @property
    def largest(self) -> float:
        return LARGEST[self.payload]


def tree(combine: Any, values: Sequence[Any]) -> Any:
    """Neighbours combined, then neighbours of the results: as deep as a logarithm."""
    items = list(values)
    while len(items) > 1:
        paired = [combine(a, b) for a, b in zip(items[::2], items[1::2])]
        items = paired + items[len(paired) * 2 :]
    return items[0]


def halves(m: Any, word: Any) -> tuple[Any, Any]:
    """Two bf16 in a word -> fp32, the lower half first."""
    return m.from_bits(word << 16), m.from_bits(word & -65536)


def sum_of_squares(m: Any, values: Sequence[Any]) -> Any:
    return tree(m.add, [m.mul(v, v) for v in values])


def normed(m: Any, values: Sequence[Any], weight: Sequence[Any], scale: Any) -> list[Any]:
    """Rounded to bf16, as fp32."""
    return to_bf16(m, [m.mul(w, m.mul(v, scale)) for v, w in zip(values, weight)])


def to_bf16(m: Any, values: Sequence[Any]) -> list[Any]:
    """fp32 -> the nearest bf16, as fp32; an even number of them."""
    rounded: list[Any] = []
    for low, high in zip(values[::2], values[1::2]):
        rounded.extend(halves(m, m.bf16x2(low, high)))
    return rounded


def rotated(m: Any, values: Sequence[Any], cos: Sequence[Any], sin: Sequence[Any]) -> list[Any]:
    """Adjacent pairs turned, each by its own angle; rounded to bf16, as fp32."""
    turned: list[Any] = []
    for even, odd, c, s in zip(values[::2], values[1::2], cos, sin):
        turned.append(m.sub(m.mul(even, c), m.mul(odd, s)))
        turned.append(m.add(m.mul(odd, c), m.mul(even, s)))
    return to_bf16(m, turned)


def magnitude(m: Any, values: Sequence[Any]) -> Any:
    """int32 bits of the largest absolute value; as integers, inf is above all numbers and NaN above inf."""
    return tree(m.max_int, [m.bits(v) & 0x7FFFFFFF for v in values])


def scale_of(m: Any, amax_bits: Any, rounding: Rounding) -> tuple[Any, Any]:
    """-> (the stored byte; for a UE8M0 scale its reciprocal, else the scale as a reader sees it)."""
    amax = m.from_bits(amax_bits)
    amax = m.select(amax < rounding.floor, m.number(rounding.floor), amax)  # false for NaN, which passes
    if rounding.scale == "ue8m0":
        # A mantissa of zero stays in its binade, any other is carried into the next.
        bits = m.bits(m.mul(m.mul(amax, 1.0 / rounding.largest), 2.0 - 2.0**-23)) & 0x7F800000
        # Reciprocals of powers of two are exact, and so are products with them; of inf it is 0.
        return bits >> 23, m.from_bits(m.max_int(0x7F000000 - bits, m.integer(0)))
    quotient = m.div(amax, m.number(rounding.largest))
    code = m.e4m3x2(m.select(quotient > 448.0, m.number(448.0), quotient), m.number(0.0)) & 0xFF
    return code, m.from_e4m3(code)


def scaled(m: Any, values: Sequence[Any], scale: Any, rounding: Rounding) -> list[Any]:
    """Values over their scale, which comes from `scale_of`; not clamped, the codes saturate."""
    if rounding.scale == "ue8m0":
        return [m.mul(v, scale) for v in values]
    reciprocal = m.reciprocal(scale)
    return [quotient(m, v, scale, reciprocal) for v in values]


def quotient(m: Any, x: Any, scale: Any, reciprocal: Any) -> Any:
    """x / scale as a division rounds it, for a scale of four significant bits that is not 0: one division a group.

    The first guess is off by at most 1.5 units in the last place, the remainder is exact, and so the second is off by
    less than 2^-23 units before it is rounded, while a quotient by four bits is a thirtieth of a unit or more away from
    where rounding changes. Signs keep -0; the bounds keep infinities, which saturate as all beyond 448 does.
    """
    guess = m.max_number(m.min_number(m.mul(x, reciprocal), m.number(1024.0)), m.number(-1024.0))
    return m.fma(m.fma(guess, scale, m.negative(x)), m.negative(reciprocal), guess)


def e2m1_code(m: Any, x: Any) -> Any:
    """fp32 -> code 0..15, ties to the even code, saturating; NaN gives +-6."""
    sign = (m.bits(x) >> 28) & 8
    v = m.min_number(m.abs(x), m.number(6.0))
    # Adding 2^22 times the power of two below v (at least 1) leaves room for one bit of mantissa. What is on the grid,
    # times 2^-126, has its code in the topmost bits below the sign.
    exponent = m.max_int(m.bits(v) & 0x7F800000, m.integer(0x3F800000))
    shift = m.from_bits(exponent + 0x0B000000)
    on_grid = m.mul(m.sub(m.add(v, shift), shift), 2.0**-126)
    return (m.bits(on_grid) >> 22) | sign


def e2m1_byte(m: Any, low: Any, high: Any, hardware: bool) -> Any:
    """Two fp32 -> a byte, `low` in the low nibble."""
    if hardware:
        return m.e2m1x2(low, high)
    return e2m1_code(m, low) | (e2m1_code(m, high) << 4)


def packed(m: Any, values: Sequence[Any], rounding: Rounding) -> list[Any]:
    """Scaled values -> words of codes, the first value lowest. 4 values a word (E4M3) or 8 (E2M1)."""
    if rounding.payload == "e4m3":
        parts, width = [m.e4m3x2(a, b) for a, b in zip(values[::2], values[1::2])], 16
    else:
        parts = [e2m1_byte(m, a, b, rounding.hardware) for a, b in zip(values[::2], values[1::2])]
        width = 8
    return joined(parts, width)


def joined(parts: Sequence[Any], width: int) -> list[Any]:
    """Numbers of `width` bits -> words of 32 bits, the first lowest; a last word may be part empty."""
    count = 32 // width
    words = []
    for first in range(0, len(parts), count):
        word = parts[first]
        for place, part in enumerate(parts[first + 1 : first + count], 1):
            word = word | (part << (width * place))
        words.append(word)
    return words


def quantised(m: Any, values: Sequence[Any], rounding: Rounding, group: int) -> tuple[list[Any], list[Any]]:
    """Whole groups of values -> (words of codes, stored scales)."""
    words: list[Any] = []
    scales: list[Any] = []
    for first in range(0, len(values), group):
        part = values[first : first + group]
        stored, scale = scale_of(m, magnitude(m, part), rounding)
        words.extend(packed(m, scaled(m, part, scale, rounding), rounding))
        scales.append(stored)
    return words, scales


def over(m: Any, combine: Any, value: Any, lanes: int) -> Any:
    """A reduction over `lanes` neighbouring threads, known to each of them."""
    step = 1
    while step < lanes:
        value = combine(value, m.neighbour(value, step))
        step *= 2
    return value


def clamped_swiglu(m: Any, gate: Any, up: Any, limit: float | None) -> Any:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); NaN stays NaN."""
    if limit is not None:
        gate = m.select(gate > limit, m.number(limit), gate)
        up = m.select(up > limit, m.number(limit), up)
        up = m.select(up < -limit, m.number(-limit), up)
    return m.mul(m.mul(gate, m.reciprocal(m.add(m.exp(m.mul(gate, -1.0)), 1.0))), up)


def activated(
    m: Any, gate: Sequence[Any], up: Sequence[Any], factor: Sequence[Any], limit: float | None, rounding: Rounding
) -> tuple[list[Any], list[Any]]:
    """Sums of w1 and w3 for one row and several tokens -> (values over their scale, stored scales).

    clamped_swiglu times the routing weight, rounded to bf16 as sums and results are; 32 threads, a row each, share the
    scale of a token.
    """
    gate, up = to_bf16(m, gate), to_bf16(m, up)
    act = to_bf16(m, [m.mul(clamped_swiglu(m, g, u, limit), f) for g, u, f in zip(gate, up, factor)])
    values, scales = [], []
    for value in act:
        stored, scale = scale_of(m, m.max_of_warp(magnitude(m, [value])), rounding)
        values.extend(scaled(m, [value], scale, rounding))
        scales.append(stored)
    return values, scales
