"""Matrix products of the same rows with several weights, and of rows that are normalised first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.norm import MODES, rms_norm
from dscompile.ops.registry import define

_LINEARS = Check("linears")
_NORM_LINEAR = Check("norm_linear")


def _validate_linears(x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor | None) -> list[Tensor]:
    """Check the arguments and return the weights that are given."""
    _LINEARS.rank("x", x, 2, "[M, K]")
    _LINEARS.dtype("x", x, FLOATS)
    _LINEARS.that(w2 is not None or w3 is None, "w3", "given", "None without w2")
    given = [(name, w) for name, w in (("w0", w0), ("w1", w1), ("w2", w2), ("w3", w3)) if w is not None]
    for name, w in given:
        _LINEARS.rank(name, w, 2, "[N, K]")
        _LINEARS.dtype(name, w, (x.dtype,))
        _LINEARS.shape(name, w, (w.shape[0], x.shape[1]))
    return [w for _, w in given]


def linears(x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor | None) -> Tensor:
    """x [M, K], w_i [N_i, K] of x's dtype -> [M, N_0 + N_1 + ..]: the x @ w_i.T side by side, summed in fp32."""
    return torch.cat([F.linear(x, w) for w in _validate_linears(x, w0, w1, w2, w3)], -1)


def _fake_linears(x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor | None) -> Tensor:
    given = _validate_linears(x, w0, w1, w2, w3)
    return x.new_empty((x.shape[0], sum(w.shape[0] for w in given)))


@costed
def _cost_linears(M: Any, K: Any, N: Any, x_bytes: Any = 2) -> Cost:
    """M rows of K values times N rows of all weights together."""
    return Cost((M * K + N * K) * x_bytes, M * N * x_bytes, 2 * M * K * N)


def _sizes_linears(x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor | None) -> dict[str, Any]:
    rows = sum(w.shape[0] for w in (w0, w1, w2, w3) if w is not None)
    return {"M": x.shape[0], "K": x.shape[1], "N": rows, "x_bytes": x.element_size()}


define(
    "linears(Tensor x, Tensor w0, Tensor w1, Tensor? w2, Tensor? w3) -> Tensor",
    family="linear", reference=linears, fake=_fake_linears, cost=_cost_linears, sizes=_sizes_linears,
)  # fmt: skip


def _validate_norm_linear(x: Tensor, norm_weight: Tensor | None, eps: float, rounding: str, weight: Tensor) -> None:
    check = _NORM_LINEAR
    check.choice("rounding", rounding, MODES)
    check.rank("x", x, 2, "[M, K]")
    check.dtype("x", x, FLOATS)
    check.that(eps >= 0, "eps", eps, ">= 0")
    if norm_weight is not None:
        check.dtype("norm_weight", norm_weight, FLOATS)
        check.shape("norm_weight", norm_weight, x.shape[1:])
        if rounding != "fp32" and torch.promote_types(x.dtype, norm_weight.dtype) != x.dtype:
            check.dtype("norm_weight", norm_weight, (x.dtype,))  # the norm would not be of x's dtype
    check.rank("weight", weight, 2, "[N, K]")
    check.dtype("weight", weight, (x.dtype,))
    check.shape("weight", weight, (weight.shape[0], x.shape[1]))


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, rounding: str, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """x [M, K], norm_weight [K] or None, weight [N, K] of x's dtype -> (y [M, N], normed [M, K]), both in x.dtype.

    normed is `rms_norm(x, norm_weight, eps, rounding)`, y is `F.linear(normed, weight)`. In the roundings other than
    "fp32", where the norm has the promoted dtype of x and norm_weight, that must be x's.
    """
    _validate_norm_linear(x, norm_weight, eps, rounding, weight)
    normed = rms_norm(x, norm_weight, eps, rounding)
    return F.linear(normed, weight), normed


def _fake_norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, rounding: str, weight: Tensor
) -> tuple[Tensor, Tensor]:
    _validate_norm_linear(x, norm_weight, eps, rounding, weight)
    return x.new_empty((x.shape[0], weight.shape[0])), x.new_empty(x.shape)


@costed
def _cost_norm_linear(M: Any, K: Any, N: Any, x_bytes: Any = 2, norm_bytes: Any = 4) -> Cost:
    """M rows of K values, normalised, times N rows of the weight."""
    return Cost((M * K + N * K) * x_bytes + K * norm_bytes, M * (N + K) * x_bytes, 2 * M * K * N)


def _sizes_norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, rounding: str, weight: Tensor
) -> dict[str, Any]:
    norm_bytes = 0 if norm_weight is None else norm_weight.element_size()
    return {"M": x.shape[0], "K": x.shape[1], "N": weight.shape[0], "x_bytes": x.element_size(),
            "norm_bytes": norm_bytes}  # fmt: skip


define(
    "norm_linear(Tensor x, Tensor? norm_weight, float eps, str rounding, Tensor weight) -> (Tensor y, Tensor normed)",
    family="linear", reference=norm_linear, fake=_fake_norm_linear, cost=_cost_norm_linear, sizes=_sizes_norm_linear,
)  # fmt: skip
