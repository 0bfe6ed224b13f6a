"""The Triton indexer against its reference: exact choices where scores tie or sums are exact, near-ties elsewhere."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.targets import Target, get_target
from dscompile.templates.triton.index_topk import TEMPLATES
from dscompile.templates.triton.record import Config, config
from support.kernels import named, parameters, reference, runs, spec_of
from support.triton_interpreter import count_traffic

TOPK, BLOCKS = TEMPLATES
SM90 = get_target("sm_90a")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP4 = "fp4_g32_ue8m0"


def shape(splits: int = 1, tokens: int = 1, rows: int = 16) -> Config:
    return config(4, 1, TOKENS=tokens, BLOCK_N=rows, SPLITS=splits)


CONFIGS = (shape(), shape(splits=3), shape(tokens=2, splits=2), shape(tokens=4, rows=32))


def case(
    batch: int, tokens: int, heads: int, dim: int, rows: int, dtype: torch.dtype, name: str = "none", low: int = -2
) -> list[Tensor]:
    """Small integers: every sum is exact, so ties are ties in every order of summation."""
    q = torch.randint(low, 3, (batch, tokens, heads, dim)).to(dtype)
    keys = torch.randint(low, 3, (batch, rows, dim)).to(dtype)
    keys = keys if name == "none" else FORMATS[name].pack(keys)
    weights = torch.randint(-2, 4, (batch, tokens, heads)).to(dtype)
    return [q, keys, weights, torch.randint(-2, rows + 3, (batch, tokens))]


def choose(*args: Any, chosen: Config = CONFIGS[0], target: Target = SM90) -> Tensor:
    assert TOPK.applies(named(TOPK, args)) is None
    return TOPK.fn(*args, config=chosen, target=target)


def both(*args: Any, chosen: Config = CONFIGS[0]) -> tuple[Tensor, Tensor]:
    assert BLOCKS.applies(named(BLOCKS, args)) is None
    return BLOCKS.fn(*args, config=chosen, target=SM90)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_takes_the_arguments_of_its_op(template: Any) -> None:
    assert parameters(template) == [argument.name for argument in spec_of(template).op._schema.arguments]


@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data())
def test_choices_are_exact(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    name = data.draw(st.sampled_from(["none", FP4, "fp8_g32_ue8m0", "bf16"]))
    dim = data.draw(st.sampled_from([8, 24] if name == "none" else [32, 64]))
    rows, tokens = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 3))
    parts = case(data.draw(st.integers(1, 2)), tokens, data.draw(st.integers(1, 5)), dim, rows,
                 data.draw(st.sampled_from(DTYPES)), name)  # fmt: skip
    k, chosen = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(CONFIGS))
    ascending, newest = data.draw(st.booleans()), data.draw(st.booleans())
    candidates = torch.rand(parts[0].shape[0], tokens, rows) < 0.5 if data.draw(st.booleans()) else None
    args = (*parts, candidates, k, 0.125, name, ascending, newest)
    assert torch.equal(choose(*args, chosen=chosen), reference(TOPK, *args))
    size, keep = data.draw(st.sampled_from([1, 2, 8, 16])), data.draw(st.integers(1, 12))
    args = (*parts, k, 0.125, name, ascending, keep, size, newest)
    for got, want in zip(both(*args, chosen=chosen), reference(BLOCKS, *args)):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_all_scores_equal() -> None:
    """Case R11: thousands tie at zero, few are positive; exactly k distinct picks, the lowest indices among equals."""
    rows, k = 500, 128
    q, keys = torch.ones(1, 1, 2, 32).bfloat16(), torch.zeros(1, rows, 32).bfloat16()
    good = torch.randperm(rows)[:60].sort().values
    keys[0, good] = 1
    weights, visible = torch.ones(1, 1, 2).bfloat16(), torch.tensor([[rows]])
    rest = torch.tensor([i for i in range(rows) if i not in set(good.tolist())])
    for chosen in (shape(rows=64), shape(splits=2, rows=32)):
        ascending = choose(q, keys, weights, visible, None, k, 1.0, "none", True, chosen=chosen)[0, 0]
        assert torch.equal(ascending, torch.cat((good, rest[: k - 60])).sort().values)
        falling = choose(q, keys, weights, visible, None, k, 1.0, "none", False, chosen=chosen)[0, 0]
        assert torch.equal(falling, torch.cat((good, rest[: k - 60])))
        none = choose(q, keys, weights * 0, visible, None, 4, 1.0, "none", True, True, chosen=chosen)[0, 0]
        assert none.tolist() == [rows - 4, rows - 3, rows - 2, rows - 1]


def test_lists_are_merged_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dscompile.templates.triton.index_topk.LARGEST_MERGE", 32)
    parts = case(1, 1, 2, 8, 150, torch.float32)
    parts[3] = torch.tensor([[140]])
    for ascending in (False, True):
        args = (*parts, None, 10, 1.0, "none", ascending)
        assert torch.equal(choose(*args, chosen=shape(splits=3)), reference(TOPK, *args))


@pytest.mark.parametrize("chosen", CONFIGS, ids=str)
def test_rising_scores_fill_the_buffer_again_and_again(chosen: Config) -> None:
    q = torch.ones(1, 2, 1, 16)
    keys = torch.arange(130.0).view(1, 130, 1).expand(1, 130, 16) / 16
    for k, sign in ((5, 1.0), (20, -1.0)):
        args = (q, keys, torch.full((1, 2, 1), sign), torch.tensor([[130, 77]]), None, k, 1.0, "none", False)
        assert torch.equal(choose(*args, chosen=chosen), reference(TOPK, *args))


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_no_row_of_the_future(ratio: int) -> None:
    """Case R10: a row is chosen only if all its tokens are at or before the query, also in the middle of a sequence."""
    start, tokens, rows = 13, 9, 24
    pos = torch.arange(start, start + tokens)[None]
    q, keys, weights, _ = case(1, tokens, 4, 16, rows, torch.float32)
    keys[:, (start + tokens) // ratio :] = torch.nan
    for chosen in CONFIGS[1:3]:
        out = choose(q, keys, weights, (pos + 1) // ratio, None, 64, 1.0, "none", True, chosen=chosen)
        for t in range(tokens):
            want = [j for j in range(rows) if (j + 1) * ratio <= start + t + 1]
            assert out[0, t].tolist() == want + [-1] * (rows - len(want))


def test_how_many_are_valid() -> None:
    """Case R12: min((pos + 1) // 4, k) for every token of a step of several."""
    q, keys, weights, _ = case(1, 4, 4, 16, 4, torch.float32)
    visible = (torch.tensor([[5, 6, 7, 8]]) + 1) // 4
    for chosen in CONFIGS:
        out = choose(q, keys, weights, visible, None, 2, 1.0, "none", True, chosen=chosen)
        assert (out >= 0).sum(-1).tolist() == [[1, 1, 2, 2]]


@pytest.mark.parametrize("lengths", [[9, 0, -1, 1], [0] * 32, [0] * 33, [-(2**40), 2**40]], ids=str)
def test_lengths_of_padded_batches(lengths: list[int]) -> None:
    """Case R13: without a length only -1 and no candidates, and the live rows are those of a run of their own."""
    count = len(lengths)
    q, keys, weights, _ = case(count, 1, 4, 32, 9, torch.bfloat16)
    dead = [b for b in range(count) if lengths[b] <= 0]
    q[dead], keys[dead] = torch.nan, torch.nan
    visible = torch.tensor(lengths)[:, None]
    for chosen in CONFIGS[1:2]:
        out, marks = both(q, keys, weights, visible, 4, 1.0, "none", True, 2, 4, chosen=chosen)
        assert (out[dead] == -1).all() and not marks[dead].any()
        for b in set(range(count)) - set(dead):
            one = slice(b, b + 1)
            alone = both(q[one], keys[one], weights[one], visible[one], 4, 1.0, "none", True, 2, 4, chosen=chosen)
            assert torch.equal(alone[0][0], out[b]) and torch.equal(alone[1][0], marks[b])


@pytest.mark.parametrize("chosen", CONFIGS, ids=str)
def test_rows_that_are_not_visible_may_hold_anything(chosen: Config) -> None:
    name = "none" if chosen["SPLITS"] == 1 else FP4
    junk = torch.nan if name == "none" else 0xFF
    q, keys, weights, _ = case(1, 6, 3, 32, 70, torch.bfloat16, name)
    visible, candidates = torch.tensor([[5, 20, 33, 40, 41, 60]]), torch.rand(1, 6, 70) < 0.6
    candidates[:, :, 7] = False
    args = (weights, visible, candidates, 9, 1.0, name, True)
    clean = choose(q, keys, *args, chosen=chosen)
    keys[:, [7, *range(60, 70)]] = junk
    assert torch.equal(choose(q, keys, *args, chosen=chosen), clean)
    keys[:, 33:60] = junk  # rows that only later tokens see
    assert torch.equal(choose(q, keys, *args, chosen=chosen)[:, :3], clean[:, :3])


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_scores_that_are_no_number_or_infinite(junk: float) -> None:
    q, keys, weights, _ = case(1, 2, 3, 32, 40, torch.float32, low=1)
    keys[:, [11, 30]] = junk
    for sign, newest, chosen in ((1.0, False, CONFIGS[1]), (-1.0, True, CONFIGS[2])):
        args = (q, keys, weights.abs() * sign + sign, torch.tensor([[12, 40]]), 5, 1.0, "none", False, 3, 4, newest)
        assert all(map(torch.equal, both(*args, chosen=chosen), reference(BLOCKS, *args)))


def assert_near(got: Tensor, scores: Tensor, visible: Tensor, slack: float) -> None:
    """got [k]: distinct visible rows, none worse than one left out by more than `slack`. scores: float64."""
    count = max(0, min(int(visible), len(scores)))
    picked = got[got >= 0]
    assert len(picked) == min(count, len(got)) and len(set(picked.tolist())) == len(picked)
    assert (picked < count).all() and (got[len(picked) :] == -1).all()
    left = torch.ones(len(scores), dtype=torch.bool)
    left[picked], left[count:] = False, False
    if len(picked) and left.any():
        assert scores[picked].min() >= scores[left].max() - slack


@pytest.mark.parametrize(("dtype", "name"), itertools.product(DTYPES, ["none", FP4]))
def test_random_scores_are_the_best_but_for_near_ties(dtype: torch.dtype, name: str) -> None:
    q, keys = torch.randn(1, 3, 32, 64).to(dtype), torch.randn(1, 200, 64).to(dtype)
    weights, visible = torch.randn(1, 3, 32), torch.tensor([[200, 30, 133]])
    stored = keys if name == "none" else FORMATS[name].pack(keys)
    read = keys if name == "none" else FORMATS[name].unpack(stored, 64)
    products = torch.einsum("bthd,bsd->bths", q.double(), read.double())
    scores = (products.clamp_min(0) * 0.1 * weights.double().unsqueeze(-1)).sum(2)
    # fp32 sums of 64 products and of 32 heads, each within its length times the unit of its absolute sum
    size = torch.einsum("bthd,bsd->bths", q.double().abs(), read.double().abs()) * 0.1 * weights.abs().unsqueeze(-1)
    slack = 2 * (64 + 32 + 3) * 2.0**-24 * float(size.sum(2).max())
    for chosen in CONFIGS[2:]:
        out = choose(q, stored, weights, visible, None, 40, 0.1, name, True, chosen=chosen)
        for t in range(3):
            assert_near(out[0, t], scores[0, t], visible[0, t], slack)


def test_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More candidate blocks than a program holds at a time."""
    monkeypatch.setattr("dscompile.templates.triton.index_topk.HELD_BLOCKS", 16)
    monkeypatch.setattr("dscompile.templates.triton.index_topk.MASK_ROWS", 64)
    parts = case(1, 1, 2, 8, 150, torch.float32)
    parts[3] = torch.tensor([[147]])
    for keep in (7, 100):
        args = (*parts, 4, 1.0, "none", True, keep, 4, keep == 7)
        assert torch.equal(both(*args)[1], reference(BLOCKS, *args)[1])


def test_strides_and_dtypes() -> None:
    q, keys, weights, visible = case(2, 2, 4, 32, 40, torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    keys = torch.cat((keys, keys), 2)[:, :, :32]
    weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    marks = torch.rand(2, 40, 2).transpose(1, 2) < 0.5
    for args in (
        (q, keys, weights.float(), visible.int(), None),
        (q, keys.float(), weights, visible, marks),
        (q.float(), keys, weights, visible.repeat(1, 2)[:, ::2], None),
        (q.half(), keys.half(), weights, visible, None),
    ):
        tail = (7, 0.5, "none", False)
        assert torch.equal(choose(*args, *tail, chosen=CONFIGS[1]), reference(TOPK, *args, *tail))


@pytest.mark.parametrize("empty", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_nothing_to_do(empty: tuple[int, int, int]) -> None:
    batch, tokens, rows = empty
    parts = case(batch, tokens, 2, 8, rows, torch.float32)
    out, marks = both(*parts, 4, 1.0, "none", True, 2, 4)
    assert out.shape == (batch, tokens, min(4, rows)) and marks.shape == (batch, tokens, rows)
    assert choose(*parts, None, 4, 1.0, "none", True).shape == out.shape


def test_the_configs_of_the_templates(target: Target) -> None:
    parts = case(1, 2, 4, 32, 150, torch.bfloat16, FP4)
    args = (*parts, None, 20, 0.5, FP4, True)
    for got in runs(TOPK, args, target):
        assert torch.equal(got, reference(TOPK, *args))
    args = (*parts, 20, 0.5, FP4, False, 5, 8)
    for got in runs(BLOCKS, args, target):
        assert all(map(torch.equal, got, reference(BLOCKS, *args)))


def test_bytes() -> None:
    """Keys are read once, and scores are never written: what is stored beside the result are the entries kept."""
    rows, k = 512, 16
    parts = case(1, 1, 4, 32, rows, torch.bfloat16, FP4)
    parts[0], parts[3] = torch.randn(1, 1, 4, 32).bfloat16(), torch.tensor([[rows]])
    args = (*parts, None, k, 1.0, FP4, True)
    cost = spec_of(TOPK).cost_of(*args).numbers()
    with count_traffic() as traffic:
        choose(*args, chosen=shape(rows=16))
    buffer = 2 * k * 8
    assert traffic.distinct_stored <= cost["write_bytes"] + buffer
    assert traffic.distinct_loaded <= 1.05 * (cost["read_bytes"] + buffer)
    assert traffic.stored < rows * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 4000}, "top_k of 4000"),
        ({"block_size": 3}, "3 rows"),
        ({"q": torch.empty(1, 1, 300, 8)}, "300 heads"),
    ],
)
def test_refuses(change: dict[str, Any], words: str) -> None:
    meta = {"q": torch.empty(1, 1, 2, 8), "keys": torch.empty(1, 5000, 8), "top_k": 4, "key_format": "none",
            "block_size": 8}  # fmt: skip
    assert BLOCKS.applies(meta) is None
    assert words in str(BLOCKS.applies(meta | change))
