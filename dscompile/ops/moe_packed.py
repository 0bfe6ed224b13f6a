"""`moe` on weights as V4.1 is released: FP4 or FP8 routed experts, an FP8 shared expert, FP8 activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscompile.ops import experts_packed as routed_experts
from dscompile.ops.checks import FLOATS, Check
from dscompile.ops.experts import clamped_silu
from dscompile.ops.experts_packed import GROUP, WEIGHT_FORMATS, experts_packed
from dscompile.ops.linear_packed import linear_packed
from dscompile.ops.moe import check_streams, cost_of_moe, joined, like_joined, sizes_of_streams
from dscompile.ops.registry import define

_CHECK = Check("moe_packed")


def _validate(
    x: Tensor, shared_gate: Tensor, shared_gate_scale: Tensor, shared_up: Tensor, shared_up_scale: Tensor,
    shared_down: Tensor, shared_down_scale: Tensor, streams: Tensor | None, post: Tensor | None, comb: Tensor | None,
) -> None:  # fmt: skip
    _CHECK.rank("x", x, 2, "[N, D]")
    _CHECK.dtype("x", x, FLOATS)
    _CHECK.rank("shared_gate", shared_gate, 2, "[S, D]")
    inner, size = shared_gate.shape[0], x.shape[1]
    _CHECK.that(size % GROUP == 0, "last axis of x", size, f"a multiple of {GROUP}")
    _CHECK.that(inner % GROUP == 0, "first axis of shared_gate", inner, f"a multiple of {GROUP}")
    for name, tensor, scale, out, width in (
        ("shared_gate", shared_gate, shared_gate_scale, inner, size),
        ("shared_up", shared_up, shared_up_scale, inner, size),
        ("shared_down", shared_down, shared_down_scale, size, inner),
    ):
        _CHECK.dtype(name, tensor, (torch.uint8, torch.float8_e4m3fn))
        _CHECK.shape(name, tensor, (out, width))
        _CHECK.dtype(f"{name}_scale", scale, (torch.uint8,))
        _CHECK.shape(f"{name}_scale", scale, (out // GROUP, width // GROUP))
    check_streams(_CHECK, x, streams, post, comb)


def moe_packed(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    shared_gate: Tensor, shared_gate_scale: Tensor, shared_up: Tensor, shared_up_scale: Tensor, shared_down: Tensor,
    shared_down_scale: Tensor, limit: float, weight_format: str, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool,
) -> Tensor:  # fmt: skip
    """x [N, D] -> y [N, D] in x.dtype, or with streams [N, n, D], post [N, n], comb [N, n, n] -> [N, n, D].

    x to w2_scale, limit and weight_format are the arguments of `experts_packed`, its sum comes in routed_dtype. The
    shared expert's weights are E4M3 (or its bytes) with UE8M0 scales per 32 x 32: shared_gate and shared_up [S, D],
    scales uint8 [S / 32, D / 32]; shared_down [D, S], scales [D / 32, S / 32]; D and S divide by 32. It rounds as the
    routed ones do: what enters a product to format "fp8_g32_ue8m0", products to x.dtype, act = clamped_silu(gate, up)
    from fp32 to x.dtype. y = routed + s in fp32, rounded to x.dtype. With streams: hc_post(y, streams, post, comb,
    fp32), in their dtype.
    """
    _validate(
        x, shared_gate, shared_gate_scale, shared_up, shared_up_scale, shared_down, shared_down_scale, streams, post,
        comb,
    )  # fmt: skip
    routed = experts_packed(x, indices, weights, w13, w13_scale, w2, w2_scale, limit, weight_format, routed_dtype)

    gate, up = linear_packed(x, shared_gate, shared_gate_scale), linear_packed(x, shared_up, shared_up_scale)
    act = clamped_silu(gate.float(), up.float(), limit).to(x.dtype)
    return joined(routed, linear_packed(act, shared_down, shared_down_scale), streams, post, comb, fp32)


def _fake(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    shared_gate: Tensor, shared_gate_scale: Tensor, shared_up: Tensor, shared_up_scale: Tensor, shared_down: Tensor,
    shared_down_scale: Tensor, limit: float, weight_format: str, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool,
) -> Tensor:  # fmt: skip
    _validate(
        x, shared_gate, shared_gate_scale, shared_up, shared_up_scale, shared_down, shared_down_scale, streams, post,
        comb,
    )  # fmt: skip
    routed_experts._validate(x, indices, weights, w13, w13_scale, w2, w2_scale, weight_format, routed_dtype)
    return like_joined(x, streams)


def _sizes(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    shared_gate: Tensor, shared_gate_scale: Tensor, shared_up: Tensor, shared_up_scale: Tensor, shared_down: Tensor,
    shared_down_scale: Tensor, limit: float, weight_format: str, routed_dtype: torch.dtype, streams: Tensor | None,
    post: Tensor | None, comb: Tensor | None, fp32: bool,
) -> dict[str, Any]:  # fmt: skip
    packed, rows = WEIGHT_FORMATS[weight_format]
    return {
        "N": x.shape[0], "k": indices.shape[1], "E": w13.shape[0], "D": x.shape[1], "I": w13.shape[1] // 2,
        "S": shared_gate.shape[0], "x_bytes": x.element_size(), "weight_bytes": 1 / packed + 1 / (GROUP * rows),
        "shared_bytes": 1 + 1 / (GROUP * GROUP), **sizes_of_streams(streams, post),
    }  # fmt: skip


define(
    "moe_packed(Tensor x, Tensor indices, Tensor weights, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, "
    "Tensor shared_gate, Tensor shared_gate_scale, Tensor shared_up, Tensor shared_up_scale, Tensor shared_down, "
    "Tensor shared_down_scale, float limit, str weight_format, ScalarType routed_dtype, Tensor? streams, "
    "Tensor? post, Tensor? comb, bool fp32) -> Tensor",
    family="experts", reference=moe_packed, fake=_fake, cost=cost_of_moe, sizes=_sizes,
)  # fmt: skip
