"""Which masks are proven to be a window and a choice of rows, and what is said about those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dscompile.ops  # noqa: F401 - registers the vocabulary
from dscompile.passes.dialects.transformers_v4 import attention, masks
from dscompile.passes.dialects.transformers_v4.values import Affine, Values
from dscompile.passes.engine import PassContext, PatternPass, normalise
from dscompile.passes.engine.graphs import find
from dscompile.passes.engine.testing import functional_graph, run_flat

B, H, T, S, D, C, K, W = 2, 3, 6, 9, 16, 4, 2, 4
LOW = torch.finfo(torch.float32).min
INF = float("inf")
aten = torch.ops.aten


def attend(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """transformers' eager attention with a sink; kv [B, 1, S, D] for all heads."""
    rows = kv[:, :, None].expand(B, 1, q.shape[1], kv.shape[2], D).reshape(B, q.shape[1], kv.shape[2], D)
    scores = torch.matmul(q, rows.transpose(2, 3)) * D**-0.5 + mask
    scores = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(B, -1, q.shape[2], -1)], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    p = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(p, rows).transpose(1, 2).contiguous()


def attend_unshifted(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """The same, as gpt-oss is often copied: no largest score is subtracted in front of the softmax."""
    rows = kv.repeat_interleave(q.shape[1], 1)
    scores = q @ rows.transpose(2, 3) * D**-0.5 + mask
    scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ rows).transpose(1, 2)


def window(q: Tensor, k: Tensor, low: float = LOW) -> Tensor:
    """The mask of query positions q [T] and key positions k [S]."""
    q, k = q.view(1, 1, -1, 1), k.view(1, 1, 1, -1)
    seen = ((k > q - W) & (k <= q)).expand(B, 1, q.shape[2], k.shape[3])
    return torch.where(seen, 0.0, low)


def rows_up_to(count: Tensor, low: float = -INF) -> Tensor:
    """Rows j < count[t], count [T]."""
    bias = torch.zeros(B, 1, T, C)
    return bias.masked_fill(torch.arange(C).view(1, 1, 1, -1) >= count.view(1, 1, -1, 1), low)


def chosen(index: Tensor, value: float = 0.0, width: int = C + 1) -> Tensor:
    """Rows index [B, T, K], -1 for none."""
    safe = torch.where(index >= 0, index, C)
    return torch.full((B, 1, T, width), -INF).scatter(-1, safe.unsqueeze(1), value)[..., :C]


def best(scores: Tensor) -> Tensor:
    index = scores.topk(K, -1).indices
    return torch.where(index > 2, -1, index)


def run(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[list[Any], list[str], float]:
    """(the sparse attentions, reasons of near misses, difference) of fn's graph."""
    gm = functional_graph(fn, *inputs)
    before = run_flat(gm)
    normalise(gm)
    result = PatternPass("attention", attention.PATTERNS).run(gm, PassContext())
    after = run_flat(gm)
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True))
    return find(gm.graph, torch.ops.dsv4.sparse_attention.default), [m.reason for m in result.near_misses], difference


def tensors(rows: int = S, heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, heads, T, D), torch.randn(B, 1, rows, D), torch.randn(heads)


def plain(q: Tensor, kv: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
    return attend(q, kv, mask, sink)


def joined(q: Tensor, kv: Tensor, sink: Tensor, part: Tensor) -> Tensor:
    """Window keys, then C compressed rows with their own part of the mask."""
    ordinary = window(torch.arange(3, 3 + T), torch.arange(S))
    return attend(q, torch.cat([kv, kv[:, :, :C] * 2], 2), torch.cat([ordinary, part], -1), sink)


def distances(q: Tensor, k: Tensor) -> Tensor:
    """The same mask by one subtraction: not how transformers writes it."""
    age = q.view(1, 1, -1, 1) - k
    return torch.where(((age >= 0) & (age < W)).expand(B, 1, T, S), 0.0, LOW)


PROVEN: dict[str, Callable[..., Tensor]] = {
    "prompt": lambda q, kv, s: attend(q, kv[:, :, :T], window(torch.arange(T), torch.arange(T)), s),
    "offset": lambda q, kv, s: plain(q, kv, s, window(torch.arange(3, 3 + T), torch.arange(S))),
    "two parts": lambda q, kv, s: joined(q, kv, s, rows_up_to((torch.arange(T) + 1) // 2)),
    "every row": lambda q, kv, s: attend(
        q, torch.cat([kv, kv[:, :, :C] * 2], 2), F.pad(window(torch.arange(3, 3 + T), torch.arange(S)), (0, C)), s
    ),
    "selection": lambda q, kv, s: joined(q, kv, s, chosen(best(kv[:, 0, :T, :C]))),
    "unshifted": lambda q, kv, s: attend_unshifted(q, kv, window(torch.arange(3, 3 + T), torch.arange(S)), s),
}


@pytest.mark.parametrize(
    ("case", "heads"), [*((c, H) for c in PROVEN), ("prompt", 1), ("selection", 1), ("unshifted", 1)]
)
def test_proven_masks_become_sparse(case: str, heads: int) -> None:
    found, misses, difference = run(PROVEN[case], *tensors(heads=heads))
    assert len(found) == 1 and misses == []
    assert difference < 1e-6
    assert found[0].args[4] == W


def test_a_counter_in_a_tensor_is_followed() -> None:
    """A static cache: positions start at a scalar that is written back, the window's first key at max(start - 3, 0)."""

    def step(q: Tensor, kv: Tensor, sink: Tensor, length: Tensor) -> Tensor:
        queries = torch.arange(T) + length.clone()
        keys = torch.arange(S) + (length - (W - 1)).clamp(min=0)
        out = attend(q, kv, window(queries, keys), sink)
        length.add_(T)
        return out

    for start in (0, 2, 50):
        found, misses, difference = run(step, *tensors(), torch.tensor(start))
        assert len(found) == 1 and misses == [] and difference < 1e-6


def test_a_query_that_sees_nothing() -> None:
    """The sink alone is left of the denominator, so the result is 0."""
    found, _, difference = run(
        lambda q, kv, s: attend(q, kv, window(torch.arange(100, 100 + T), torch.arange(S)), s), *tensors()
    )
    assert len(found) == 1 and difference == 0


def test_attention_without_a_sink_resembles_nothing() -> None:
    """Everybody's attention: no near miss."""

    def ordinary(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        rows = kv.expand(B, H, S, D)
        return (q @ rows.transpose(2, 3) * D**-0.5 + window(torch.arange(T), torch.arange(S))).softmax(-1) @ rows

    assert run(ordinary, *tensors()) == ([], [], 0)


#: What to run, its inputs besides q, kv and sink, and a part of the reason.
Refused = tuple[Callable[..., Tensor], tuple[Tensor, ...], str]


def cut_elsewhere(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    mask = torch.cat([window(torch.arange(T), torch.arange(S)), rows_up_to(torch.arange(T))], -1)
    return attend(q, torch.cat([kv[:, :, :-1], kv[:, :, : C + 1]], 2), mask, sink)


def padded(q: Tensor, kv: Tensor, sink: Tensor, keep: Tensor) -> Tensor:
    seen = (window(torch.arange(T), torch.arange(S)) == 0) & keep.view(B, 1, 1, S)
    return attend(q, kv, torch.where(seen, 0.0, LOW), sink)


def unbounded(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    causal = (torch.arange(S) <= torch.arange(T).view(1, 1, -1, 1)).expand(B, 1, T, S)
    return attend(q, kv, torch.where(causal, 0.0, LOW), sink)


REFUSED: dict[str, Refused] = {
    "a mask from outside": (plain, (torch.zeros(B, 1, T, S),), "placeholder"),
    "positions from outside": (
        lambda q, kv, s, p: plain(q, kv, s, window(p, torch.arange(S))), (torch.arange(T),), "not proven to be about"),
    "padding": (padded, (torch.ones(B, S, dtype=torch.bool),), "not proven to be about positions"),
    "a mask from outside, unshifted": (
        lambda q, kv, s, m: attend_unshifted(q, kv, m, s), (torch.zeros(B, 1, T, S),), "placeholder"),
    "no window": (unbounded, (), "1 conditions on positions, expected 2"),
    "one subtraction": (
        lambda q, kv, s: plain(q, kv, s, distances(torch.arange(T), torch.arange(S))), (), "does not compare"),
    "keys two apart": (
        lambda q, kv, s: plain(q, kv, s, window(torch.arange(T), torch.arange(S) * 2)), (), "do not rise by one"),
    "keys and queries two apart": (
        lambda q, kv, s: plain(q, kv, s, window(torch.arange(T) * 2, torch.arange(S) * 2)), (), "do not rise by one"),
    "keys before the start": (
        lambda q, kv, s: plain(q, kv, s, window(torch.arange(T), torch.arange(S) - 3)), (), "to be 0 or more"),
    "a soft mask": (
        lambda q, kv, s: plain(q, kv, s, window(torch.arange(T), torch.arange(S), -1e4)), (), "lowest where"),
    "another part": (joined, (torch.zeros(B, 1, T, C),), "neither scatter nor a limit"),
    "another cut": (cut_elsewhere, (), "joined at another column"),
    "a limit that is soft": (
        lambda q, kv, s: joined(q, kv, s, rows_up_to(torch.arange(T), -9.0)), (), "not -inf where it forbids"),
    "a bias for chosen rows": (
        lambda q, kv, s: joined(q, kv, s, chosen(best(kv[:, 0, :T, :C]), 1.0)), (), "not 0 scattered"),
    "rows chosen twice": (
        lambda q, kv, s, i: joined(q, kv, s, chosen(i)), (torch.zeros(B, T, K, dtype=torch.int64),), "to be distinct"),
    "absent rows sent elsewhere": (
        lambda q, kv, s: joined(q, kv, s, chosen(best(kv[:, 0, :T, :C]), 0.0, C + 2)), (), "not 0 scattered"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_proven_stays_dense(case: str) -> None:
    """Nothing is rewritten, and the near miss names the part that was not proven."""
    fn, more, reason = REFUSED[case]
    found, misses, difference = run(fn, *tensors(), *more)
    assert not found and difference == 0
    assert len(misses) == 1 and reason in misses[0], misses


def test_values_of_integer_tensors() -> None:
    """What is affine is followed through views; what is not, or is read after a write, is not."""

    def fn(n: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        a = torch.arange(2, 8) * 3 + n
        joined = torch.cat([a[:1] - 3, a])
        broken = torch.cat([a, a])
        gathered = a[torch.arange(3).view(-1, 1)]
        return a.view(1, 6).expand(4, 6), joined, broken, gathered, a.view(2, 3), x.sum(0) + a, a[1::2], a == a

    gm = functional_graph(fn, torch.tensor(5), torch.ones(2, 6, dtype=torch.int64))
    normalise(gm)
    values = Values(gm.graph)
    out = [values.of(n) for n in gm.graph.output_node().args[0]]
    steps = [v.steps if isinstance(v, Affine) else v for v in out]
    assert steps == [(0, 3), (3,), None, (3, 0), None, None, (6,), True]
    first = out[0].base
    assert [out[1].base - first, out[3].base - first, out[6].base - first] == [-3, 0, 3]


def test_memory_read_after_a_write_is_another_value() -> None:
    """Equal expressions of a counter on either side of a write are not taken for equal."""
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        value = torch.zeros((), dtype=torch.int64)
    n = graph.placeholder("n")
    n.meta["val"] = value
    nodes = []
    for target, args in ((aten.clone.default, (n,)), (aten.copy_.default, (n, n)), (aten.clone.default, (n,))):
        nodes.append(graph.call_function(target, args))
        nodes[-1].meta["val"] = value
    graph.output((nodes[0], nodes[2]))
    values = Values(graph)
    before, after = values.of(nodes[0]), values.of(nodes[2])
    assert isinstance(before, Affine) and isinstance(after, Affine)
    assert before == values.of(n) and before != after


def test_a_mask_of_another_kind_is_described() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("bias")
    with torch._subclasses.FakeTensorMode():
        node.meta["val"] = torch.zeros(1, 1, 2, 3)
    reason = masks.row_mask(Values(graph), node).reason
    assert "placeholder %bias float32[1, 1, 2, 3]" in reason
