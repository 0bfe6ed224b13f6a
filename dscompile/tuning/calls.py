"""Calls of vocabulary operations as data: what a model needs kernels for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dscompile.ops import NAMESPACE, OPS, Cost


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Of a real, fake or meta tensor with sizes that are known numbers."""
        return TensorSpec(tuple(int(s) for s in tensor.shape), tuple(int(s) for s in tensor.stride()), tensor.dtype)

    def meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Call:
    """One operation with its arguments. count: how often a step of the model makes it."""

    op: str
    args: tuple[Any, ...]  # in schema order, every argument given; tensors as TensorSpec
    count: int = 1

    def meta_args(self) -> tuple[Any, ...]:
        """The arguments with meta tensors."""
        return tuple(arg.meta() if isinstance(arg, TensorSpec) else arg for arg in self.args)

    def named(self) -> dict[str, Any]:
        """The same by name."""
        return {a.name: value for a, value in zip(OPS[self.op].op._schema.arguments, self.meta_args())}

    def sizes(self) -> dict[str, Any]:
        """The sizes that the op's cost is a function of."""
        return OPS[self.op].sizes(*self.meta_args())

    def cost(self) -> Cost:
        """Of one call."""
        return OPS[self.op].cost_of(*self.meta_args())

    def __str__(self) -> str:
        return f"{NAMESPACE}::{self.op}({', '.join(map(str, self.args))})"


def merged(calls: Iterable[Call]) -> list[Call]:
    """Equal calls joined, their counts added, in the order in which they first come."""
    found: dict[Call, int] = {}
    for call in calls:
        one = replace(call, count=1)
        found[one] = found.get(one, 0) + call.count
    return [replace(call, count=count) for call, count in found.items()]
