"""The Triton mixture of experts against its reference: any routing, both roundings, streams or none, bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton.moe import TEMPLATES
from support.kernels import reference, runs, space
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SM103 = get_target("sm_103a")
NONE = (None, None, None)


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Case R18: what nobody wrote is NaN, in integers the largest value."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case(
    n: int, k: int, e: int, size: int = 40, inner: int = 12, shared: int = 12, kind: torch.dtype = FP32
) -> list[Any]:
    x, indices, weights = torch.randn(n, size), torch.randint(0, e, (n, k)), torch.rand(n, k)
    stacks = torch.randn(e, 2 * inner, size) * size**-0.5, torch.randn(e, size, inner) * inner**-0.5
    own = [torch.randn(shared, size) * size**-0.5 for _ in range(2)]
    own.append(torch.randn(size, shared) * shared**-0.5)
    return [x.to(kind), indices, weights, *(t.to(kind) for t in (*stacks, *own))]


def streams_of(n: int, count: int, size: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, count, size).to(kind), torch.rand(n, count), torch.rand(n, count, count)


def close(got: Tensor, want: Tensor, args: tuple[Any, ...]) -> None:
    """As for the experts: each of the roundings may fall the other way when a sum in front of it ran in another order.
    Relative to sums of absolute values, |silu(gate) up| <= |gate up|; 8 roundings, 4 more on the way back."""
    x, indices, weights, w13, w2, *own = (t.double() if t.is_floating_point() else t for t in args[:8])
    scale = F.linear(F.linear(x, own[0]).abs() * F.linear(x, own[1]).abs(), own[2].abs())
    for n in range(x.shape[0]):
        for j, e in enumerate(indices[n].tolist()):
            if e >= 0:
                gate, up = F.linear(x[n], w13[e]).abs().chunk(2)
                scale[n] += F.linear(gate * up * weights[n, j], w2[e].abs())
    streams, post, comb = args[11:14]
    if streams is not None:
        mixed = torch.einsum("nij,nid->njd", comb.double().abs(), streams.double().abs())
        scale = post.double().abs()[..., None] * scale[:, None] + mixed
    eps = max(torch.finfo(kind).eps for kind in (args[0].dtype, want.dtype))
    assert got.dtype == want.dtype and got.shape == want.shape
    assert ((got.double() - want.double()).abs() <= 12 * eps * scale + 1e-6).all()


@settings(max_examples=12)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Empty experts, a crowded one, an expert twice in a token, pairs without an expert, no tokens at all."""
    n, k, e = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    kind, before = data.draw(st.sampled_from([FP32, BF16, FP16])), data.draw(st.booleans())
    routed = data.draw(st.sampled_from([FP32, kind]))
    limit = data.draw(st.sampled_from([10.0, 0.7, 0.0, float("inf")]))
    size, inner, shared = data.draw(
        st.sampled_from([(16, 16, 16), (40, 12, 12), (96, 33, 33), (40, 12, 24), (24, 30, 7)])
    )
    streams, fp32 = data.draw(st.sampled_from([0, 1, 3, 4])), data.draw(st.booleans())
    torch.manual_seed(n * k * e)
    x, _, weights, *dense = case(n, k, e, size, inner, shared, kind)
    weights = weights.to(data.draw(st.sampled_from([FP32, kind])))
    flat = data.draw(st.lists(st.integers(-1, e - 1), min_size=n * k, max_size=n * k))
    indices = torch.tensor(flat, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))).view(n, k)
    weights[indices < 0] = 0
    given_streams = streams_of(n, streams, size, kind) if streams else NONE
    args = (x, indices, weights, *dense, limit, before, routed, *given_streams, fp32)
    want = reference(TEMPLATE, *args)
    for got in runs(TEMPLATE, args, SM103, 1):
        close(got, want, args)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", [BF16, FP32])
def test_every_tile_size(block: int, kind: torch.dtype, target: Target) -> None:
    """All tokens on one expert, and the shared one, fill more than one tile of 16 and 32."""
    args = (*case(50, 2, 3, kind=kind), 10.0, True, FP32, *streams_of(50, 4, 40, kind), True)
    args[1][:] = 1
    want = reference(TEMPLATE, *args)
    configs = [c for c in space(TEMPLATE, args, target) if c["BLOCK_T"] == block and "TMA" not in dict(c.constants)]
    if kind == BF16:
        assert configs
    for config in configs[:1]:
        close(TEMPLATE.fn(*args, config=config, target=target), want, args)


@pytest.mark.parametrize(("name", "block"), [("sm_90a", 128), ("sm_103a", 64)])
def test_copies_by_descriptor(name: str, block: int) -> None:
    """Tiles that end inside of an expert, rows and columns that end inside of a tile; unaligned rows run without."""
    args = (*case(70, 2, 2, 88, 72, 72, BF16), 10.0, True, FP32, *streams_of(70, 2, 88, BF16), True)
    args[1][:7], args[1][7:9] = 1, -1
    want = reference(TEMPLATE, *args)
    found = [c for c in space(TEMPLATE, args, get_target(name)) if "TMA" in dict(c.constants)]
    (config,) = [c for c in found if c["BLOCK_T"] == block]
    close(TEMPLATE.fn(*args, config=config, target=get_target(name)), want, args)
    odd = torch.cat((args[0], args[0]), 1)[:, 1:89]
    shifted = (odd, *args[1:])
    close(TEMPLATE.fn(*shifted, config=config, target=get_target(name)), reference(TEMPLATE, *shifted), shifted)


@pytest.mark.parametrize("fp32", [True, False])
def test_the_way_back_is_that_of_its_own_operation(fp32: bool) -> None:
    """Bit for bit what `hc_post` makes of the result without streams, up to a sum of four in another order."""
    args, given_streams = case(9, 2, 4, kind=BF16), streams_of(9, 4, 40, BF16)
    rest = (10.0, True, FP32)
    y = next(runs(TEMPLATE, (*args, *rest, *NONE, True), SM103, 1))
    got = next(runs(TEMPLATE, (*args, *rest, *given_streams, fp32), SM103, 1))
    want = torch.ops.dsv4.hc_post(y, *given_streams, fp32)
    assert (got == want).double().mean() > 0.98
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("tokens", [1, 2, 7, 9])
def test_unwritten_memory_never_shows(tokens: int, unwritten_is_nan: None) -> None:
    """Case R18: repeats are bitwise equal; experts without a token, whose weights are NaN, add exactly 0. A token
    without an expert is left with the shared one; weights of skipped pairs are not looked at."""
    x, indices, weights, w13, w2, *own = case(tokens, 2, 8, kind=BF16)
    indices %= 5
    indices[-1], weights[-1] = -1, float("nan")
    w13[5:], w2[5:] = float("nan"), float("nan")
    for before in (True, False):
        args = (x, indices, weights, w13, w2, *own, 10.0, before, BF16, *NONE, True)
        want = reference(TEMPLATE, *args)
        results = [next(runs(TEMPLATE, args, SM103, 1)) for _ in range(3)]
        weights[-1] = 0
        close(results[0], want, args)
        assert all(torch.equal(result, results[0]) for result in results)


def test_an_index_out_of_range_is_skipped(unwritten_is_nan: None) -> None:
    args = (*case(6, 3, 4), 10.0, True, FP32, *streams_of(6, 2, 40, FP32), True)
    far = torch.tensor([4, -2, 2**31, -(2**31), 2**32 + 1, 2**40])
    skipped, wild = args[1].clone(), args[1].clone()
    skipped[:, 1], wild[:, 1] = -1, far
    want = next(runs(TEMPLATE, (args[0], skipped, *args[2:]), SM103, 1))
    assert torch.equal(next(runs(TEMPLATE, (args[0], wild, *args[2:]), SM103, 1)), want)
    close(want, reference(TEMPLATE, args[0], skipped, *args[2:]), (args[0], skipped, *args[2:]))


def test_a_nan_token_stays_where_it_is() -> None:
    args = (*case(5, 2, 6), 10.0, True, FP32, *streams_of(5, 2, 40, FP32), True)
    args[1][:] = torch.tensor([[0, 1], [1, 2], [3, 0], [4, 4], [2, 1]])
    clean = next(runs(TEMPLATE, args, SM103, 1))
    args[0][3] = float("nan")
    got = next(runs(TEMPLATE, args, SM103, 1))
    keep = [0, 1, 2, 4]
    assert torch.equal(got[keep], clean[keep]) and got[3].isnan().all()


def test_strided_arguments() -> None:
    args = (*case(5, 2, 3), 10.0, True, FP32, *streams_of(5, 3, 40, FP32), True)

    def spread(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.new_zeros([2 * s for s in t.shape])[tuple(slice(None, None, 2) for _ in t.shape)].copy_(t)

    def wide(t: Any) -> Any:
        return torch.cat((t, t), -1)[..., : t.shape[-1]] if isinstance(t, Tensor) else t

    want = next(runs(TEMPLATE, args, SM103, 1))
    for form in (spread, wide):
        assert torch.equal(next(runs(TEMPLATE, tuple(form(a) for a in args), SM103, 1)), want)


def test_bytes() -> None:
    """Weights of the experts that got a token and of the shared one, once; tokens and streams once; little between."""
    x, _, weights, w13, w2, *own = case(8, 2, 9, 128, 64, 64, BF16)
    indices = torch.tensor([[0, 3], [3, 5], [5, 0], [0, 5], [3, 0], [5, 3], [0, 3], [3, 5]])
    given_streams = streams_of(8, 4, 128, BF16)
    with count_traffic() as traffic:
        next(runs(TEMPLATE, (x, indices, weights, w13, w2, *own, 10.0, True, FP32, *given_streams, True), SM103, 1))
    inputs = [x, indices, weights, *own, *given_streams]
    assert len(traffic._read - traffic._written) == sum(t.nbytes for t in inputs) + 3 * (w13[0].nbytes + w2[0].nbytes)
    between = (16 + 8) * (64 + 128) * 2  # activations and results of 16 pairs and 8 tokens
    assert traffic.distinct_stored - given_streams[0].nbytes - between <= 16 * 4 + 3 * 9 * 4


def test_refuses() -> None:
    shapes = {"x": (1, 8), "indices": (1, 2), "w13": (4, 2, 8), "w2": (4, 8, 1), "shared_gate": (3, 8)}
    args: dict[str, Any] = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    args |= {"streams": None, "routed_dtype": FP32}
    assert TEMPLATE.applies(args) is None
    for change, shown in (
        ({"w13": torch.empty(5000, 2, 8, device="meta")}, "5000"),
        ({"shared_gate": torch.empty(0, 8)}, "no inner values"),
        ({"routed_dtype": BF16}, "torch.bfloat16, allowed: torch.float32"),
        ({"streams": torch.empty(1, 9, 8)}, "9 streams"),
    ):
        refusal = TEMPLATE.applies({**args, **change})
        assert refusal is not None and shown in refusal
