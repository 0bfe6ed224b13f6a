"""Calls of many batch sizes from two captures: what is derived is what a capture would have found, or nothing is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from dscompile.tuning.calls import Call, TensorSpec
from dscompile.workload_batches import NotLinearError, below, between, calls_of_batches
from dscompile.workload_models import BUILT_IN, step_calls


def row(rows: int, *more: object) -> Call:
    return Call("op", (TensorSpec((rows, 4), (4, 1), torch.bfloat16), None, 1e-6, *more), 3)


def steps(make: Callable[[int], list[Call]]) -> tuple[Callable, list[int]]:
    """A capture that calls `make`, and the batch sizes it was asked for."""
    asked: list[int] = []

    def capture(batches: Sequence[int]) -> Iterator[tuple[int, list[Call]]]:
        for batch in batches:
            asked.append(batch)
            yield batch, make(batch)

    return capture, asked


def test_many_batch_sizes_take_two_captures() -> None:
    def make(batch: int) -> list[Call]:
        return [row(batch, batch + 1), row(128 * batch + 1, "x"), replace(row(7), count=batch and 2)]

    capture, asked = steps(make)
    found = dict(calls_of_batches([8, 256, 16, 64, 1, 16], capture))
    assert asked == [1, 5, 256]
    assert found == {batch: make(batch) for batch in (1, 8, 16, 64, 256)}


def test_two_batch_sizes_are_captured_as_they_are() -> None:
    capture, asked = steps(lambda batch: [row(batch)])
    assert list(dict(calls_of_batches([64, 1, 8], capture))) == asked == [1, 8, 64]


@pytest.mark.parametrize(
    "make",
    [
        lambda batch: [row(-(-batch // 16) * 16)],  # padded
        lambda batch: [row(1 << (batch - 1).bit_length())],  # a power of two
        lambda batch: [row(min(batch, 100))],
        lambda batch: [row(batch * batch)],
        lambda batch: [row(batch + 5)],  # no pool has five rows that are never read
        lambda batch: [row(4096 // batch)],
        lambda batch: [row(batch)] * 2 if batch > 100 else [row(batch), row(3)],
        lambda batch: [row(batch, "small" if batch < 100 else "large")],
        lambda batch: [replace(row(8), count=batch)],
        lambda batch: [row(batch, batch > 100)],
    ],
    ids=["padded", "power of two", "capped", "squared", "five more", "divided", "length", "word", "count", "flag"],
)
def test_anything_else_is_captured(make: Callable[[int], list[Call]]) -> None:
    capture, asked = steps(make)
    found = dict(calls_of_batches([8, 32, 256], capture))
    assert found == {batch: make(batch) for batch in (8, 32, 256)} and asked == [5, 256, 8, 32]


def test_primes_below() -> None:
    assert [below(batch) for batch in (2, 3, 4, 5, 8, 13, 16, 64)] == [3, 3, 3, 5, 5, 13, 13, 61]
    for batch in range(5, 200):
        assert below(batch) <= batch and below(batch) % 4 == 1


def test_a_choice_just_above_the_largest_is_not_met() -> None:
    """Nothing larger than what is wanted is captured: kernels for few rows end at a power of two."""
    capture, asked = steps(lambda batch: [row(batch, "few" if batch <= 256 else "many")])
    dict(calls_of_batches([8, 32, 256], capture))
    assert asked == [5, 256]


def test_the_first_difference_is_named() -> None:
    with pytest.raises(NotLinearError, match="12 at batch 7 and 20 at 257"):
        between([row(12)], 7, [row(20)], 257, 8)
    with pytest.raises(NotLinearError, match="1 calls at batch 7, 0 at 257"):
        between([row(1)], 7, [], 257, 8)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["v41-miniature", "v4-miniature"])
def test_derived_is_captured(model: str) -> None:
    """Of real captures of a miniature, at sizes on both sides of its window and its rows."""
    config = BUILT_IN[model]()
    low, high, middle = (step_calls(config, "sm_103a", "decode", 64, 1, batch) for batch in (5, 256, 16))
    assert between(low, 5, high, 256, 16) == middle
