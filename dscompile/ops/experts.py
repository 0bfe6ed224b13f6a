"""The routed experts: per token, a weighted sum of k gated feed-forward networks."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops.checks import FLOATS, INTEGERS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import define

_CHECK = Check("experts")


def _validate(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, out_dtype: torch.dtype) -> None:
    _CHECK.rank("x", x, 2, "[N, D]")
    _CHECK.dtype("x", x, FLOATS)
    _CHECK.rank("indices", indices, 2, "[N, k]")
    _CHECK.dtype("indices", indices, INTEGERS)
    _CHECK.shape("indices", indices, (x.shape[0], indices.shape[1]))
    _CHECK.dtype("weights", weights, FLOATS)
    _CHECK.shape("weights", weights, indices.shape)
    _CHECK.rank("w13", w13, 3, "[E, 2 I, D]")
    _CHECK.dtype("w13", w13, (x.dtype,))
    _CHECK.that(w13.shape[1] % 2 == 0, "middle axis of w13", w13.shape[1], "an even number: rows of w1, then of w3")
    _CHECK.shape("w13", w13, (w13.shape[0], w13.shape[1], x.shape[1]))
    _CHECK.dtype("w2", w2, (x.dtype,))
    _CHECK.shape("w2", w2, (w13.shape[0], x.shape[1], w13.shape[1] // 2))
    if out_dtype not in FLOATS:
        raise TypeError(_CHECK.message("out_dtype", out_dtype, ", ".join(map(str, FLOATS))))


def clamped_silu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up, gate at most `limit` and up within +-limit; no clamp if limit is <= 0 or infinite."""
    if 0 < limit < math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, weight_before_down: bool,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x [N, D], indices and weights [N, k], w13 [E, 2I, D] (w1 rows, then w3 rows), w2 [E, D, I] -> [N, D].

    For each chosen expert: gate, up = x w1^T, x w3^T; act = clamped_silu(gate, up).
    weight_before_down (V4.1): act and weight in fp32, product rounded to x.dtype, then w2; the k results are summed
    in fp32. Otherwise (V4, the rounding of transformers' grouped form): act in x.dtype, then w2, then the weight.
    Index -1 is skipped; another index outside [0, E) raises IndexError. An expert that got no token is not computed,
    and adds exactly 0.
    """
    _validate(x, indices, weights, w13, w2, out_dtype)
    _CHECK.index_range("indices", indices, -1, w13.shape[0], "number of experts; -1 is skipped")
    tokens, k = indices.shape
    flat_indices, flat_weights = indices.reshape(-1), weights.reshape(-1, 1)
    result_dtype = torch.float32 if weight_before_down else torch.promote_types(x.dtype, weights.dtype)
    results = x.new_zeros((tokens * k, x.shape[1]), dtype=result_dtype)
    for expert in torch.unique(flat_indices).tolist():
        if expert < 0:
            continue
        chosen = (flat_indices == expert).nonzero().squeeze(1)
        gate, up = F.linear(x[chosen // k], w13[expert]).chunk(2, -1)
        if weight_before_down:
            act = clamped_silu(gate.float(), up.float(), limit) * flat_weights[chosen].float()
            results[chosen] = F.linear(act.to(x.dtype), w2[expert]).float()
        else:
            results[chosen] = F.linear(clamped_silu(gate, up, limit), w2[expert]) * flat_weights[chosen]
    return results.view(tokens, k, x.shape[1]).sum(1).to(out_dtype)


def _fake(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, weight_before_down: bool,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    _validate(x, indices, weights, w13, w2, out_dtype)
    return x.new_empty(x.shape, dtype=out_dtype)


@costed
def _cost(
    N: Any, k: Any, E: Any, D: Any, I: Any, ranks: Any = 1, x_bytes: Any = 2, out_bytes: Any = 2,  # noqa: E741
    weight_bytes: Any = 2,
) -> Cost:  # fmt: skip
    """N tokens on this device, k of E experts each, spread over `ranks` devices.

    Weights read: those of the experts that get a token when the choice is uniform, E (1 - (1 - k/E)^N).
    Links, with ranks > 1: a token goes to each distinct remote rank once as FP8 with one scale byte in 32 values, and
    comes back from it in bf16; a token meets ranks * (1 - C(E - E/ranks, k) / C(E, k)) distinct ranks.
    """
    idle = 1 - k / E
    touched = E * (1 - (sympy.Float(idle) if idle.is_number else idle) ** N)
    met = 1 - sympy.binomial(E - E / ranks, k) / sympy.binomial(E, k)
    link = N * (ranks - 1) * met * (D + D / 32 + 2 * D)
    read = N * (D * x_bytes + k * 12) + touched * 3 * D * I * weight_bytes
    return Cost(read, N * D * out_bytes, 6 * N * k * D * I, sympy.Integer(0) if ranks == 1 else link)


def _sizes(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, before: bool,
           out_dtype: torch.dtype) -> dict[str, Any]:  # fmt: skip
    return {
        "N": x.shape[0], "k": indices.shape[1], "E": w13.shape[0], "D": x.shape[1], "I": w2.shape[2],
        "x_bytes": x.element_size(), "out_bytes": out_dtype.itemsize, "weight_bytes": w13.element_size(),
    }  # fmt: skip


define(
    "experts(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w2, float limit, bool weight_before_down, "
    "ScalarType out_dtype) -> Tensor",
    family="experts", reference=experts, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
