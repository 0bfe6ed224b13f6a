"""Which inputs of an operation hold rows of tokens: picking tokens there gives what picking them afterwards does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import dscompile.ops  # noqa: F401
from dscompile.passes.engine.fxutil import emit, set_val
from dscompile.passes.token_rows import TokenSizes, row_inputs

BATCH, TOKENS = 2, 6
FLAT = BATCH * TOKENS
SIZES = TokenSizes(BATCH, TOKENS)
aten, dsv4 = torch.ops.aten, torch.ops.dsv4


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes) + sum(sizes)))


def numbers(*sizes: int) -> Tensor:
    return torch.arange(torch.Size(sizes).numel()).view(sizes) % 3


def tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """Those among arguments, each once."""
    return list({id(leaf): leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)}.values())


def rows_of(target: Any, args: tuple[Any, ...], lead: int) -> list[tuple[int, int]] | None:
    """What `row_inputs` says of an operation: the place among `tensors` and the `lead` of each input with rows."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[int, fx.Node] = {}
    for place, value in enumerate(tensors(args)):
        nodes[id(value)] = node = graph.placeholder(f"arg{place}")
        set_val(node, mode.from_tensor(value))
    given = torch.utils._pytree.tree_map(lambda leaf: nodes.get(id(leaf), leaf), args)
    found = row_inputs(emit(graph, target, given, mode=mode), lead, SIZES)
    places = list(nodes.values())
    return None if found is None else sorted((places.index(source), own) for source, own in found.items())


def last(value: Tensor, lead: int) -> Tensor:
    """The last two tokens of each sequence."""
    return value[:, -2:] if lead == 2 else value.unflatten(0, (BATCH, TOKENS))[:, -2:].flatten(0, 1)


X, Y, FLAT_X = drawn(BATCH, TOKENS, 4), drawn(BATCH, TOKENS, 3), drawn(FLAT, 4)
MATRIX, SQUARE, PAIRS = drawn(4, 5), drawn(FLAT, FLAT), drawn(BATCH, TOKENS)
CHOICE, PLACES = drawn(BATCH, TOKENS, 1) > 0, numbers(BATCH, TOKENS, 2)

#: Operation, its arguments, `lead` of its result and of each tensor among the arguments, 0 for one taken as a whole.
BY_ROWS: dict[str, tuple[Any, tuple[Any, ...], int, tuple[int, ...]]] = {
    "addmm, one bias": (aten.addmm.default, (drawn(5), FLAT_X, MATRIX), 1, (0, 1, 0)),
    "addmm, one bias of two axes": (aten.addmm.default, (drawn(1, 5), FLAT_X, MATRIX), 1, (0, 1, 0)),
    "addmm, a bias each": (aten.addmm.default, (drawn(FLAT, 5), FLAT_X, MATRIX), 1, (1, 1, 0)),
    "addmm, a number each": (aten.addmm.default, (drawn(FLAT, 1), FLAT_X, MATRIX), 1, (1, 1, 0)),
    "mm": (aten.mm.default, (FLAT_X, MATRIX), 1, (1, 0)),
    "linear": (aten.linear.default, (X, MATRIX.T, drawn(5)), 2, (2, 0, 0)),
    "linear, a bias each": (aten.linear.default, (FLAT_X, MATRIX.T, drawn(FLAT, 5)), 1, (1, 0, 1)),
    "where": (aten.where.self, (CHOICE, X, X + 1), 2, (2, 2, 2)),
    "where, for a sequence": (aten.where.self, (CHOICE[:, :1], X, drawn(4)), 2, (0, 2, 0)),
    "cat": (aten.cat.default, ([X, Y], 2), 2, (2, 2)),
    "softmax": (aten._softmax.default, (X, 2, False), 2, (2,)),
    "cumsum": (aten.cumsum.default, (X, -1), 2, (2,)),
    "sum": (aten.sum.dim_IntList, (X, [-1]), 2, (2,)),
    "embedding": (aten.embedding.default, (drawn(3, 4), numbers(BATCH, TOKENS)), 2, (0, 2)),
    "index": (aten.index.Tensor, (drawn(3, 4), [PLACES]), 2, (0, 2)),
    "gather": (aten.gather.default, (X, 2, PLACES), 2, (2, 2)),
    "rms_norm": (dsv4.rms_norm.default, (X, drawn(4), 1e-6, "fp32"), 2, (2, 0)),
    "rope": (dsv4.rope.default, (X, Y[..., :2], Y[..., 1:], False), 2, (2, 2, 2)),
}


@pytest.mark.parametrize("case", BY_ROWS)
def test_picking_tokens_from_what_holds_rows_gives_the_rows_of_the_result(case: str) -> None:
    target, args, lead, leads = BY_ROWS[case]
    assert rows_of(target, args, lead) == [(place, own) for place, own in enumerate(leads) if own]
    picked = {id(value): last(value, own) for value, own in zip(tensors(args), leads, strict=True) if own}
    fewer = torch.utils._pytree.tree_map(lambda leaf: picked.get(id(leaf), leaf), args)
    torch.testing.assert_close(target(*fewer), last(target(*args), lead))


#: Operations whose result needs all tokens, or of which nothing is known.
NOT_BY_ROWS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "addmm, the matrix is what is added": (aten.addmm.default, (SQUARE, SQUARE + 1, SQUARE), 1),
    "addmm, the rows are the matrix": (aten.addmm.default, (drawn(FLAT), SQUARE, SQUARE), 1),
    "mm with itself": (aten.mm.default, (SQUARE, SQUARE), 1),
    "linear to an axis as long as a sequence": (aten.linear.default, (PAIRS, drawn(TOKENS, TOKENS)), 2),
    "rms_norm of a vector as long as a sequence": (dsv4.rms_norm.default, (PAIRS, None, 1e-6, "fp32"), 2),
    "rms_norm weighted by what it norms": (dsv4.rms_norm.default, (PAIRS[0], PAIRS[0], 1e-6, "fp32"), 1),
    "sinkhorn over tokens": (dsv4.sinkhorn.default, (drawn(BATCH, TOKENS, TOKENS), 2, 1e-6), 2),
    "baddbmm": (aten.baddbmm.default, (X, Y, drawn(BATCH, 3, 4)), 2),
    "bmm": (aten.bmm.default, (Y, drawn(BATCH, 3, 4)), 2),
    "where, by token for all sequences": (aten.where.self, (drawn(TOKENS, 1) > 0, X, drawn(4)), 2),
    "cat of tokens": (aten.cat.default, ([X[:, :2], X[:, 2:]], 1), 2),
    "cat of sequences": (aten.cat.default, ([X[:1], X[1:]],), 2),
    "softmax over tokens": (aten._softmax.default, (X, 1, False), 2),
    "softmax over flat tokens": (aten._softmax.default, (FLAT_X, 0, False), 1),
    "cumsum over tokens": (aten.cumsum.default, (X, -2), 2),
    "sort of tokens": (aten.sort.default, (X, 1), 2),
    "argmax over all": (aten.argmax.default, (X, None), 2),
    "sum over sequences": (aten.sum.dim_IntList, (X, [0], True), 2),
    "sum over everything": (aten.sum.dim_IntList, (X, None), 2),
    "scatter": (aten.scatter.src, (X, 2, PLACES, Y[..., :2]), 2),
    "scatter_add": (aten.scatter_add.default, (X, 2, PLACES, Y[..., :2]), 2),
    "index_put": (aten.index_put.default, (X, [numbers(2)], X), 2),
    "index by two": (aten.index.Tensor, (X, [numbers(BATCH, 1), numbers(BATCH, TOKENS)]), 2),
    "flip of tokens": (aten.flip.default, (X, [1]), 2),
    "roll of tokens": (aten.roll.default, (X, [1], [1]), 2),
    "tokens before sequences": (aten.permute.default, (X.transpose(0, 1), [1, 0, 2]), 2),
    "gather of tokens": (aten.gather.default, (X, 1, PLACES), 2),
    "slice of tokens": (aten.slice.Tensor, (drawn(BATCH, 9, 4), 1, 3), 2),
    "parts of a number": (aten.frexp.Tensor, (X,), 2),
    "sizes alone": (aten.full.default, ([BATCH, TOKENS, 4], 0.0), 2),
}


@pytest.mark.parametrize("case", NOT_BY_ROWS)
def test_what_is_not_known_to_work_by_rows_needs_all_tokens(case: str) -> None:
    assert rows_of(*NOT_BY_ROWS[case]) is None
