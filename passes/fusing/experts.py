"""Routed experts, shared expert, their sum, and the way back into the residual streams."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.dialects.common.units import with_unit_sizes
from dscompile.passes.engine import Match, Pattern, Reject

_INPUTS = {
    "x": "act[b*t D]", "weights": "w[b*t k]", "indices": "i64[b*t k]", "w13": "act[E 2*I D]", "w2": "act[E D I]",
    "shared_gate": "act[S D]", "shared_up": "act[S D]", "shared_down": "act[D S]",
}  # fmt: skip
_STREAMS = {"streams": "act[b t n D]", "post": "f32[b t n]", "comb": "f32[b t n n]"}
_SCALARS = {"limit": 12.3456}


def _clamps(match: Match) -> Reject | None:
    """The operation takes a limit of 0 or less for none; what is fused here really clamps."""
    limit = match.scalars["limit"]
    return None if 0 < limit < math.inf else Reject(f"a limit of {limit}, allowed: above 0 and finite")


def _sum(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float,
) -> Tensor:  # fmt: skip
    routed = torch.ops.dsv4.experts(x, indices, weights, w13, w2, limit, True, torch.float32)
    gate, up = F.linear(x, shared_gate), F.linear(x, shared_up)
    act = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (routed + F.linear(act.to(x.dtype), shared_down).float()).to(x.dtype)


def _moe(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float, before: bool,
) -> Tensor:  # fmt: skip
    return torch.ops.dsv4.moe(  # type: ignore[no-any-return]
        x, indices, weights, w13, w2, shared_gate, shared_up, shared_down, limit, before,
        torch.float32 if before else x.dtype, None, None, None, True,
    )  # fmt: skip


def _sum_op(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float,
) -> Tensor:  # fmt: skip
    return _moe(x, weights, indices, w13, w2, shared_gate, shared_up, shared_down, limit, True)


def _rounded_sum(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float,
) -> Tensor:  # fmt: skip
    """transformers' V4: everything is rounded to the dtype of the activations."""
    routed = torch.ops.dsv4.experts(x.flatten(0, 1), indices, weights, w13, w2, limit, False, x.dtype)
    gate, up = F.linear(x, shared_gate).clamp(max=limit), F.linear(x, shared_up).clamp(-limit, limit)
    return routed.unflatten(0, x.shape[:2]) + F.linear(F.silu(gate) * up, shared_down)  # type: ignore[no-any-return]


def _rounded_sum_op(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float,
) -> Tensor:  # fmt: skip
    y = _moe(x.flatten(0, 1), weights, indices, w13, w2, shared_gate, shared_up, shared_down, limit, False)
    return y.unflatten(0, x.shape[:2])


def _streams(before: bool, fp32: bool) -> Pattern:
    def search(
        x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
        shared_down: Tensor, limit: float, streams: Tensor, post: Tensor, comb: Tensor,
    ) -> Tensor:  # fmt: skip
        y = _moe(x, weights, indices, w13, w2, shared_gate, shared_up, shared_down, limit, before)
        return torch.ops.dsv4.hc_post(y.unflatten(0, streams.shape[:2]), streams, post, comb, fp32)  # type: ignore[no-any-return]

    def replace(
        x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w2: Tensor, shared_gate: Tensor, shared_up: Tensor,
        shared_down: Tensor, limit: float, streams: Tensor, post: Tensor, comb: Tensor,
    ) -> Tensor:  # fmt: skip
        out = torch.ops.dsv4.moe(
            x, indices, weights, w13, w2, shared_gate, shared_up, shared_down, limit, before,
            torch.float32 if before else x.dtype, streams.flatten(0, 1), post.flatten(0, 1), comb.flatten(0, 1), fp32,
        )  # fmt: skip
        return out.unflatten(0, streams.shape[:2])

    return Pattern(
        f"moe.streams.{int(before)}{int(fp32)}", "experts", "fusing", search, replace,
        inputs={**_INPUTS, **_STREAMS}, scalars=_SCALARS, key=torch.ops.dsv4.moe.default,
    )  # fmt: skip


_STORED = {
    "x": "act[b*t 32*g]", "weights": "f32[b*t k]", "indices": "i64[b*t k]", "w13": "u8[E 64*j 16*g]",
    "w13_scale": "u8[E 64*j g]", "w2": "u8[E 32*g 16*j]", "w2_scale": "u8[E 32*g j]", "gate": "e4m3[32*s 32*g]",
    "gate_scale": "u8[s g]", "up": "e4m3[32*s 32*g]", "up_scale": "u8[s g]", "down": "e4m3[32*g 32*s]",
    "down_scale": "u8[g s]",
}  # fmt: skip
_STORED_STREAMS = {"streams": "act[b t n 32*g]", "post": "f32[b t n]", "comb": "f32[b t n n]"}


def _stored_sum(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor, limit: float,
) -> Tensor:  # fmt: skip
    linear = torch.ops.dsv4.linear_packed
    routed = torch.ops.dsv4.experts_packed(
        x, indices, weights, w13, w13_scale, w2, w2_scale, limit, "e2m1_1x32", torch.float32
    )
    g, u = linear(x, gate, gate_scale).float(), linear(x, up, up_scale).float()
    act = (F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)).to(x.dtype)
    return (routed + linear(act, down, down_scale).float()).to(x.dtype)  # type: ignore[no-any-return]


def _stored_sum_op(
    x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor, limit: float,
) -> Tensor:  # fmt: skip
    return torch.ops.dsv4.moe_packed(  # type: ignore[no-any-return]
        x, indices, weights, w13, w13_scale, w2, w2_scale, gate, gate_scale, up, up_scale, down, down_scale, limit,
        "e2m1_1x32", torch.float32, None, None, None, True,
    )  # fmt: skip


def _stored_streams(fp32: bool) -> Pattern:
    def search(
        x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
        gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor, limit: float,
        streams: Tensor, post: Tensor, comb: Tensor,
    ) -> Tensor:  # fmt: skip
        y = _stored_sum_op(
            x, weights, indices, w13, w13_scale, w2, w2_scale, gate, gate_scale, up, up_scale, down, down_scale, limit
        )
        return torch.ops.dsv4.hc_post(y.unflatten(0, streams.shape[:2]), streams, post, comb, fp32)  # type: ignore[no-any-return]

    def replace(
        x: Tensor, weights: Tensor, indices: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
        gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor, limit: float,
        streams: Tensor, post: Tensor, comb: Tensor,
    ) -> Tensor:  # fmt: skip
        out = torch.ops.dsv4.moe_packed(
            x, indices, weights, w13, w13_scale, w2, w2_scale, gate, gate_scale, up, up_scale, down, down_scale, limit,
            "e2m1_1x32", torch.float32, streams.flatten(0, 1), post.flatten(0, 1), comb.flatten(0, 1), fp32,
        )  # fmt: skip
        return out.unflatten(0, streams.shape[:2])

    return Pattern(
        f"moe_packed.streams.{int(fp32)}", "experts", "fusing", search, replace,
        inputs={**_STORED, **_STORED_STREAMS}, scalars=_SCALARS, key=torch.ops.dsv4.moe_packed.default,
    )  # fmt: skip


_BASE = (
    Pattern("moe.sum", "experts", "fusing", _sum, _sum_op, inputs=_INPUTS, scalars=_SCALARS, guard=_clamps),
    Pattern(
        "moe_packed.sum", "experts", "fusing", _stored_sum, _stored_sum_op, inputs=_STORED, scalars=_SCALARS,
        key=torch.ops.dsv4.experts_packed.default, guard=_clamps,
    ),
    Pattern(
        "moe.rounded", "experts", "fusing", _rounded_sum, _rounded_sum_op, inputs={**_INPUTS, "x": "act[b t D]"},
        scalars=_SCALARS, key=torch.ops.dsv4.experts.default, guard=_clamps,
    ),
    *(_streams(before, fp32) for before in (True, False) for fp32 in (True, False)),
    *map(_stored_streams, (True, False)),
)  # fmt: skip

PATTERNS = tuple(variant for pattern in _BASE for variant in with_unit_sizes(pattern))
