"""The model's functions against the release's numbers for them, and their rules at the edges."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.models.deepseek_v41.attention import attend, window_index
from dscompile.models.deepseek_v41.engram import Engram, engram_gate, gather_table
from dscompile.models.deepseek_v41.engram_hash import BLOCKED, engram_multipliers, engram_primes, engram_rows, lookback
from dscompile.models.deepseek_v41.hyper import hc_split
from dscompile.models.deepseek_v41.indexer import candidate_rows, mask_invisible, rank_keys, select_rows
from dscompile.models.deepseek_v41.linear import dequantise_blocks
from dscompile.models.deepseek_v41.moe import route, run_experts
from dscompile.models.deepseek_v41.rope import apply_rope, compressed_frequencies, rope_table, undo_rope
from dscompile.models.deepseek_v41.token_map import build_token_map, normal_form

Load = Callable[[str], dict[str, Tensor]]


def test_hyper_connections(conformance: Load) -> None:
    data = conformance("parts")
    pre, post, comb = hc_split(data["hc.mixes"], data["hc.scale"], data["hc.base"], n=4, iters=20, eps=1e-6)
    for got, name in ((pre, "pre"), (post, "post"), (comb, "comb")):
        torch.testing.assert_close(got, data[f"hc.{name}"], rtol=1e-5, atol=1e-5)


def test_attention(conformance: Load) -> None:
    data = conformance("parts")
    index = data["attn.idxs"].long()
    got = attend(data["attn.q"], data["attn.kv"], index, data["attn.sink"], float(data["attn.scale"]))
    torch.testing.assert_close(got, data["attn.out"], rtol=1e-5, atol=1e-5)
    empty = (index < 0).all(-1)
    assert empty.any() and (got[empty] == 0).all()


def test_attention_with_a_large_sink_is_finite() -> None:
    q, kv = torch.randn(1, 2, 3, 32), torch.randn(1, 5, 32)
    out = attend(q, kv, torch.tensor([[[-1, -1, -1], [0, 4, -1]]]), torch.tensor([60.0, 0.0, -60.0]), 0.1)
    assert out.isfinite().all() and (out[0, 0] == 0).all() and out[0, 1, 2].abs().max() > 0


def test_window_index() -> None:
    positions = torch.tensor([[2, 3, 4, -1], [-1, -1, -1, -1]])
    rows = window_index(positions, window=3)  # rows 0..2 are positions -1, 0, 1 of sequence 0; row 3 is position 2
    assert rows[0].tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [-1, -1, -1]]
    assert (rows[1] == -1).all()


def test_engram_hash(conformance: Load) -> None:
    data = conformance("engram")
    primes = engram_primes(2, 4, 2, int(data["engram_vocab"]))
    assert torch.tensor(primes).equal(data["primes"])
    ids, pad = data["token_map"][data["input_ids"]], data["pad_compressed"]
    before = torch.full((2, 3), BLOCKED)
    for name, mask in (("hash_text", torch.ones_like(ids, dtype=torch.bool)), ("hash_masked", data["token_mask"])):
        tokens = torch.cat((before, torch.where(mask, ids, BLOCKED)), 1)
        for i, layer in enumerate(data["layer_ids"].tolist()):
            factors = torch.tensor(engram_multipliers(layer, 4, int(data["compressed_vocab"])))
            assert factors.equal(data["multipliers"][i])
            sizes = data["primes"][i]
            offsets = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
            assert engram_rows(lookback(tokens, 4, pad), factors, sizes, offsets).equal(data[name][:, :, i])


def test_engram_layer(conformance: Load) -> None:
    data = conformance("engram")
    config = DeepseekV41Config.miniature(engram_layer_ids=(1, 3))
    layer = Engram(config, 0, torch.float32, packed=False, packed_table=True)
    layer.embed.weight.copy_(data["table"])
    assert layer.embed.scale is not None
    layer.embed.scale.copy_(data["table_scale"])
    layer.wkv.weight.copy_(data["wkv"])
    layer.q_weight.copy_(data["q_weight"])
    layer.k_weight.copy_(data["k_weight"])
    tokens = torch.where(data["token_mask"], data["token_map"][data["input_ids"]], BLOCKED)
    back = lookback(torch.cat((torch.full((2, 3), BLOCKED), tokens), 1), 4, data["pad_compressed"])
    got = layer(data["x"], back, data["token_mask"])
    torch.testing.assert_close(got, data["y"], rtol=1e-5, atol=1e-5)
    assert not data["token_mask"].all() and got[~data["token_mask"]].equal(data["x"][~data["token_mask"]])


def test_released_engram_constants() -> None:
    assert engram_multipliers(14, 4, 99092)[0] == 67716810739261
    first, second = engram_primes(2, 4, 8, 16000000)
    assert first[0][:2] == (16000057, 16000079) and second[-1][-1] == 16000889


def test_plain_and_packed_tables_agree() -> None:
    codes = torch.randint(0, 126, (9, 64), dtype=torch.uint8)
    scales = torch.randint(120, 130, (9, 2), dtype=torch.uint8)
    table = codes.view(torch.float8_e4m3fn).float() * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    rows = torch.randint(0, 9, (2, 3, 4))
    assert gather_table(codes, scales, rows, torch.float32).equal(gather_table(table, None, rows, torch.float32))
    assert gather_table(table, None, rows, torch.float32).shape == (2, 3, 256)


def test_engram_gate_of_zero_product_is_not_nan() -> None:
    streams, key = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)
    weight = torch.ones(2, 8)
    out = engram_gate(streams, key, torch.ones(1, 1, 8), weight, weight, torch.ones(1, 1, dtype=torch.bool), 1e-20)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))


def test_rope_turns_back_and_uses_yarn() -> None:
    config = DeepseekV41Config()
    frequencies = compressed_frequencies(config)
    plain = 160000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert frequencies[:16].allclose(plain[:16]) and frequencies[25:].allclose(plain[25:] / 16)
    cos, sin = rope_table(torch.tensor([[0, 5, 70000]]), frequencies)
    x = torch.randn(1, 3, 96)
    turned = apply_rope(x, cos, sin)
    assert turned[..., :32].equal(x[..., :32]) and turned[:, 0].allclose(x[:, 0])
    torch.testing.assert_close(undo_rope(turned, cos, sin), x)
    angle = 5 * frequencies[0]
    expected = x[0, 1, 32] * angle.cos() - x[0, 1, 33] * angle.sin()
    torch.testing.assert_close(turned[0, 1, 32], expected)


def test_selection_counts_and_ties() -> None:
    """All scores equal: exactly min(k, visible) rows, the newest first, whatever the size of the cache."""
    for rows in (5, 40, 300):
        scores = mask_invisible(torch.zeros(1, 6, rows), torch.tensor([[0, 1, 3, 4, 5, 5]]))
        chosen = select_rows(scores, 4)
        assert chosen[0].tolist() == [
            [-1, -1, -1, -1], [0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4],
        ]  # fmt: skip
    assert select_rows(torch.tensor([[[1.0, -0.0, 0.0, -2.0]]]), 2).tolist() == [[[0, 2]]]


def test_rank_keys_order_like_the_scores() -> None:
    scores = torch.tensor([-torch.inf, -3.0, -1e-40, 0.0, 1e-40, 2.0, torch.inf])
    assert rank_keys(scores).diff().gt(0).all()
    assert rank_keys(torch.tensor([-0.0, 0.0])).diff().item() == 1


def test_candidates_pin_the_newest_block() -> None:
    scores = torch.tensor([[[9.0, 0, 8, 0, 7, 0, -5, -torch.inf, -torch.inf]]])
    got = candidate_rows(scores, torch.tensor([[7]]), blocks=2, block_size=2)
    assert got[0, 0].int().tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 0]
    nothing = candidate_rows(torch.full((1, 1, 9), -torch.inf), torch.tensor([[0]]), blocks=2, block_size=2)
    assert not nothing.any()


def test_router_bias_selects_and_never_weighs() -> None:
    x, weight = torch.randn(7, 16), torch.randn(384, 16)
    bias = torch.zeros(384)
    bias[:256] -= 100
    weights, experts = route(x, weight, bias, 6, True, 2.5)
    assert experts.min() >= 256
    torch.testing.assert_close(weights.sum(-1), torch.full((7,), 2.5))
    shifted, same = route(x, weight, bias + 3, 6, True, 2.5)
    assert shifted.equal(weights) and same.equal(experts)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_a_loop(tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 32).to(dtype)
    w13, w2 = torch.randn(11, 32, 32).to(dtype), torch.randn(11, 32, 16).to(dtype)
    weights, experts = torch.rand(tokens, 3), torch.stack([torch.randperm(11)[:3] for _ in range(tokens)])
    got = run_experts(x, weights, experts, w13, w2, limit=1.0)
    want = torch.zeros(tokens, 32)
    for t in range(tokens):
        for j in range(3):
            gate, up = (x[t] @ w13[experts[t, j]].T).float().chunk(2)
            hidden = torch.nn.functional.silu(gate.clamp(max=1.0)) * up.clamp(-1.0, 1.0) * weights[t, j]
            want[t] += (hidden.to(dtype) @ w2[experts[t, j]].T).float()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 10)


def test_blocks_of_a_weight_share_a_scale() -> None:
    weight = torch.full((40, 70), 2.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128, 126], [130, 127, 127]], dtype=torch.uint8)
    dense = dequantise_blocks(weight, scales, torch.float32)
    assert dense[0, 0] == 2 and dense[31, 32] == 4 and dense[0, 69] == 1 and dense[39, 0] == 16


def test_token_map_normal_forms() -> None:
    assert normal_form("  É\t\nÀ ") == "e a" and normal_form("\n ") == " " and normal_form("ﬁ") == "fi"
    tokens = [("Cafe", "a"), (" café", "b"), ("\ufffd", "<0xC3>"), ("\ufffd", "<0xA9>"), (" ", "c"), ("\n", "d")]
    assert build_token_map(tokens).tolist() == [0, 0, 1, 2, 3, 3]
