"""The calls of many batch sizes from two captures.

A capture fixes every size as a number. Two of them, at the largest of the wanted batch sizes and at a prime below the
smallest, show how each number depends on the batch: it stays, or grows by a whole number for each sequence, with
nothing or one row besides (pools have a row that is never read). The prime shows what is rounded or padded: it fits
no such line. Where anything else differs nothing is derived. A choice that a size decides (small enough for a kernel
of its own) is the same for both ends, so also for what lies between them. Batch 1 is always captured by itself, since
torch treats axes of length 1 in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dscompile.tuning.calls import Call, TensorSpec, merged

Captures = Callable[[Sequence[int]], Iterable[tuple[int, list[Call]]]]


class NotLinearError(ValueError):
    """Two captures differ in more than the batch size explains; the message names the first such place."""


def calls_of_batches(batches: Iterable[int], capture: Captures) -> Iterator[tuple[int, list[Call]]]:
    """(batch size, its calls) for each of `batches`, which may come in any order.

    capture: takes batch sizes and gives each with its calls, in any order.
    """
    wanted = sorted(set(batches))
    alone = [batch for batch in wanted if batch == 1]
    rest = [batch for batch in wanted if batch > 1]
    if len(rest) < 3:
        yield from capture([*alone, *rest])
        return
    low, high = below(rest[0]), rest[-1]
    found = dict(capture([*alone, low, high]))
    yield from ((batch, found[batch]) for batch in alone)
    try:
        derived = {batch: between(found[low], low, found[high], high, batch) for batch in rest[:-1]}
    except NotLinearError:
        yield from ((batch, found[batch]) for batch in (low, high) if batch in rest)
        yield from capture([batch for batch in rest if batch not in found])
    else:
        yield from derived.items()
        yield high, found[high]


def below(batch: int) -> int:
    """The largest prime up to `batch` that is one more than a multiple of 4, so that rounding up adds more than a row;
    3 where there is none."""
    return next((n for n in range(batch, 4, -1) if n % 4 == 1 and _is_prime(n)), 3)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def between(few: Sequence[Call], low: int, many: Sequence[Call], high: int, batch: int) -> list[Call]:
    """The calls at `batch`, from those at `low` and at `high`. Raises NotLinearError."""
    if len(few) != len(many):
        raise NotLinearError(f"{len(few)} calls at batch {low}, {len(many)} at {high}")

    def number(a: int, b: int) -> int:
        slope, left = divmod(b - a, high - low)
        if left or slope < 0 or (slope > 0 and a - slope * low not in (0, 1)):
            raise NotLinearError(f"{a} at batch {low} and {b} at {high}")
        return a + slope * (batch - low)

    def value(a: Any, b: Any) -> Any:
        if type(a) is not type(b):
            raise NotLinearError(f"{a} at batch {low} and {b} at {high}")
        if isinstance(a, TensorSpec) and isinstance(b, TensorSpec):
            if a.dtype != b.dtype or len(a.shape) != len(b.shape):
                raise NotLinearError(f"{a} at batch {low} and {b} at {high}")
            return TensorSpec(tuple(map(number, a.shape, b.shape)), tuple(map(number, a.stride, b.stride)), a.dtype)
        if isinstance(a, tuple | list) and len(a) == len(b):
            return type(a)(value(x, y) for x, y in zip(a, b))
        if type(a) is int:
            return number(a, b)
        if a != b:
            raise NotLinearError(f"{a} at batch {low} and {b} at {high}")
        return a

    found = []
    for a, b in zip(few, many):
        if (a.op, a.count, len(a.args)) != (b.op, b.count, len(b.args)):
            raise NotLinearError(f"{a} x {a.count} at batch {low} and {b} x {b.count} at {high}")
        found.append(Call(a.op, tuple(map(value, a.args, b.args)), a.count))
    return merged(found)
