"""What a prefill without the tokens that nobody needs does to outputs: only logits lose rows, and only if it is clear
which output they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from support.elision import TwoLayers, ran

MODEL = TwoLayers()
MIX = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))


def test_alone_the_logits_of_the_last_token_are_kept() -> None:
    got, want, _, elision = run = ran(MODEL, MODEL)
    assert elision.tail == 15 and run.same_rows()
    torch.testing.assert_close(got[:, -1], want[:, -1])
    assert got[:, :-1].count_nonzero() == 0


def test_a_vector_per_sequence_as_long_as_the_prompt_is_kept() -> None:
    """Its sizes, [1, 64], are those of the batch."""
    got, want, _, elision = ran(
        MODEL, lambda ids, pos, cache: (MODEL(ids, pos, cache), torch.tanh(MODEL.embed[ids].mean(1)))
    )
    assert (
        elision.tail == 15 and got[0][:, 0].count_nonzero() == 0
    )  # the ring needs 8 of what the embedding gives all of
    torch.testing.assert_close(got[0][:, -1], want[0][:, -1])
    torch.testing.assert_close(got[1], want[1])


def test_a_vector_of_the_last_layer_needs_all_tokens() -> None:
    def pooled(ids: Tensor, pos: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        hidden = MODEL.hidden(ids, pos, cache)
        return hidden @ MODEL.head, hidden.mean(1)

    got, want, _, elision = ran(MODEL, pooled)
    torch.testing.assert_close(got, want)
    assert elision.tail is None and "output 1" in elision.reason and "is not the logits" in elision.reason


@pytest.mark.parametrize(
    "which",
    [
        "hidden states", "of the embedding", pytest.param("flat", marks=pytest.mark.slow),
        pytest.param("a number each", marks=pytest.mark.slow), "heads first",
    ],
)  # fmt: skip
def test_of_two_outputs_that_may_be_logits_all_rows_are_kept(which: str) -> None:
    def two(ids: Tensor, pos: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        hidden = MODEL.hidden(ids, pos, cache)
        other = {
            "hidden states": lambda: hidden,
            "of the embedding": lambda: torch.tanh(MODEL.embed[ids] @ MIX),
            "flat": lambda: torch.tanh(hidden.flatten(0, 1)),
            "a number each": lambda: hidden.sum(-1),
            "heads first": lambda: hidden.unflatten(2, (4, 16)).transpose(1, 2),  # as keys and values are returned
        }[which]()
        return hidden @ MODEL.head, other

    got, want, _, elision = ran(MODEL, two)
    torch.testing.assert_close(got, want)
    assert elision.tail is None
    assert "output 0" in elision.reason and "output 1" in elision.reason and "only logits" in elision.reason


@dataclass
class Output:
    """As transformers returns it."""

    logits: Tensor
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None


torch.utils._pytree.register_dataclass(Output)


def test_logits_in_an_object_are_found_and_hidden_states_beside_them_keep_all_rows() -> None:
    got, want, _, elision = ran(MODEL, lambda ids, pos, cache: Output(MODEL(ids, pos, cache), cache))
    assert elision.tail == 15 and got.logits[:, 0].count_nonzero() == 0
    torch.testing.assert_close(got.logits[:, -1], want.logits[:, -1])

    def both(ids: Tensor, pos: Tensor, cache: Any) -> Output:
        hidden = MODEL.hidden(ids, pos, cache)
        return Output(hidden @ MODEL.head, None, (MODEL.embed[ids], hidden))

    got, want, _, elision = ran(MODEL, both)
    assert elision.tail is None and "output 2" in elision.reason
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.hidden_states, want.hidden_states)


def test_the_best_token_of_each_place_is_named_as_what_needs_all_tokens() -> None:
    def best(ids: Tensor, pos: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        logits = MODEL(ids, pos, cache)
        return logits, logits.argmax(-1)

    got, want, _, elision = ran(MODEL, best)
    torch.testing.assert_close(got, want)
    assert elision.tail is None
    assert "output 1 (aten.argmax" in elision.reason and elision.reason.endswith("is not the logits")


def test_an_only_output_that_is_no_row_of_logits_per_token_is_kept() -> None:
    """Sums over the vocabulary; and rows of the embedding, which no attention has seen."""
    got, want, _, elision = ran(MODEL, lambda ids, pos, cache: MODEL(ids, pos, cache).logsumexp(-1))
    assert elision.tail is None and "no tensor of logits" in elision.reason
    torch.testing.assert_close(got, want)

    def embedded(ids: Tensor, pos: Tensor, cache: Any) -> Tensor:
        MODEL(ids, pos, cache)
        return torch.tanh(MODEL.embed[ids])

    got, want, _, elision = run = ran(MODEL, embedded)
    torch.testing.assert_close(got, want)
    assert run.same_rows() and elision.tail == 15  # of which the rings keep 8


def test_rows_that_were_mixed_on_their_way_to_the_output_are_not_logits() -> None:
    """[1, 64, 64], a row of it for each pair of tokens: nothing tells that by its sizes."""

    def scores(ids: Tensor, pos: Tensor, cache: Any) -> Tensor:
        hidden = MODEL.hidden(ids, pos, cache)
        return hidden @ hidden.transpose(1, 2)

    got, want, _, elision = ran(MODEL, scores)
    torch.testing.assert_close(got, want)
    assert elision.tail is None and "is not known to work token by token" in elision.reason


def test_what_is_written_to_a_tensor_of_the_caller_is_named() -> None:
    kept = torch.zeros(1, 64, 64)

    def writes(ids: Tensor, pos: Tensor, cache: Any) -> Tensor:
        hidden = MODEL.hidden(ids, pos, cache)
        kept.copy_(hidden)
        return hidden @ MODEL.head

    got, want, _, elision = ran(MODEL, writes)
    torch.testing.assert_close(got, want)
    assert elision.tail is None and "tensor of the caller's" in elision.reason
