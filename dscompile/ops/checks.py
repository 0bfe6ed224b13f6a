"""Argument checks shared by references and fake functions. Every message names operation, argument, value and rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int64, torch.int32)


class Check:
    """The checks of one operation. Conditions may be symbolic: they then become guards, as torch._check does."""

    def __init__(self, op: str) -> None:
        self.op = op

    def message(self, argument: str, value: object, allowed: object) -> str:
        return f"dsv4::{self.op}: {argument} is {value}; allowed: {allowed}"

    def that(self, ok: Any, argument: str, value: object, allowed: object) -> None:
        """ValueError unless `ok` (a bool or a torch.SymBool)."""
        if ok is not True:
            torch._check_value(ok, lambda: self.message(argument, value, allowed))

    def choice(self, argument: str, value: str, allowed: Sequence[str]) -> None:
        self.that(value in allowed, argument, repr(value), ", ".join(map(repr, allowed)))

    def positive(self, argument: str, value: Any) -> None:
        self.that(value > 0, argument, value, "> 0")

    def dtype(self, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
        """TypeError unless the tensor has one of these dtypes."""
        if tensor.dtype not in allowed:
            raise TypeError(self.message(f"dtype of {argument}", tensor.dtype, ", ".join(map(str, allowed))))

    def rank(self, argument: str, tensor: Tensor, rank: int, layout: str) -> None:
        self.that(tensor.dim() == rank, f"shape of {argument}", list(tensor.shape), layout)

    def min_rank(self, argument: str, tensor: Tensor, rank: int, layout: str) -> None:
        self.that(tensor.dim() >= rank, f"shape of {argument}", list(tensor.shape), layout)

    def shape(self, argument: str, tensor: Tensor, shape: Sequence[Any]) -> None:
        """The tensor has exactly this shape."""
        ok = tensor.dim() == len(shape)
        self.that(ok, f"shape of {argument}", list(tensor.shape), list(shape))
        for have, want in zip(tensor.shape, shape, strict=True):
            self.that(have == want, f"shape of {argument}", list(tensor.shape), list(shape))

    def broadcasts(self, argument: str, tensor: Tensor, shape: Sequence[Any]) -> None:
        """The tensor broadcasts to this shape without enlarging it."""
        allowed = f"broadcastable to {list(shape)}"
        self.that(tensor.dim() <= len(shape), f"shape of {argument}", list(tensor.shape), allowed)
        for have, want in zip(reversed(tensor.shape), reversed(list(shape))):  # noqa: B905 - the shorter one ends it
            if not (isinstance(have, int) and have == 1):
                self.that(have == want, f"shape of {argument}", list(tensor.shape), allowed)

    def index_range(self, argument: str, index: Tensor, low: int, high: int, meaning: str) -> None:
        """IndexError unless every element is in [low, high). Reads the data: references only."""
        bad = index[(index < low) | (index >= high)]
        if bad.numel():
            raise IndexError(self.message(argument, int(bad[0]), f"{low} <= {argument} < {high} ({meaning})"))
