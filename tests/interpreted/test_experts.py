"""The Triton experts against their reference: any routing, skipped pairs, memory that nobody wrote, bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.targets import Target, get_target
from dscompile.templates.triton import expert_sort
from dscompile.templates.triton.experts import TEMPLATES
from support.kernels import reference, runs, space
from support.triton_interpreter import count_traffic

(TEMPLATE,) = TEMPLATES
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SM103 = get_target("sm_103a")


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Case R18: what nobody wrote is NaN, in integers the largest value."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def case(n: int, k: int, e: int, size: int = 40, inner: int = 12, kind: torch.dtype = FP32) -> tuple[Tensor, ...]:
    x, indices, weights = torch.randn(n, size), torch.randint(0, e, (n, k)), torch.rand(n, k)
    w13, w2 = torch.randn(e, 2 * inner, size) * size**-0.5, torch.randn(e, size, inner) * inner**-0.5
    return x.to(kind), indices, weights, w13.to(kind), w2.to(kind)


def magnitude(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """float64 [N, D]: what the roundings are relative to: sums of absolute values, |silu(gate) up| <= |gate up|."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for n in range(x.shape[0]):
        for j, e in enumerate(indices[n].tolist()):
            if 0 <= e < w13.shape[0]:
                gate, up = F.linear(x[n].double(), w13[e].double()).abs().chunk(2)
                out[n] += F.linear(gate * up * weights[n, j].double(), w2[e].double().abs())
    return out


def close(got: Tensor, want: Tensor, args: tuple[Any, ...]) -> None:
    """Each rounding may fall the other way when a sum in front of it ran in another order: of gate, up, silu, their
    product, the weighted product, the down projection, the sum. The derivative of silu is below 1.1."""
    eps = max(torch.finfo(kind).eps for kind in (args[0].dtype, want.dtype))
    bound = 8 * eps * magnitude(*args[:5]) + 1e-6
    assert got.dtype == want.dtype and got.shape == want.shape
    assert ((got.double() - want.double()).abs() <= bound).all()


@settings(max_examples=25)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Empty experts, a crowded one, an expert twice in a token, pairs without an expert, no tokens at all."""
    n, k, e = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    kind, weight_kind = data.draw(st.sampled_from([FP32, BF16, FP16])), data.draw(st.sampled_from([FP32, BF16]))
    out_kind, before = data.draw(st.sampled_from([FP32, kind])), data.draw(st.booleans())
    limit = data.draw(st.sampled_from([10.0, 0.7, 0.0, float("inf")]))
    size, inner = data.draw(st.sampled_from([(16, 16), (40, 12), (96, 33)]))
    torch.manual_seed(n * k * e)
    x, _, weights, w13, w2 = case(n, k, e, size, inner, kind)
    weights = weights.to(weight_kind if before or kind == FP32 else data.draw(st.sampled_from([FP32, kind])))
    flat = data.draw(st.lists(st.integers(-1, e - 1), min_size=n * k, max_size=n * k))
    indices = torch.tensor(flat, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))).view(n, k)
    weights[indices < 0] = float("nan")
    args = (x, indices, weights, w13, w2, limit, before, out_kind)
    want = reference(TEMPLATE, *args)
    for got in runs(TEMPLATE, args, SM103, 1):
        close(got, want, args)
        assert (got[(indices < 0).all(-1)] == 0).all()


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", [BF16, FP32])
def test_every_tile_size(block: int, kind: torch.dtype, target: Target) -> None:
    """One crowded expert fills more than one tile of 16 and 32."""
    args = (*case(50, 2, 3, kind=kind), 10.0, True, FP32)
    args[1][:, 0] = 1
    want = reference(TEMPLATE, *args)
    configs = [c for c in space(TEMPLATE, args, target) if c["BLOCK_T"] == block]
    if kind == BF16:
        assert configs
    for config in configs[:1]:
        close(TEMPLATE.fn(*args, config=config, target=target), want, args)


@pytest.mark.parametrize("tokens", [1, 2, 7, 9])
def test_unwritten_memory_never_shows(tokens: int, unwritten_is_nan: None) -> None:
    """Case R18: repeats are bitwise equal; experts without a token, whose weights are NaN, add exactly 0."""
    x, indices, weights, w13, w2 = case(tokens, 2, 8, kind=BF16)
    indices = indices % 5
    indices[-1] = -1
    w13[5:], w2[5:] = float("nan"), float("nan")
    for before in (True, False):
        args = (x, indices, weights, w13, w2, 10.0, before, BF16)
        want = reference(TEMPLATE, *args)
        results = [next(runs(TEMPLATE, args, SM103, 1)) for _ in range(3)]
        close(results[0], want, args)
        assert all(torch.equal(result, results[0]) for result in results)
        assert (results[0][-1] == 0).all()


def test_an_index_out_of_range_is_skipped(unwritten_is_nan: None) -> None:
    args = (*case(6, 3, 4), 10.0, True, FP32)
    far = torch.tensor([4, -2, 2**31, -(2**31), 2**32 + 1, 2**40])
    skipped, wild = args[1].clone(), args[1].clone()
    skipped[:, 1], wild[:, 1] = -1, far
    want = next(runs(TEMPLATE, (args[0], skipped, *args[2:]), SM103, 1))
    assert torch.equal(next(runs(TEMPLATE, (args[0], wild, *args[2:]), SM103, 1)), want)
    close(want, reference(TEMPLATE, args[0], skipped, *args[2:]), (args[0], skipped, *args[2:]))


def test_a_nan_token_stays_where_it_is() -> None:
    x, _, weights, w13, w2 = case(5, 2, 6)
    indices = torch.tensor([[0, 1], [1, 2], [3, 0], [4, 4], [2, 1]])
    clean = next(runs(TEMPLATE, (x, indices, weights, w13, w2, 10.0, True, FP32), SM103, 1))
    x[3] = float("nan")
    got = next(runs(TEMPLATE, (x, indices, weights, w13, w2, 10.0, True, FP32), SM103, 1))
    keep = [0, 1, 2, 4]
    assert torch.equal(got[keep], clean[keep]) and got[3].isnan().all()


def test_strided_arguments() -> None:
    x, indices, weights, w13, w2 = case(5, 2, 3)
    args = (x, indices, weights, w13, w2, 10.0, True, FP32)

    def spread(t: Tensor) -> Tensor:
        return t.new_zeros([2 * s for s in t.shape])[tuple(slice(None, None, 2) for _ in t.shape)].copy_(t)

    wide = [torch.cat((t, t), -1)[..., : t.shape[-1]] for t in (x, w13, w2)]
    want = next(runs(TEMPLATE, args, SM103, 1))
    for given_args in ([spread(t) for t in args[:5]], [wide[0], indices, weights.T.contiguous().T, *wide[1:]]):
        assert torch.equal(next(runs(TEMPLATE, (*given_args, 10.0, True, FP32), SM103, 1)), want)


@pytest.mark.parametrize("few", [True, False])
@settings(max_examples=10)
@given(st.integers(0, 700), st.integers(1, 40), st.sampled_from([1, 16, 128]))
def test_pairs_sorted_by_expert(few: bool, pairs: int, experts: int, tile: int) -> None:
    """Both forms: stable, and tiles that cover every pair with an expert once."""
    torch.manual_seed(pairs)
    indices = torch.randint(-2, experts + 1, (pairs, 1))
    kept = expert_sort.FEW
    expert_sort.FEW = 10**6 if few else 0
    try:
        rows, tiles = expert_sort.sort_pairs(indices, experts, tile)
    finally:
        expert_sort.FEW = kept
    flat = indices.flatten()
    inside = (flat >= 0) & (flat < experts)
    order = torch.sort(torch.where(inside, flat, experts), stable=True).indices[: int(inside.sum())]
    assert torch.equal(rows[: len(order)].long(), order)
    used = tiles[:, tiles[0] >= 0]
    assert (tiles[0, used.shape[1] :] == -1).all()
    covered: list[int] = []
    for expert, begin, end in used.T.tolist():
        assert 0 < end - begin <= tile and (flat[rows[begin:end].long()] == expert).all()
        covered += range(begin, end)
    assert covered == list(range(len(order)))


def test_bytes() -> None:
    """Weights of the experts that got a token, once; the tokens once; nothing of the others."""
    x, _, weights, w13, w2 = case(8, 2, 9, 128, 64, BF16)
    indices = torch.tensor([[0, 3], [3, 5], [5, 0], [0, 5], [3, 0], [5, 3], [0, 3], [3, 5]])
    with count_traffic() as traffic:
        next(runs(TEMPLATE, (x, indices, weights, w13, w2, 10.0, True, BF16), SM103, 1))
    inputs = x.nbytes + indices.nbytes + weights.nbytes + 3 * (w13[0].nbytes + w2[0].nbytes)
    assert len(traffic._read - traffic._written) == inputs
    between = 16 * (64 + 128) * 2  # activations and results of the 16 pairs
    assert traffic.distinct_stored - x.nbytes - between <= 16 * 4 + 3 * 9 * 4


def test_refuses() -> None:
    args = {"x": torch.empty(1, 8), "indices": torch.empty(1, 2), "w13": torch.empty(5000, 2, 8, device="meta")}
    refusal = TEMPLATE.applies({**args, "w2": torch.empty(5000, 8, 1, device="meta")})
    assert refusal is not None and "5000" in refusal
    refusal = TEMPLATE.applies({**args, "w13": torch.empty(4, 0, 8), "w2": torch.empty(4, 8, 0)})
    assert refusal is not None and "(8, 0, 2)" in refusal
