"""The rows of a batch: whose tokens each has, and from which position on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Row i has the tokens `parts[i]` of request `numbers[i]` at positions `starts[i]` on; rows behind them are idle.

    `first_rows`: the row that each row's request begins with, idle rows included; None where each has one row.
    """

    numbers: list[int]
    parts: list[list[int]]
    starts: list[int]
    first_rows: list[int] | None = None

    def tensors(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions int64 [rows, width], padded with 0 and -1."""
        ids = torch.zeros(rows, width, dtype=torch.int64)
        positions = torch.full((rows, width), -1, dtype=torch.int64)
        for row, (part, start) in enumerate(zip(self.parts, self.starts)):
            ids[row, : len(part)] = torch.tensor(part, dtype=torch.int64)
            positions[row, : len(part)] = torch.arange(start, start + len(part))
        return ids, positions


def one_each(numbers: Sequence[int], parts: list[list[int]], starts: list[int]) -> Rows:
    """A row for every request."""
    return Rows(list(numbers), parts, starts)


def several_each(numbers: Sequence[int], parts: list[list[int]], starts: list[int], width: int, rows: int) -> Rows:
    """As many rows of `width` tokens for every request as its part needs, one behind the other, of `rows` rows."""
    cut = Rows([], [], [], [])
    assert cut.first_rows is not None
    for number, part, start in zip(numbers, parts, starts):
        first = len(cut.numbers)
        for at in range(0, len(part), width):
            cut.numbers.append(number)
            cut.parts.append(part[at : at + width])
            cut.starts.append(start + at)
            cut.first_rows.append(first)
    cut.first_rows.extend(range(len(cut.numbers), rows))
    return cut


def token_ids(number: int, tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens of a request as ints. TypeError or ValueError for none, for what is no int, or outside the vocabulary.

    `tokens`: a sequence, an array or a tensor of one dimension.
    """
    values = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if not isinstance(values, list) or not values:
        given = "0 tokens" if values == [] else f"tokens {values!r}"
        raise ValueError(f"request {number}: {given}, allowed: a list of >= 1")
    ids = []
    for value in values:
        try:
            ids.append(operator.index(value))
        except TypeError:
            raise TypeError(f"request {number}: token id {value!r}, allowed: an int") from None
        if not 0 <= ids[-1] < vocab_size:
            raise ValueError(f"request {number}: token id {value}, allowed: 0 to {vocab_size - 1}")
    return ids
