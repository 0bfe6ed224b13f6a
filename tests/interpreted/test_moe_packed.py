"""The Triton mixture of experts on stored weights against its reference: formats and forms, skipped pairs, bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.moe_packed import TEMPLATES
from support.kernels import reference, runs, space
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E2M1, E4M3 = "e2m1_1x32", "e4m3_32x32"
KINDS = [E2M1, E4M3]
NONE = (None, None, None)


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Case R18: what nobody wrote is NaN, in integers the largest value."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case(
    n: int, k: int, e: int, kind: str, size: int = 64, inner: int = 32, shared: int = 32, dtype: torch.dtype = BF16
) -> list[Any]:
    def stored(kind: str, *shape: int) -> tuple[Tensor, Tensor]:
        *lead, rows, columns = shape
        low = 127 - int(columns.bit_length())
        if kind == E2M1:
            scale = torch.randint(low, low + 3, (*lead, rows, columns // 32))
            return torch.randint(0, 256, (*lead, rows, columns // 2)).byte(), scale.byte()
        scale = torch.randint(low, low + 3, (*lead, rows // 32, columns // 32))
        return torch.randn(shape).to(torch.float8_e4m3fn).view(torch.uint8), scale.byte()

    x, indices, weights = torch.randn(n, size), torch.randint(0, e, (n, k)), torch.rand(n, k)
    own = (*stored(E4M3, shared, size), *stored(E4M3, shared, size), *stored(E4M3, size, shared))
    return [x.to(dtype), indices, weights, *stored(kind, e, 2 * inner, size), *stored(kind, e, size, inner), *own]


def streams_of(n: int, count: int, size: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, count, size).to(kind), torch.rand(n, count), torch.rand(n, count, count)


def close(got: Tensor, want: Tensor) -> None:
    """Sums of exact products, in another order: nearly always the same after rounding to bf16. Where gate, up or act
    falls the other way, one value that enters the down projection moves by a step of E4M3, 1/8 of itself at most."""
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).abs()
    assert (error <= 0.1 * want.double().abs().amax(-1, keepdim=True) + 1e-6).all()
    assert (error <= 2 * torch.finfo(BF16).eps * want.double().abs() + 1e-6).double().mean() > 0.8


@settings(max_examples=14)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    n, k, e = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    kind, name = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(["sm_90a", "sm_103a"]))
    widths = st.sampled_from([(64, 32, 32), (96, 160, 64), (128, 128, 128), (160, 32, 96)])
    size, inner, shared = data.draw(widths)
    dtype, streams = data.draw(st.sampled_from([BF16, FP16])), data.draw(st.sampled_from([0, 1, 4]))
    limit, routed = data.draw(st.sampled_from([10.0, 0.7, 0.0])), data.draw(st.sampled_from([FP32, dtype]))
    torch.manual_seed(n * k * e)
    x, _, weights, *stored = case(n, k, e, kind, size, inner, shared, dtype)
    flat = data.draw(st.lists(st.integers(-1, e - 1), min_size=n * k, max_size=n * k))
    indices = torch.tensor(flat).view(n, k)
    weights[indices < 0] = float("nan")
    given_streams = streams_of(n, streams, size, dtype) if streams else NONE
    args = (x, indices, weights, *stored, limit, kind, routed, *given_streams, data.draw(st.booleans()))
    got = next(runs(TEMPLATE, args, get_target(name), 1))
    close(got, reference(TEMPLATE, *args))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: str, target: Target) -> None:
    args = (*case(0, 2, 3, kind), 10.0, kind, FP32, *streams_of(0, 4, 64, BF16), True)
    assert next(runs(TEMPLATE, args, target, 1)).shape == (0, 4, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_small_integers_are_exact(kind: str, target: Target) -> None:
    """No sum is rounded, no clamp, the shared expert alone: only silu may differ, and only in the last bit of bf16."""
    args = case(5, 1, 1, kind)
    args[1][:] = -1
    args[0] = torch.randint(-3, 4, args[0].shape).to(BF16)
    for place in (7, 9):
        args[place] = torch.randint(-2, 3, args[place].shape).float().to(torch.float8_e4m3fn)
        args[place + 1][:] = 124
    call = (*args, 0.0, kind, FP32, *NONE, True)
    got, want = next(runs(TEMPLATE, call, target, 1)), reference(TEMPLATE, *call)
    close(got, want)
    assert (got == want).double().mean() > 0.5


@pytest.mark.parametrize("tokens", [1, 7, 9])
def test_unwritten_memory_never_shows(tokens: int, unwritten_is_nan: None, target: Target) -> None:
    """Case R18: repeats are bitwise equal; experts without a token, whose scales are NaN, add exactly 0."""
    args = case(tokens, 2, 8, E2M1)
    args[1] %= 5
    args[1][-1] = -1
    args[4][5:], args[6][5:] = 255, 255
    call = (*args, 10.0, E2M1, FP32, *NONE, True)
    results = [next(runs(TEMPLATE, call, target, 1)) for _ in range(2)]
    close(results[0], reference(TEMPLATE, *call))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_size(kind: str, target: Target) -> None:
    """All tokens on one expert, and the shared one, fill more than one tile of 16."""
    args = (*case(20, 2, 2, kind, 96, 64, 96), 10.0, kind, FP32, *streams_of(20, 2, 96, BF16), True)
    args[1][:] = 1
    want = reference(TEMPLATE, *args)
    sizes = {c["BLOCK_T"]: c for c in space(TEMPLATE, args, target)}
    assert sizes.keys() >= {16, 32, 64}
    for config in sizes.values():
        close(TEMPLATE.fn(*args, config=config, target=target), want)


def test_an_index_out_of_range_is_skipped(unwritten_is_nan: None) -> None:
    args = case(6, 3, 4, E2M1)
    skipped, wild = args[1].clone(), args[1].clone()
    skipped[:, 1], wild[:, 1] = -1, torch.tensor([4, -2, 2**31, -(2**31), 2**32 + 1, 2**40])
    rest, target = (10.0, E2M1, FP32, *NONE, True), get_target("sm_103a")
    got = [next(runs(TEMPLATE, (args[0], i, *args[2:], *rest), target, 1)) for i in (skipped, wild)]
    assert torch.equal(*got)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes(kind: str, target: Target) -> None:
    """Codes and scales of the experts that got a token and of the shared one, once; tokens and streams once."""
    args, given_streams = case(8, 2, 9, kind, 128, 128, 128), streams_of(8, 4, 128, BF16)
    args[1] = torch.tensor([[0, 3], [3, 5], [5, 0], [0, 5], [3, 0], [5, 3], [0, 3], [3, 5]])
    with count_traffic() as traffic:
        next(runs(TEMPLATE, (*args, 10.0, kind, FP32, *given_streams, True), target, 1))
    whole = [*args[:3], *args[7:], *given_streams]
    inputs = sum(t.nbytes for t in whole) + 3 * sum(t[0].nbytes for t in args[3:7])
    assert len(traffic._read - traffic._written) == inputs


def test_refuses() -> None:
    args: dict[str, Any] = {
        "x": torch.empty(1, 32), "w13": torch.empty(4, 64, 16), "indices": torch.empty(1, 2), "routed_dtype": FP32,
        "shared_gate": torch.empty(32, 32), "streams": None,
    }  # fmt: skip
    assert TEMPLATE.applies(args) is None
    for change, shown in (
        ({"w13": torch.empty(5000, 64, 16, device="meta")}, "5000"),
        ({"shared_gate": torch.empty(0, 32)}, "no inner values"),
        ({"streams": torch.empty(1, 9, 32)}, "9 streams"),
    ):
        refusal = TEMPLATE.applies({**args, **change})
        assert refusal is not None and shown in refusal
