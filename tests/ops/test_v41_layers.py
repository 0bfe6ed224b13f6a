"""The vocabulary is enough for V4.1: every layer of the released run, composed of its operations alone.

Each layer starts from the recorded streams of the layer before, so that no error builds up.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dscompile.ops  # noqa: F401

ops = torch.ops.dsv4
WINDOW_ROWS, COMPRESSED_ROWS, INDEX_ROWS = "fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"
TOKENS, FP32 = 77, torch.float32
Loader = Callable[[str], dict[str, Tensor]]


class Miniature:
    """Configuration, weights and the caches that layers share."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.c = config
        self.w = {name: value.float() for name, value in weights.items()}
        self.rows: dict[str, Tensor] = {}

    def angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [T, rotated / 2]; compressed layers use another base and YaRN."""
        c, width = self.c, self.c["rope_head_dim"]
        compressed = c["compress_ratios"][layer] > 0
        theta = c["compress_rope_theta"] if compressed else c["rope_theta"]
        f = theta ** (-torch.arange(0, width, 2, dtype=FP32) / width)
        if compressed:

            def turn(count: float) -> float:
                return width * math.log(c["original_seq_len"] / (2 * math.pi * count)) / (2 * math.log(theta))

            low, high = math.floor(turn(c["beta_fast"])), math.ceil(turn(c["beta_slow"]))
            low, high = max(low, 0), min(high, width - 1)
            ramp = ((torch.arange(width // 2) - low) / (high - low)).clamp(0, 1)
            f = f / c["rope_factor"] * ramp + f * (1 - ramp)
        angle = positions[:, None] * f
        return angle.cos(), angle.sin()

    def store(self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, format: str) -> Tensor:
        """x [B, n, D] through the fused store into a fresh pool; returns the pool as [B, n, row]."""
        batch, count, _ = x.shape
        packed = ops.quant_pack(x[:1, :1], format).shape[-1]
        pool = torch.zeros(batch * count, packed, dtype=torch.uint8)
        both = [a.repeat(batch, 1) for a in (cos, sin)]
        ops.norm_rope_store(pool, x.flatten(0, 1), weight, *both, torch.arange(batch * count), 1e-20, format)
        return pool.view(batch, count, packed)

    def compressor(self, layer: int, x: Tensor) -> None:
        """Compressed rows and index keys of a source layer."""
        c, ratio, name = self.c, self.c["compress_ratios"][layer], f"layers.{layer}.attn."
        groups = TOKENS // ratio
        kv = F.linear(x, self.w[name + "compressor.wkv.weight"])
        if ratio > 1:
            gate = F.linear(x, self.w[name + "compressor.wgate.weight"])
            kv, gate = (a[:, : groups * ratio].unflatten(1, (groups, ratio)) for a in (kv, gate))
            kv = ops.compress(kv, gate, None, None, None, False)
        cos, sin = self.angles(layer, torch.arange(groups) * ratio)
        norm = self.w[name + "compressor.norm.weight"]
        self.rows["kv"] = self.store(kv, norm, cos, sin, COMPRESSED_ROWS)
        latent = ops.rms_norm(kv, norm, c["norm_eps"], "fp32")
        keys = F.linear(latent, self.w[name + "indexer.wk.weight"])
        self.rows["keys"] = self.store(keys, self.w[name + "indexer.k_norm.weight"], cos, sin, INDEX_ROWS)

    def indexer(self, layer: int, x: Tensor, qr: Tensor, cos: Tensor, sin: Tensor) -> None:
        c, name = self.c, f"layers.{layer}.attn.indexer."
        heads, width = c["index_n_heads"], c["index_head_dim"]
        q = F.linear(qr, self.w[name + "wq_b.weight"]).unflatten(-1, (heads, width))
        q = ops.fake_quant(ops.rope(q, cos.unsqueeze(1), sin.unsqueeze(1), False), INDEX_ROWS)
        weights = F.linear(x, self.w[name + "weights_proj.weight"])
        visible = ((torch.arange(TOKENS) + 1) // c["compress_ratios"][layer]).expand(x.shape[0], -1)
        scale = (heads * width) ** -0.5
        common = q, self.rows["keys"], weights, visible
        if layer == c["candidate_source_layer"]:
            self.rows["index"], self.rows["candidates"] = ops.index_topk_candidates(
                *common, c["index_topk"], scale, INDEX_ROWS, True, c["candidate_topk_blocks"], c["candidate_block_size"]
            )
        else:
            masked = self.rows.get("candidates")
            self.rows["index"] = ops.index_topk(*common, masked, c["index_topk"], scale, INDEX_ROWS, True)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        c, name, batch = self.c, f"layers.{layer}.attn.", x.shape[0]
        positions = torch.arange(TOKENS)
        cos, sin = self.angles(layer, positions)
        qr = ops.rms_norm(F.linear(x, self.w[name + "wq_a.weight"]), self.w[name + "q_norm.weight"], 1e-20, "fp32")
        q = F.linear(qr, self.w[name + "wq_b.weight"]).unflatten(-1, (c["n_heads"], c["head_dim"]))
        window = self.store(F.linear(x, self.w[name + "wkv.weight"]), self.w[name + "kv_norm.weight"], cos, sin,
                            WINDOW_ROWS)  # fmt: skip
        if layer in c["kv_source_layers"]:
            self.compressor(layer, x)
        if layer in c["index_source_layers"]:
            self.indexer(layer, x, qr, cos, sin)
        compressed = c["compress_ratios"][layer] > 0
        o = ops.sparse_attention(
            q, window, positions.expand(batch, -1), torch.zeros(batch, dtype=torch.long), c["window_size"],
            self.rows["kv"] if compressed else None, self.rows["index"] if compressed else None, None,
            self.w[name + "attn_sink"], c["head_dim"] ** -0.5, cos.expand(batch, -1, -1), sin.expand(batch, -1, -1),
            True, WINDOW_ROWS, COMPRESSED_ROWS,
        )  # fmt: skip
        groups = c["o_groups"]
        wo_a = self.w[name + "wo_a.weight"].unflatten(0, (groups, -1))
        return ops.grouped_output(o.flatten(2).unflatten(-1, (groups, -1)), wo_a, self.w[name + "wo_b.weight"])

    def moe(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, name, flat = self.c, f"layers.{layer}.ffn.", x.flatten(0, 1)

        def stack(part: str) -> Tensor:
            return torch.stack([self.w[f"{name}experts.{e}.{part}.weight"] for e in range(c["n_routed_experts"])])

        weights, indices = ops.router(
            flat, self.w[name + "gate.weight"], self.w[name + "gate.bias"], None, c["n_activated_experts"],
            c["score_func"], c["norm_topk_prob"], 1e-20, c["route_scale"], True,
        )  # fmt: skip
        w13 = torch.cat((stack("w1"), stack("w3")), 1)
        routed = ops.experts(flat, indices, weights, w13, stack("w2"), c["swiglu_limit"], True, FP32)
        w1, w2, w3 = (self.w[f"{name}shared_experts.{p}.weight"] for p in ("w1", "w2", "w3"))
        one = torch.zeros(len(flat), 1, dtype=torch.long), torch.ones(len(flat), 1)
        shared = ops.experts(flat, *one, torch.cat((w1, w3))[None], w2[None], c["swiglu_limit"], True, FP32)
        return (routed + shared).view_as(x), weights, indices

    def mix(self, layer: int, part: str, streams: Tensor, pre_in: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        name, c = f"layers.{layer}.hc_{part}_", self.c
        norm = self.w[f"layers.{layer}.{part}_norm.weight"]
        return ops.hc_pre(streams, self.w[name + "fn"], self.w[name + "scale"], self.w[name + "base"], pre_in, norm,
                          c["norm_eps"], c["hc_eps"], c["hc_sinkhorn_iters"], c["norm_eps"], False)  # fmt: skip


@pytest.fixture(scope="module")
def miniature(conformance: Loader, conformance_dir: Path) -> Miniature:
    return Miniature(json.loads((conformance_dir / "inference_config.json").read_text()), conformance("model"))


def close(have: Tensor, want: Tensor) -> None:
    """Equal but for a few quantised values on the other side of a rounding boundary."""
    difference, size = (have - want).abs(), want.abs().mean()
    assert difference.median() <= 2e-6 * size
    assert (difference > 2e-5 * size).float().mean() < 0.01
    assert difference.max() <= 0.05 * size


def test_every_layer_of_the_released_run(miniature: Miniature, conformance: Loader) -> None:
    data = conformance("tiny_fp32")
    recorded = {k.removeprefix("len77.prefill.layers."): v for k, v in data.items() if "77.prefill.layers." in k}
    ids = data["len77.input_ids"][:, :TOKENS]
    streams = miniature.w["embed.weight"][ids].unsqueeze(2).repeat(1, 1, miniature.c["hc_mult"], 1)
    pre = F.one_hot(torch.zeros(ids.shape, dtype=torch.long), miniature.c["hc_mult"]).float()
    for layer in range(miniature.c["n_layers"]):
        x, pre_attention, post, comb = miniature.mix(layer, "attn", streams, pre)
        out = miniature.attention(layer, x)
        close(out, recorded[f"{layer}.attn_out"])
        if layer in miniature.c["index_source_layers"]:
            assert same_choice(miniature.rows["index"], recorded[f"{layer}.topk_idxs"].long())
        if layer == miniature.c["candidate_source_layer"]:
            assert torch.equal(miniature.rows["candidates"], recorded[f"{layer}.candidates"])
        streams = ops.hc_post(out, streams, post, comb, True)
        x, pre, post, comb = miniature.mix(layer, "ffn", streams, pre_attention)
        out, weights, indices = miniature.moe(layer, x)
        assert torch.equal(indices.sort(1).values, recorded[f"{layer}.router_indices"].long().sort(1).values)
        order, want_order = indices.argsort(1), recorded[f"{layer}.router_indices"].argsort(1)
        close(weights.gather(1, order), recorded[f"{layer}.router_weights"].gather(1, want_order))
        close(ops.hc_post(out, streams, post, comb, True), recorded[f"{layer}.streams"])
        close(pre, recorded[f"{layer}.pre_mix"])
        streams, pre = recorded[f"{layer}.streams"], recorded[f"{layer}.pre_mix"]


def same_choice(have: Tensor, recorded: Tensor) -> bool:
    """The same set for every query, whatever the order; recorded indices are offset by the window rows."""
    want = torch.where(recorded < 0, -1, recorded - TOKENS)
    return torch.equal(have.sort(-1).values, want.sort(-1).values)
