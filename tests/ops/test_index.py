"""Index top-k: visibility, ties, candidates, degenerate lengths."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401

index_topk = torch.ops.dsv4.index_topk
with_candidates = torch.ops.dsv4.index_topk_candidates


def scored(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, keys and head weights whose scores are exactly `scores` [B, T, S] (small integers): one head per sign."""
    batch, tokens, rows = scores.shape
    q = torch.stack((scores, -scores), 2)  # relu(q . e_j) is the positive, then the negative part
    return q, torch.eye(rows).expand(batch, rows, rows), torch.tensor([1.0, -1.0]).expand(batch, tokens, 2)


def best(row: list[float], visible: list[bool], k: int, newest: bool = False) -> list[int]:
    allowed = [j for j in range(len(row)) if visible[j]]
    return sorted(allowed, key=lambda j: (-row[j], -j if newest else j))[:k]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Scores with many ties, visible counts from below zero to beyond the end, candidates, k."""
    tokens, rows = draw(st.integers(0, 3)), draw(st.integers(0, 12))
    values = st.lists(st.integers(-2, 2), min_size=tokens * rows, max_size=tokens * rows)
    scores = torch.tensor(draw(values), dtype=torch.float32).view(1, tokens, rows)
    counts = draw(st.lists(st.integers(-3, rows + 2), min_size=tokens, max_size=tokens))
    marks = draw(st.lists(st.booleans(), min_size=tokens * rows, max_size=tokens * rows))
    visible, candidates = torch.tensor(counts, dtype=torch.int64).view(1, tokens), torch.tensor(marks, dtype=torch.bool)
    return scores, visible, candidates.view(1, tokens, rows), draw(st.integers(1, rows + 3))


@given(problems(), st.booleans(), st.booleans(), st.booleans())
def test_topk_equals_a_sort_in_python(problem: Any, masked: bool, ascending: bool, newest: bool) -> None:
    scores, n_visible, candidates, k = problem
    q, keys, weights = scored(scores)
    out = index_topk(q, keys, weights, n_visible, candidates if masked else None, k, 1.0, "none", ascending, newest)
    rows = scores.shape[2]
    assert out.shape == (1, scores.shape[1], min(k, rows)) and out.dtype == torch.int64
    for t in range(scores.shape[1]):
        seen = [j < int(n_visible[0, t]) and (not masked or bool(candidates[0, t, j])) for j in range(rows)]
        want = best(scores[0, t].tolist(), seen, k, newest)
        want = sorted(want) if ascending else want
        assert out[0, t].tolist() == want + [-1] * (min(k, rows) - len(want))


@given(problems(), st.integers(1, 4), st.integers(1, 5))
def test_candidates_are_the_best_blocks_and_the_newest(problem: Any, keep: int, size: int) -> None:
    scores, n_visible, _, k = problem
    q, keys, weights = scored(scores)
    out, candidates = with_candidates(q, keys, weights, n_visible, k, 1.0, "none", True, keep, size)
    assert torch.equal(out, index_topk(q, keys, weights, n_visible, None, k, 1.0, "none", True))
    rows = scores.shape[2]
    for t in range(scores.shape[1]):
        n = min(int(n_visible[0, t]), rows)
        blocks = [scores[0, t, s : min(s + size, n)].tolist() for s in range(0, max(n, 0), size)]
        level = [max(b) if i < len(blocks) - 1 else float("inf") for i, b in enumerate(blocks)]
        kept = best(level, [True] * len(blocks), keep)
        assert candidates[0, t].tolist() == [j // size in kept for j in range(rows)]


def test_the_newest_block_stays_when_more_rows_are_visible_than_there_are() -> None:
    q, keys, weights = scored(torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]]))
    for count in (6, 7, 100):
        candidates = with_candidates(q, keys, weights, torch.tensor([[count]]), 1, 1.0, "none", True, 2, 2)[1]
        assert candidates.tolist() == [[[True, True, False, False, True, True]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["none", "fp4_g32_ue8m0"])
def test_scores_match_float64(dtype: torch.dtype, format: str) -> None:
    q, plain, weights = torch.randn(2, 5, 4, 32).to(dtype), torch.randn(2, 11, 32), torch.randn(2, 5, 4).to(dtype)
    keys = torch.ops.dsv4.quant_pack(plain, format)
    read = torch.ops.dsv4.unpack(keys, format, 32, torch.float32).double()
    n_visible = torch.tensor([[3, 11, 0, 7, 11], [1, 2, 5, 10, 11]])
    out = index_topk(q, keys, weights, n_visible, None, 6, 0.17, format, False)
    dots = torch.einsum("bthd,bsd->bths", q.double(), read).clamp_min(0) * 0.17
    scores = (dots * weights.double().unsqueeze(-1)).sum(2)
    for b in range(2):
        for t in range(5):
            n = int(n_visible[b, t])
            want = best(scores[b, t].tolist(), [j < n for j in range(11)], 6)
            assert out[b, t].tolist() == want + [-1] * (6 - len(want))


def test_long_prompts_are_cut_into_chunks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, weights = torch.randn(2, 9, 3, 16), torch.randn(2, 20, 16), torch.randn(2, 9, 3)
    n_visible = torch.arange(18).view(2, 9)
    whole = with_candidates(q, keys, weights, n_visible, 5, 1.0, "none", True, 2, 4)
    monkeypatch.setattr("dscompile.ops.index._CHUNK_ELEMENTS", 2 * 3 * 20 * 2)
    cut = with_candidates(q, keys, weights, n_visible, 5, 1.0, "none", True, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_degenerate_scores_fill_every_visible_slot() -> None:
    """Case R11: thousands of exact zeros tie; min(k, visible) distinct picks, lowest index first, every time."""
    keys = torch.zeros(1, 8320, 1)
    keys[0, torch.randperm(8320)[:100], 0] = torch.rand(100) + 0.1
    n_visible, one = torch.tensor([[8320, 1000]]), torch.ones(1, 2, 1)
    outs = [index_topk(one.unsqueeze(2), keys, one, n_visible, None, 2048, 1.0, "none", ascending)
            for ascending in (False, False, True)]  # fmt: skip
    scores = keys[0, :, 0].tolist()
    assert torch.equal(outs[0], outs[1])
    assert outs[0][0, 0].tolist() == best(scores, [True] * 8320, 2048)
    assert outs[0][0, 1].tolist()[1000:] == [-1] * 1048
    assert sorted(outs[0][0, 1].tolist()[:1000]) == list(range(1000))
    assert outs[2][0, 0].tolist() == sorted(outs[0][0, 0].tolist())


@pytest.mark.parametrize("lengths", [[9, 0, -1, 1], [0] * 32, [0] * 33, [-(2**40), 2**40]])
def test_rows_without_a_length(lengths: list[int]) -> None:
    """Case R13: a length of zero or less gives only -1, and the live rows are bitwise those of an unpadded run."""
    n = len(lengths)
    q, keys, weights = torch.randn(n, 1, 4, 16), torch.randn(n, 9, 16), torch.randn(n, 1, 4)
    n_visible = torch.tensor(lengths).view(n, 1)
    dead = [b for b in range(n) if lengths[b] <= 0]
    q[dead] = keys[dead] = float("nan")
    out = index_topk(q, keys, weights, n_visible, None, 4, 1.0, "none", True)
    both = with_candidates(q, keys, weights, n_visible, 4, 1.0, "none", True, 2, 4)
    assert torch.equal(both[0], out)
    assert (out[dead] == -1).all() and not both[1][dead].any()
    for b in set(range(n)) - set(dead):
        alone = index_topk(q[b : b + 1], keys[b : b + 1], weights[b : b + 1], n_visible[b : b + 1], None, 4, 1.0,
                           "none", True)  # fmt: skip
        assert torch.equal(out[b], alone[0])


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_no_row_of_the_future(ratio: int) -> None:
    """Case R10: with n_visible = (pos + 1) // ratio a row is chosen only if all its tokens are at or before pos."""
    start, tokens, rows = 13, 9, 24
    pos = torch.arange(start, start + tokens)[None]
    q, keys, weights = torch.randn(1, tokens, 4, 16), torch.randn(1, rows, 16), torch.randn(1, tokens, 4)
    out = index_topk(q, keys, weights, (pos + 1) // ratio, None, 64, 1.0, "none", True)
    for t in range(tokens):
        want = [j for j in range(rows) if (j + 1) * ratio <= start + t + 1]
        assert out[0, t].tolist() == want + [-1] * (rows - len(want))
    keys[:, (start + 1) // ratio :] = float("nan")  # rows that the first query may not see
    again = index_topk(q, keys, weights, (pos + 1) // ratio, None, 64, 1.0, "none", True)
    assert torch.equal(again[:, 0], out[:, 0])


def test_an_infinite_score_is_still_visible() -> None:
    """-inf is a score like another: it comes last among the visible, before whatever is not."""
    q, keys = torch.tensor([[[[1.0]]]]), torch.tensor([[[1.0], [float("inf")], [2.0], [3.0]]])
    out = index_topk(q, keys, torch.tensor([[[-1.0]]]), torch.tensor([[4]]),
                     torch.tensor([[[False, True, True, False]]]), 4, 1.0, "none", False)  # fmt: skip
    assert out.tolist() == [[[2, 1, -1, -1]]]


def test_arguments_are_checked() -> None:
    q, keys, weights, visible = (
        torch.ones(1, 2, 3, 32),
        torch.ones(1, 4, 32),
        torch.ones(1, 2, 3),
        torch.ones(1, 2).long(),
    )

    def call(**change: object) -> None:
        args = {
            "q": q,
            "keys": keys,
            "weights": weights,
            "visible": visible,
            "candidates": None,
            "k": 2,
            "scale": 1.0,
            "format": "none",
            "ascending": True,
        } | change
        index_topk(*args.values())

    for k in (0, -3):
        with pytest.raises(ValueError, match=rf"dsv4::index_topk: top_k is {k}; allowed: > 0"):
            call(k=k)
    with pytest.raises(ValueError, match=r"shape of head_weights is \[1, 2, 2\]; allowed: \[1, 2, 3\]"):
        call(weights=weights[..., :2])
    with pytest.raises(ValueError, match=r"key_format is 'int3'; allowed: 'none', "):
        call(format="int3")
    with pytest.raises(TypeError, match=r"dtype of keys is torch.float32; allowed: torch.uint8"):
        call(format="fp4_g32_ue8m0")
    with pytest.raises(
        ValueError, match=r"shape of keys is \[1, 4, 18\]; allowed: last axis 17 \('fp4_g32_ue8m0' rows"
    ):
        call(keys=torch.zeros(1, 4, 18, dtype=torch.uint8), format="fp4_g32_ue8m0")
    with pytest.raises(ValueError, match=r"shape of candidates is \[1, 2, 3\]; allowed: \[1, 2, 4\]"):
        call(candidates=torch.ones(1, 2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="dtype of n_visible is torch.float32; allowed: torch.int64, torch.int32"):
        call(visible=visible.float())
    for blocks, size, name in ((0, 4, "candidate_blocks"), (2, 0, "block_size")):
        with pytest.raises(ValueError, match=f"dsv4::index_topk_candidates: {name} is 0; allowed: > 0"):
            with_candidates(q, keys, weights, visible, 2, 1.0, "none", True, blocks, size)
