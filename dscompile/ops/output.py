"""The grouped low-rank output projection of attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

_CHECK = Check("grouped_output")


def _validate(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> None:
    _CHECK.min_rank("o", o, 2, "[..., G, D in]")
    _CHECK.dtype("o", o, FLOATS)
    _CHECK.rank("wo_a", wo_a, 3, "[G, R, D in]")
    _CHECK.dtype("wo_a", wo_a, (o.dtype,))
    _CHECK.shape("wo_a", wo_a, (o.shape[-2], wo_a.shape[1], o.shape[-1]))
    _CHECK.rank("wo_b", wo_b, 2, "[D out, G * R]")
    _CHECK.dtype("wo_b", wo_b, (o.dtype,))
    _CHECK.shape("wo_b", wo_b, (wo_b.shape[0], wo_a.shape[0] * wo_a.shape[1]))


def grouped_output(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    """o [..., G, Din], wo_a [G, R, Din], wo_b [Dout, G R] -> [..., Dout].

    Each group of heads is projected by its own matrix; the G R results go through one linear map. Both products
    round to the dtype of o.
    """
    _validate(o, wo_a, wo_b)
    groups, _, width = wo_a.shape
    grouped = o.reshape(-1, groups, width).transpose(0, 1)
    low = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1)
    return F.linear(low.reshape(*o.shape[:-2], wo_b.shape[1]), wo_b)


def _fake(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    _validate(o, wo_a, wo_b)
    return o.new_empty((*o.shape[:-2], wo_b.shape[0]))


@costed
def _cost(N: Any, G: Any, Din: Any, R: Any, Dout: Any, x_bytes: Any = 2, weight_bytes: Any = 2) -> Cost:
    """N tokens: G products Din -> R, one product G R -> Dout."""
    weights = G * R * (Din + Dout)
    return Cost(N * G * Din * x_bytes + weights * weight_bytes, N * Dout * x_bytes, 2 * N * weights)


def _sizes(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> dict[str, Any]:
    return {
        "N": math.prod(o.shape[:-2]), "G": o.shape[-2], "Din": o.shape[-1], "R": wo_a.shape[1], "Dout": wo_b.shape[0],
        "x_bytes": o.element_size(), "weight_bytes": wo_a.element_size(),
    }  # fmt: skip


define(
    "grouped_output(Tensor o, Tensor wo_a, Tensor wo_b) -> Tensor",
    family="output", reference=grouped_output, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
