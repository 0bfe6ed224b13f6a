"""Programs that write to what they read, compiled: every read keeps its side of the write (case R22).

The programs are made of mathematics that the backend does recognise. Results and everything written must be eager's.
Patterns and passes on such graphs: `tests/passes/engine/test_rewrite.py`, `test_random_programs.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS

DIM, ROWS, TOKENS = 64, 12, 4
FORMAT = FORMATS["fp8_g32_ue8m0"]
EPS = 1e-6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def read(pool: Tensor) -> Tensor:
    return FORMAT.unpack(pool, DIM, torch.float32)


def ring(pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """The window: old rows are read, then overwritten, then read again."""
    old = read(pool)
    pool[slots] = FORMAT.pack(x)
    return norm(old.sum(0) + read(pool).sum(0))


def twice(pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """Two stores to the same rows with a read between them."""
    pool[slots] = FORMAT.pack(x)
    between = read(pool)[slots]
    pool[slots] = FORMAT.pack(norm(between))
    return between + read(pool)[slots]


def halves(pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """The two halves of a norm with a write to its input between them: no norm of anything."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    x.mul_(3)
    return x * inverse


def copied(pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """A pool is overwritten by another one; rows read before and after are not the same rows."""
    before = read(pool)
    pool.copy_(other)
    other[slots] = FORMAT.pack(x)
    return norm(before - read(pool)) + read(other)


def windows(pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """Writes and reads through overlapping views of one pool."""
    head, tail = pool[: ROWS - 4], pool[4:]
    head[slots] = FORMAT.pack(x)
    seen = read(tail)
    tail[slots] = FORMAT.pack(-x)
    return seen.sum(0) + read(head).sum(0)


def swapped(pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """Rows move from one pool to another and back."""
    rows = pool[slots]
    pool[slots] = other[slots]
    other[slots] = rows
    other[slots.flip(0)] = FORMAT.pack(norm(x))
    return read(pool) + read(other)


def input_written(pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """sin(x); x becomes something else; x again."""
    first = norm(x).sin()
    x.copy_(read(pool)[slots])
    pool[slots] = FORMAT.pack(norm(x))
    return first + x


PROGRAMS = [ring, twice, halves, copied, windows, swapped, input_written]


def arguments() -> list[Tensor]:
    pools = [FORMAT.pack(torch.randn(ROWS, DIM)) for _ in range(2)]
    return [*pools, torch.randn(TOKENS, DIM), torch.tensor([5, 0, 3, 6])]


def assert_equals_eager(compiled: Callable[..., Tensor], program: Callable[..., Tensor], given: list[Tensor]) -> None:
    mine, theirs = [x.clone() for x in given], [x.clone() for x in given]
    want, got = program(*theirs), compiled(*mine)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(mine, theirs, strict=True):
        if a.dtype == torch.uint8:
            torch.testing.assert_close(read(a), read(b), rtol=0.13, atol=1e-5)  # one code, where a sum ends elsewhere
            assert (a != b).float().mean() < 0.01
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS)
def test_reads_keep_their_side_of_a_write(dsv4: Callable[..., Any], program: Callable[..., Tensor]) -> None:
    compiled = dsv4(program)
    for _ in range(2):
        assert_equals_eager(compiled, program, arguments())
    assert len(compiled.report.graphs) == 1
    assert compiled.counts if program is not halves else "norm" not in compiled.counts


@pytest.mark.parametrize("program", [ring, twice, swapped])
@pytest.mark.parametrize("shift", [0, 6])
def test_one_pool_in_two_places(dsv4: Callable[..., Any], program: Callable[..., Tensor], shift: int) -> None:
    """Both pool arguments are the same tensor, or views of one memory that overlap by half."""
    _, _, x, slots = arguments()
    mine = FORMAT.pack(torch.randn(ROWS + shift, DIM))
    theirs = mine.clone()
    want = program(theirs[:ROWS], theirs[shift:], x, slots)
    torch.testing.assert_close(dsv4(program)(mine[:ROWS], mine[shift:], x, slots), want, rtol=1e-5, atol=1e-5)
    assert (mine != theirs).float().mean() < 0.01


def test_the_reported_example(dsv4: Callable[..., Any]) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = torch.sin(x)
        x.copy_(y)
        return x + a

    x, y = torch.ones(1), torch.full((1,), 5.0)
    torch.testing.assert_close(dsv4(function)(x, y), torch.tensor([5.84147]), rtol=0, atol=1e-5)
    assert x.equal(y)


STEPS = ["norm", "store", "store_other", "read", "read_early", "copy", "scale", "rows"]


class Program:
    """Steps in any order on two pools and a value."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def __call__(self, pool: Tensor, other: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        early, seen, value = read(pool), torch.zeros(DIM), x
        for step in self.steps:
            if step == "norm":
                value = norm(value)
            elif step == "store":
                pool[slots] = FORMAT.pack(value)
            elif step == "store_other":
                other[slots.flip(0)] = FORMAT.pack(value * 0.5)
            elif step == "read":
                seen = seen + read(pool).sum(0)
            elif step == "read_early":
                seen = seen - early.sum(0)
            elif step == "copy":
                pool.copy_(other)
            elif step == "scale":
                x.mul_(0.5)
            else:
                value = value + read(other)[slots]
        return value + seen + x


@settings(max_examples=12)
@given(st.lists(st.sampled_from(STEPS), min_size=3, max_size=7))
def test_any_order_of_steps(dsv4: Callable[..., Any], steps: list[str]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    program = Program(steps)
    with torch.no_grad():
        assert_equals_eager(dsv4(program), program, arguments())
