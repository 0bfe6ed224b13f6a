"""Expert choice: float64 oracle, ties, bias, hash routing, expert counts that are not a power of two."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dscompile.ops  # noqa: F401

router = torch.ops.dsv4.router
SCORES = ["sqrtsoftplus", "sigmoid", "softmax"]


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, score_fn: str, normalize: bool, scale: float,
           forced: Tensor | None = None) -> tuple[list[list[float]], list[list[int]]]:  # fmt: skip
    """Token by token in Python floats."""
    weights, indices = [], []
    for t, row in enumerate(x.double()):
        logits = [float(row @ w) for w in weight.double()]
        if score_fn == "softmax":
            top = max(logits)
            scores = [math.exp(v - top) for v in logits]
            scores = [v / sum(scores) for v in scores]
        elif score_fn == "sigmoid":
            scores = [1 / (1 + math.exp(-v)) for v in logits]
        else:
            scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
        ranked = scores if bias is None else [s + float(b) for s, b in zip(scores, bias.double(), strict=True)]
        chosen = sorted(range(len(scores)), key=lambda e: (-ranked[e], e))[:k] if forced is None else forced[t].tolist()
        picked = [scores[e] for e in chosen]
        total = sum(picked) + 1e-20 if normalize else 1.0
        weights.append([p / total * scale for p in picked])
        indices.append(chosen)
    return weights, indices


@pytest.mark.parametrize("score_fn", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_router_matches_float64(score_fn: str, normalize: bool, forced: bool) -> None:
    x, weight, bias = torch.randn(9, 16), torch.randn(12, 16), torch.randn(12)
    table = torch.randint(0, 12, (9, 3)) if forced else None
    weights, indices = router(x, weight, bias, table, 3, score_fn, normalize, 1e-20, 1.5, True)
    want_weights, want_indices = oracle(x, weight, bias, 3, score_fn, normalize, 1.5, table)
    assert indices.dtype == torch.int64 and indices.tolist() == want_indices
    torch.testing.assert_close(weights, torch.tensor(want_weights), rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=24), st.data())
def test_ties_go_to_the_lowest_index(bias: list[int], data: st.DataObject) -> None:
    """Equal scores everywhere, so the bias alone ranks and repeats often."""
    k = data.draw(st.integers(1, len(bias)))
    x, weight = torch.randn(2, 4), torch.zeros(len(bias), 4)
    weights, indices = router(x, weight, torch.tensor(bias).float(), None, k, "sqrtsoftplus", True, 1e-20, 2.5, True)
    want = sorted(range(len(bias)), key=lambda e: (-bias[e], e))[:k]
    assert indices.tolist() == [want, want]
    torch.testing.assert_close(weights, torch.full((2, k), 2.5 / k))


@pytest.mark.parametrize("experts", [300, 384])
@pytest.mark.parametrize("k", [2, 6])
def test_any_number_of_experts(experts: int, k: int) -> None:
    """Case R17: more than 256 experts, all of the first 256 pushed down; the bias selects and never weighs."""
    x, weight, bias = torch.randn(5, 32), torch.randn(experts, 32), torch.randn(experts) * 0.1
    bias[:256] -= 100
    weights, indices = router(x, weight, bias, None, k, "sqrtsoftplus", True, 1e-20, 2.5, True)
    assert (indices >= 256).all()
    assert all(len(set(row)) == k for row in indices.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 2.5))
    shifted = router(x, weight, bias + 3, None, k, "sqrtsoftplus", True, 1e-20, 2.5, True)
    assert torch.equal(shifted[1], indices) and torch.equal(shifted[0], weights)


def test_low_precision_scores_stay_in_the_dtype_of_x() -> None:
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    weights, indices = router(x, weight, None, None, 2, "sqrtsoftplus", True, 1e-20, 1.5, False)
    scores = torch.nn.functional.softplus(torch.nn.functional.linear(x, weight)).sqrt()
    picked = scores.gather(1, indices)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, picked / (picked.sum(-1, keepdim=True) + 1e-20) * 1.5)


def test_a_nan_token_does_not_touch_the_others() -> None:
    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    clean = router(x, weight, None, None, 2, "softmax", True, 1e-20, 1.0, True)
    x[2] = float("nan")
    weights, indices = router(x, weight, None, None, 2, "softmax", True, 1e-20, 1.0, True)
    keep = [0, 1, 3]
    assert torch.equal(weights[keep], clean[0][keep]) and torch.equal(indices[keep], clean[1][keep])
    assert ((indices >= 0) & (indices < 8)).all()


def test_arguments_are_checked() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    for k in (0, -1, 6):
        with pytest.raises(ValueError, match=rf"dsv4::router: top_k is {k}; allowed: 1 <= top_k <= 5"):
            router(x, weight, None, None, k, "softmax", True, 0.0, 1.0, True)
    with pytest.raises(ValueError, match=r"score_fn is 'relu'; allowed: 'sqrtsoftplus', 'sigmoid', 'softmax'"):
        router(x, weight, None, None, 2, "relu", True, 0.0, 1.0, True)
    with pytest.raises(ValueError, match=r"shape of bias is \[4\]; allowed: \[5\]"):
        router(x, weight, torch.ones(4), None, 2, "softmax", True, 0.0, 1.0, True)
    with pytest.raises(ValueError, match=r"shape of weight is \[5, 3\]; allowed: \[5, 4\]"):
        router(x, weight[:, :3], None, None, 2, "softmax", True, 0.0, 1.0, True)
    with pytest.raises(TypeError, match=r"dtype of weight is torch.bfloat16; allowed: torch.float32"):
        router(x, weight.bfloat16(), None, None, 2, "softmax", True, 0.0, 1.0, False)
    with pytest.raises(IndexError, match=r"forced_indices is 5; allowed: 0 <= forced_indices < 5"):
        router(x, weight, None, torch.full((3, 2), 5), 2, "softmax", True, 0.0, 1.0, True)
