"""Tokens pooled into compressed rows, weighted by a softmax over the tokens for every channel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

LONGEST_GROUP = 1024
VALUES_PER_THREAD = 64


@triton.jit
def compress_kernel(
    kv, gate, ape, prior_kv, prior_gate, biased, out, groups, kv_batch, kv_group, kv_token, gate_batch, gate_group,
    gate_token, R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[b, g] = pooled tokens of group g, BLOCK of D channels a program.

    With OVERLAP the first D channels of the group before count too, and the group's own are the second D. ape and
    prior_* are dense. `biased` is never accessed: its type is that of gate + ape.
    """
    tiles: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // tiles
    batch, group = (row // groups).to(tl.int64), (row % groups).to(tl.int64)
    channel = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)[None, :]
    token = tl.arange(0, BLOCK_R)[:, None]
    inside = (token < R) & (channel < D)
    own: tl.constexpr = D if OVERLAP else 0
    at = batch * kv_batch + group * kv_group + token * kv_token + channel
    gate_at = batch * gate_batch + group * gate_group + token * gate_token + channel
    values = tl.load(kv + at + own, mask=inside, other=0.0)
    logits = tl.load(gate + gate_at + own, mask=inside, other=float("-inf"))
    if ape is not None:
        bias_at = ape + token * (D + own) + channel
        logits = logits.to(tl.float32) + tl.load(bias_at + own, mask=inside, other=0.0).to(tl.float32)
    logits = logits.to(biased.dtype.element_ty).to(tl.float32)
    if D % BLOCK != 0:  # columns without tokens would compute inf - inf
        logits = tl.where(channel < D, logits, 0.0)
    if OVERLAP:
        groups_before = tl.zeros((BLOCK_R, 1), tl.int64) + group
        before, first = inside & (groups_before > 0), inside & (groups_before == 0)
        early = tl.load(kv + at - kv_group, mask=before, other=0.0)
        early_logits = tl.load(gate + gate_at - gate_group, mask=before, other=float("-inf"))
        if ape is not None:
            early_logits = early_logits.to(tl.float32) + tl.load(bias_at, mask=before, other=0.0).to(tl.float32)
        early_logits = early_logits.to(biased.dtype.element_ty).to(tl.float32)
        if prior_kv is not None:
            prior_at = (batch * R + token) * D + channel
            prior = tl.load(prior_kv + prior_at, mask=first, other=0.0).to(kv.dtype.element_ty)
            prior_logits = tl.load(prior_gate + prior_at, mask=first, other=0.0).to(biased.dtype.element_ty)
            early = tl.where(first, prior, early)
            early_logits = tl.where(first, prior_logits.to(tl.float32), early_logits)
        largest = tl.maximum(tl.max(logits, 0), tl.max(early_logits, 0))
        early_powers = tl.exp(early_logits - tl.expand_dims(largest, 0))
        powers = tl.exp(logits - tl.expand_dims(largest, 0))
        total = tl.expand_dims(tl.sum(early_powers, 0) + tl.sum(powers, 0), 0)
        pooled = tl.sum(_weighted(early, early_powers / total), 0) + tl.sum(_weighted(values, powers / total), 0)
    else:
        powers = tl.exp(logits - tl.expand_dims(tl.max(logits, 0), 0))
        pooled = tl.sum(_weighted(values, powers / tl.expand_dims(tl.sum(powers, 0), 0)), 0)
    pooled = tl.expand_dims(pooled, 0).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * D + channel, pooled, mask=channel < D)


@triton.jit
def _weighted(values, weights):
    """Weights and products in the type of the values, the products as fp32."""
    wide = values.to(tl.float32) * weights.to(values.dtype).to(tl.float32)
    return wide.to(values.dtype).to(tl.float32)


def compress(
    kv: Tensor, gate: Tensor, ape: Tensor | None, prior_kv: Tensor | None, prior_gate: Tensor | None, overlap: bool, *,
    config: Config, target: Target,
) -> Tensor:  # fmt: skip
    """`dsv4::compress`: kv, gate [B, n, r, C], ape [r, C], prior_kv and prior_gate [B, r, D] -> [B, n, D] in kv.dtype.

    D = C / 2 with overlap, else C.
    """
    kv, gate = (t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous() for t in (kv, gate))
    batch, groups, ratio, channels = kv.shape
    dim, tile = channels // 2 if overlap else channels, config["BLOCK"]
    out = kv.new_empty((batch, groups, dim))
    biased = gate.new_empty(0, dtype=gate.dtype if ape is None else torch.promote_types(gate.dtype, ape.dtype))
    dense = (None if t is None else t.contiguous() for t in (ape, prior_kv, prior_gate))
    launch(
        compress_kernel, (batch * groups * triton.cdiv(dim, tile),), kv, gate, *dense, biased, out, groups,
        *kv.stride()[:3], *gate.stride()[:3], config=config, R=ratio, D=dim, BLOCK_R=triton.next_power_of_2(ratio),
        BLOCK=tile, OVERLAP=bool(overlap),
    )  # fmt: skip
    return out


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    """A tile of all tokens and as many channels as a program's threads hold with a few values each.

    At least 32 channels where that fits, so that what is read of a token is 64 bytes or more. Few groups are cut into
    more programs.
    """
    ratio = triton.next_power_of_2(sizes["r"])
    width = max(8, triton.next_power_of_2(sizes["D"]))
    for warps, values in ((1, 8), (4, 16), (4, 32), (8, 32)) if sizes["N"] <= 64 else ((4, 16), (4, 32), (1, 16)):
        tile = 32 * warps * values // ratio
        if tile < 32 and 32 * ratio <= 32 * warps * 32:
            tile = 32
        yield config(warps, 1, BLOCK=max(8, min(width, tile)))
    yield config(8, 1, BLOCK=8)


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    held = triton.next_power_of_2(sizes["r"]) * config["BLOCK"] // (32 * config.num_warps)
    return None if held <= VALUES_PER_THREAD else f"{held} values a thread, allowed: {VALUES_PER_THREAD}"


def _applies(meta: Meta) -> str | None:
    ratio = meta["kv"].shape[2]
    if not 0 < ratio <= LONGEST_GROUP:
        return f"groups of {ratio} tokens, allowed: 1 to {LONGEST_GROUP}"
    return None


TEMPLATES = (TritonTemplate("compress", "dsv4::compress", compress, _configs, _check, _applies),)
