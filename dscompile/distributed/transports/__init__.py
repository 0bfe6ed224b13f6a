"""How rows get from rank to rank. A transport is a module here with a class of the `Transport` form.

name          module         needs
collectives   collectives    torch.distributed with gloo or NCCL; the default
symmetric     symmetric      GPUs that torch's symmetric memory connects
deep_ep       deepep         the package deep_ep
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
from torch import Tensor

from dscompile.distributed.routing import Spec

_MODULES = {"collectives": "collectives", "symmetric": "symmetric", "deep_ep": "deepep"}
TRANSPORTS = tuple(_MODULES)


class Exchange(Protocol):
    """One layer's exchange under way. The three calls come in this order, once each."""

    def arrive(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the rows of this rank's experts: x [M, D], slots int64 [M, k] (-1: none), weights [M, k]."""

    def combine(self, sums: Tensor) -> None:
        """Start to send the sums [M, D] of those rows back."""

    def finish(self) -> Tensor:
        """Wait for the sums of this rank's own tokens and add them up: fp32 [N, D]."""


class Transport(Protocol):
    """Starts exchanges; holds what outlives one (buffers, streams)."""

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor, table: Tensor, spec: Spec) -> Exchange:
        """Start to send x [N, D] to its experts: indices int64 [N, k] (-1: none), weights [N, k], `slot_table`.

        Every rank of the group calls it, with as many tokens as it has, 0 included.
        """


_LOADED: dict[tuple[str, str], Transport] = {}


def transport(name: str, group: str) -> Transport:
    """The transport of a group, made once.

    Raises:
        ValueError: an unknown name, or one whose package or hardware is missing here; the message says which.
    """
    if name not in _MODULES:
        raise ValueError(f"transport: {name!r}, allowed: {', '.join(TRANSPORTS)}")
    if (name, group) not in _LOADED:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        _LOADED[name, group] = module.connect(group)
    return _LOADED[name, group]


def forget(group: str) -> None:
    """Drop the transports of a group that is about to be destroyed."""
    for key in [key for key in _LOADED if key[1] == group]:
        del _LOADED[key]


def checked_indices(indices: Tensor, experts: int) -> Tensor:
    """`indices`, on a CPU checked to lie in -1 .. experts - 1 (a GPU is not made to wait for it)."""
    if indices.device.type == "cpu" and indices.numel():
        low, high = (int(value) for value in torch.aminmax(indices))
        if low < -1 or high >= experts:
            raise IndexError(f"expert {high if high >= experts else low}, allowed: -1 to {experts - 1}")
    return indices


def refuse_capture(what: str) -> None:
    """RuntimeError while a CUDA graph is being captured: what talks to other ranks' drivers cannot be made then."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} makes its buffers at the first exchange of a size, here while a CUDA graph is captured; allowed: "
            "one step of that size before the capture"
        )
