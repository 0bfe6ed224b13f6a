"""A whole mixture of experts: routed experts, shared expert, their sum, and the way back into the residual streams.

`experts`, three products with the shared expert's weights, and `hc_post` in one operation. Lowerings make it of those.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.ops import experts as routed_experts
from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.cost import Cost, costed
from dscompile.ops.experts import clamped_silu, experts
from dscompile.ops.mhc import hc_post
from dscompile.ops.registry import define

_CHECK = Check("moe")


def check_streams(check: Check, x: Tensor, streams: Tensor | None, post: Tensor | None, comb: Tensor | None) -> None:
    """All of them for the tokens of x [N, D], or none."""
    given = [value is not None for value in (streams, post, comb)]
    allowed = "all of streams, post and comb, or none"
    check.that(len(set(given)) == 1, "(streams, post, comb) given", tuple(given), allowed)
    if streams is None or post is None or comb is None:
        return
    check.rank("streams", streams, 3, "[N, n, D]")
    tokens, n = x.shape[0], streams.shape[1]
    for name, tensor, shape in (
        ("streams", streams, (tokens, n, x.shape[1])), ("post", post, (tokens, n)), ("comb", comb, (tokens, n, n)),
    ):  # fmt: skip
        check.dtype(name, tensor, FLOATS)
        check.shape(name, tensor, shape)


def _check_shared(x: Tensor, shared_gate: Tensor, shared_up: Tensor, shared_down: Tensor) -> None:
    _CHECK.rank("shared_gate", shared_gate, 2, "[S, D]")
    inner, size = shared_gate.shape[0], x.shape[1]
    for name, tensor, shape in (
        ("shared_gate", shared_gate, (inner, size)), ("shared_up", shared_up, (inner, size)),
        ("shared_down", shared_down, (size, inner)),
    ):  # fmt: skip
        _CHECK.dtype(name, tensor, (x.dtype,))
        _CHECK.shape(name, tensor, shape)


def joined(
    routed: Tensor, shared: Tensor, streams: Tensor | None, post: Tensor | None, comb: Tensor | None, fp32: bool
) -> Tensor:
    """The sum in fp32, rounded to the dtype of `shared`, and `hc_post` of it if there are streams."""
    y = (routed.float() + shared.float()).to(shared.dtype)
    if streams is None or post is None or comb is None:
        return y
    return hc_post(y, streams, post, comb, fp32)


def like_joined(x: Tensor, streams: Tensor | None) -> Tensor:
    return x.new_empty(x.shape) if streams is None else streams.new_empty(streams.shape)


def moe(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float, weight_before_down: bool, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool,
) -> Tensor:  # fmt: skip
    """x [N, D] -> y [N, D] in x.dtype, or with streams [N, n, D], post [N, n], comb [N, n, n] -> [N, n, D].

    x to limit and weight_before_down are the arguments of `experts`, its sum comes in routed_dtype. The shared expert
    of every token has shared_gate and shared_up [S, D], shared_down [D, S]: gate, up = x shared_gate^T, x shared_up^T
    in x.dtype; act = clamped_silu(gate, up), weight_before_down: in fp32 and then rounded to x.dtype, otherwise in
    x.dtype; s = act shared_down^T in x.dtype. y = routed + s in fp32, rounded to x.dtype. With streams: hc_post(y,
    streams, post, comb, fp32), in their dtype.
    """
    _validate(x, shared_gate, shared_up, shared_down, streams, post, comb)
    routed = experts(x, indices, weights, w13, w2, limit, weight_before_down, routed_dtype)
    kind = torch.float32 if weight_before_down else x.dtype
    act = clamped_silu(F.linear(x, shared_gate).to(kind), F.linear(x, shared_up).to(kind), limit).to(x.dtype)
    return joined(routed, F.linear(act, shared_down), streams, post, comb, fp32)


def _validate(
    x: Tensor, shared_gate: Tensor, shared_up: Tensor, shared_down: Tensor, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None,
) -> None:  # fmt: skip
    _CHECK.rank("x", x, 2, "[N, D]")
    _CHECK.dtype("x", x, FLOATS)
    _check_shared(x, shared_gate, shared_up, shared_down)
    check_streams(_CHECK, x, streams, post, comb)


def _fake(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float, weight_before_down: bool, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool,
) -> Tensor:  # fmt: skip
    _validate(x, shared_gate, shared_up, shared_down, streams, post, comb)
    routed_experts._validate(x, indices, weights, w13, w2, routed_dtype)
    return like_joined(x, streams)


@costed
def cost_of_moe(
    N: Any, k: Any, E: Any, D: Any, I: Any, S: Any, n: Any, x_bytes: Any = 2, weight_bytes: Any = 2,  # noqa: E741
    shared_bytes: Any = 2, stream_bytes: Any = 2, gate_bytes: Any = 4,
) -> Cost:  # fmt: skip
    """N tokens, k of E experts each, a shared expert with S inner values, n streams (0: the sum is the result).

    Weights read: those of the shared expert and of the experts that get a token when the choice is uniform.
    """
    routed = routed_experts._cost(N=N, k=k, E=E, D=D, I=I, x_bytes=x_bytes, weight_bytes=weight_bytes)
    streams = N * n * D * stream_bytes
    read = routed.read_bytes + 3 * D * S * shared_bytes + streams + N * (n + n * n) * gate_bytes
    write = streams + (1 - sympy.Min(n, 1)) * N * D * x_bytes
    return Cost(read, write, routed.flops + 6 * N * D * S + 2 * N * n * (n + 1) * D)


def sizes_of_streams(streams: Tensor | None, post: Tensor | None) -> dict[str, Any]:
    if streams is None or post is None:
        return {"n": 0}
    return {"n": streams.shape[1], "stream_bytes": streams.element_size(), "gate_bytes": post.element_size()}


def _sizes(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float, weight_before_down: bool, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool,
) -> dict[str, Any]:  # fmt: skip
    return {
        "N": x.shape[0], "k": indices.shape[1], "E": w13.shape[0], "D": x.shape[1], "I": w2.shape[2],
        "S": shared_gate.shape[0], "x_bytes": x.element_size(), "weight_bytes": w13.element_size(),
        "shared_bytes": shared_gate.element_size(), **sizes_of_streams(streams, post),
    }  # fmt: skip


define(
    "moe(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w2, Tensor shared_gate, Tensor shared_up, "
    "Tensor shared_down, float limit, bool weight_before_down, ScalarType routed_dtype, Tensor? streams, Tensor? post, "
    "Tensor? comb, bool fp32) -> Tensor",
    family="experts", reference=moe, fake=_fake, cost=cost_of_moe, sizes=_sizes,
)  # fmt: skip
