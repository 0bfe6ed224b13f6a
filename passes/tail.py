"""The last tokens of each sequence: where they are, and picking their rows.

Sequences of a batch are padded at the end, which has been proven, and differ in length: a tail of r tokens begins at
`max(count - r, 0)`, count being the tokens that are not padding. Where a sequence is shorter than that, its tail is its
first r rows, padding included, and everything about them stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from dscompile.passes.engine.fxutil import emit, fake_mode

aten = torch.ops.aten


@dataclass
class Tails:
    """Nodes of one graph that name and pick tokens.

    positions: int64 [B, T], all of the graph's; what follows from it alone is put right behind it. batch: B.
    """

    positions: Node
    batch: int
    _starts: dict[int, Node] = field(default_factory=dict)
    _indices: dict[Any, Node] = field(default_factory=dict)
    _picked: dict[Any, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.positions.graph
        self._mode = fake_mode(self.graph.owning_module)  # type: ignore[arg-type]
        self._end = self.positions.next
        self._integers = {"dtype": torch.int64, "device": self.positions.meta["val"].device, "pin_memory": False}
        valid = self._early(aten.ge.Scalar, self.positions, 0)
        self.count = self._early(aten.sum.dim_IntList, valid, [1], True)
        self.length = self._early(aten.sym_size.int, self.positions, 1)
        sequences = self._early(aten.arange.start_step, 0, batch := self.batch, 1, **self._integers)
        self.sequence = self._early(aten.reshape.default, sequences, [batch, 1])

    def _early(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node behind the positions and all that was put there before."""
        with self.graph.inserting_before(self._end):
            return emit(self.graph, target, args, kwargs, like=self.positions, mode=self._mode)

    def start(self, tokens: int) -> Node:
        """int64 [B, 1]: the first token of the tail."""
        if tokens not in self._starts:
            longer = self._early(aten.sub.Tensor, self.count, tokens)
            self._starts[tokens] = self._early(aten.clamp.default, longer, 0)
        return self._starts[tokens]

    def index(self, tokens: int, within: int | None = None) -> Node:
        """int64 [B, tokens]: the tail's places in the sequence, or in a longer tail of `within` tokens."""
        key = (tokens, within)
        if key not in self._indices:
            first = self.start(tokens)
            if within is not None:
                first = self._early(aten.sub.Tensor, first, self.start(within))
            steps = self._early(aten.arange.start_step, 0, tokens, 1, **self._integers)
            self._indices[key] = self._early(aten.add.Tensor, first, steps)
        return self._indices[key]

    def _flat_index(self, tokens: int, within: int | None) -> Node:
        """int64 [B * tokens]: the same places where sequences lie one behind the other."""
        key = ("flat", tokens, within)
        if key not in self._indices:
            begin = self._early(aten.mul.Tensor, self.sequence, self.length if within is None else within)
            places = self._early(aten.add.Tensor, begin, self.index(tokens, within))
            self._indices[key] = self._early(aten.reshape.default, places, [self.batch * tokens])
        return self._indices[key]

    def pick(self, value: Node, lead: int, tokens: int, within: int | None, user: Node) -> Node:
        """The tail's rows of `value`, which holds all tokens or (`within`) those of a longer tail; before `user`."""
        key = (value, lead, tokens, within)
        if key not in self._picked:
            if lead == 2:
                index = [self.sequence, self.index(tokens, within)]
            else:
                index = [self._flat_index(tokens, within)]
            with self.graph.inserting_before(user):
                self._picked[key] = emit(self.graph, aten.index.Tensor, (value, index), like=user, mode=self._mode)
        return self._picked[key]

    def hide_history(self, before: int, tokens: int) -> tuple[Node, Node]:
        """For windows that end where the tail begins: an order [B, before + tokens] of window rows, and [B] where it
        starts.

        Where tokens were left out in front of the tail, the `before` rows of history are others than its first row
        says. They move behind the chunk's rows, to positions that no query sees.
        """
        key = ("hide", before, tokens)
        if key not in self._indices:
            longer = self._early(aten.gt.Scalar, self.count, tokens)
            cut = self._early(aten._to_copy.default, longer, dtype=torch.int64)
            shift = self._early(aten.mul.Tensor, cut, before)
            steps = self._early(aten.arange.start_step, 0, before + tokens, 1, **self._integers)
            turned = self._early(aten.add.Tensor, shift, steps)
            self._indices[key] = self._early(aten.remainder.Scalar, turned, before + tokens)
            last = self._early(aten.slice.Tensor, self.index(tokens), 1, 0, 1)
            first = self._early(aten.gather.default, self.positions, 1, last)
            shown = self._early(aten.add.Tensor, self._early(aten.sub.Tensor, first, before), shift)
            self._starts[key] = self._early(aten.reshape.default, shown, [self.batch])  # type: ignore[index]
        return self._indices[key], self._starts[key]  # type: ignore[index]
