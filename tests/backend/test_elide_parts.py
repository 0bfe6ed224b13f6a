"""Parts of a model around the layers, in a prefill without the tokens that nobody needs: regions that are called in
different ways, operations of many forms, positions that are cleaned in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.models.deepseek_v41.generate import prompt_positions
from support.elision import TwoLayers, ran

MODEL = TwoLayers()
TABLE = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
SQUARE = TABLE[:64]


class Pair(torch.nn.Module):
    """Two results, of which the second has the sizes of all tokens in it."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x.shape
        return x * 2, torch.tanh((x + z).reshape(batch * tokens, width)).view(batch, tokens, width)


class Twofold(torch.nn.Module):
    """A value and its copy, which is the same one for a graph, in front of another."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        doubled = x * 2
        return doubled, doubled.clone(), torch.tanh(x)


pair, twofold = Pair(), Twofold()


def last_rows_agree(function: Callable[..., Tensor], model: TwoLayers = MODEL, **given: Any) -> Any:
    run = ran(model, function, **given)
    torch.testing.assert_close(run.got[:, -1], run.want[:, -1], atol=1e-5, rtol=1e-5)
    assert run.same_rows()
    return run.elision


def test_calls_of_one_region_may_use_different_results() -> None:
    def twice(ids: Tensor, pos: Tensor, cache: Any) -> Tensor:
        x, _ = pair(MODEL.hidden(ids, pos, cache), TABLE[ids])
        x, y = pair(x, x * 3)
        return (x + y) @ MODEL.head

    assert last_rows_agree(twice).tail == 15


def test_calls_of_one_region_may_need_tokens_of_different_inputs() -> None:
    def twice(ids: Tensor, pos: Tensor, cache: Any) -> Tensor:
        x = MODEL.hidden(ids, pos, cache)
        _, y = pair(x, TABLE[ids])
        x, _ = pair(y, x)
        return x @ MODEL.head

    last_rows_agree(twice)


def test_a_result_that_a_region_gives_twice() -> None:
    def thrice(ids: Tensor, pos: Tensor, cache: Any) -> Tensor:
        first, second, third = twofold(MODEL.hidden(ids, pos, cache))
        return torch.cat((first, second + third), 2)[..., 64:] @ MODEL.head

    assert last_rows_agree(thrice).tail == 15


def test_what_addmm_adds_may_have_a_row_per_token() -> None:
    def added(ids: Tensor, pos: Tensor, cache: Any) -> Tensor:
        x = MODEL.hidden(ids, pos, cache)
        return torch.addmm(TABLE[ids].flatten(0, 1), x.flatten(0, 1), SQUARE).view(x.shape) @ MODEL.head

    assert last_rows_agree(added).tail == 15


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over tokens": lambda x: x.softmax(1),
    "sums of those before": lambda x: x.cumsum(1),
    "sorted": lambda x: x.sort(1).values,
    "those before": lambda x: torch.cat((x[:, :1], x[:, :-1]), 1),
    "all pairs": lambda x: torch.baddbmm(x, x @ x.transpose(1, 2), x),
    "scattered": lambda x: x.scatter(1, torch.zeros(1, 1, 64, dtype=torch.int64), x[:, :1]),
    "a row replaced": lambda x: x.index_put((torch.tensor([0]), torch.tensor([63])), x[:, 5]),
    "of all tokens": lambda x: x + x.mean(1, keepdim=True),
    "as a matrix": lambda x: (SQUARE @ x[0])[None],
    "turned": lambda x: x.transpose(1, 2).contiguous(),  # [1, 64, 64] as well
    "normed as if it were one token": lambda x: x + torch.rms_norm(x.mean(2), (64,)).unsqueeze(2),
}


#: The others are of kinds that `test_token_rows` tries one by one.
_FAST = ("of all tokens", "turned", "normed as if it were one token")


@pytest.mark.parametrize("how", [how if how in _FAST else pytest.param(how, marks=pytest.mark.slow) for how in MIXING])
def test_what_mixes_tokens_needs_them_all(how: str) -> None:
    run = ran(MODEL, lambda ids, pos, cache: MIXING[how](MODEL.hidden(ids, pos, cache)) @ MODEL.head)
    torch.testing.assert_close(run.got[:, -1], run.want[:, -1], atol=1e-5, rtol=1e-5)
    assert run.same_rows()


def from_anywhere(positions: Tensor, limit: int) -> Tensor:
    """As the model cleans positions, but for the test of their sign."""
    steps = torch.arange(positions.shape[1])
    follows = (positions == positions[:, :1] + steps) & (positions < limit)
    return torch.where(follows.long().cumprod(1) == 1, positions, -1)


def test_padding_in_front_of_a_prompt_leaves_out_nothing_unless_it_is_cleaned_away() -> None:
    model, positions = TwoLayers(from_anywhere), torch.arange(60)[None] - 4
    run = ran(model, model, positions)
    torch.testing.assert_close(run.got, run.want)
    assert run.same_rows() and run.elision.tail is None
    assert "not proven to be 0 or more from a row's first token on" in run.elision.reason
    assert ran(MODEL, MODEL, positions).same_rows()


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_prompts_of_several_lengths_in_one_batch(mode: str) -> None:
    """Also one of no tokens at all, and with a tail that is longer than the exact form needs."""
    lengths = torch.tensor([64, 40, 15, 14, 1, 0])
    given = {"elide_tail": 20} if mode == "bounded" else {}
    run = ran(MODEL, MODEL, prompt_positions(lengths, 64), elide=mode, **given)
    assert run.elision.tail == 15 and run.same_rows()
    for row, length in enumerate(lengths.tolist()):
        if length:
            torch.testing.assert_close(run.got[row, length - 1], run.want[row, length - 1], atol=1e-5, rtol=1e-5)
