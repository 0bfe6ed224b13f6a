"""What makes a `DeepseekV41Config` valid. Every message names the key, its value and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dscompile.models.deepseek_v41.engram_hash import engram_primes

if TYPE_CHECKING:
    from dscompile.models.deepseek_v41.config import DeepseekV41Config

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
)

# Switches of the release that have one position here.
_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "gate_temp": 1.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def check_config(config: DeepseekV41Config) -> None:
    """Raise `ValueError` at the first rule that `config` breaks."""
    for key in _POSITIVE:
        value = getattr(config, key)
        _require(isinstance(value, int) and not isinstance(value, bool) and value > 0, key, value, "an int > 0")
    for key, allowed in _FIXED.items():
        _require(getattr(config, key) == allowed, key, getattr(config, key), repr(allowed))
    _check_widths(config)
    _check_rope(config)
    _check_layers(config)
    _check_candidates(config)
    _check_engram(config)


def _require(holds: bool, key: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{key}: {value!r}, allowed: {allowed}")


def _check_widths(config: DeepseekV41Config) -> None:
    for key in ("head_dim", "index_head_dim"):
        value = getattr(config, key)
        _require(value % 32 == 0, key, value, "a multiple of 32 (the quantisation group)")
    rope = config.qk_rope_head_dim
    most = min(config.head_dim, config.index_head_dim)
    _require(rope % 2 == 0 and rope <= most, "qk_rope_head_dim", rope, f"an even number <= {most}")
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, "o_groups", groups, f"a divisor of num_attention_heads {heads}")
    picks, experts = config.num_experts_per_tok, config.n_routed_experts
    _require(picks <= experts, "num_experts_per_tok", picks, f"<= n_routed_experts {experts}")
    _require(config.rms_norm_eps > 0, "rms_norm_eps", config.rms_norm_eps, "> 0")
    _require(config.hc_eps > 0, "hc_eps", config.hc_eps, "> 0")
    _require(config.swiglu_limit >= 0, "swiglu_limit", config.swiglu_limit, ">= 0 (0: no limit)")


def _check_rope(config: DeepseekV41Config) -> None:
    for key in ("rope_theta", "compress_rope_theta"):
        _require(getattr(config, key) > 1, key, getattr(config, key), "> 1")
    kind = config.rope_scaling_type
    _require(kind in ("yarn", "none"), "rope_scaling_type", kind, "'yarn' or 'none'")
    factor = config.rope_scaling_factor
    _require(factor >= 1, "rope_scaling_factor", factor, ">= 1")
    fast, slow = config.rope_scaling_beta_fast, config.rope_scaling_beta_slow
    _require(fast > slow > 0, "rope_scaling_beta_fast", fast, f"> rope_scaling_beta_slow {slow} > 0")


def _check_layers(config: DeepseekV41Config) -> None:
    layers, ratios = config.num_hidden_layers, config.compress_ratios
    _require(len(ratios) >= layers, "compress_ratios", ratios, f"at least num_hidden_layers {layers} entries")
    _require(all(isinstance(r, int) and r >= 0 for r in ratios), "compress_ratios", ratios, "ints >= 0")
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        sources = getattr(config, key)
        ascending = list(sources) == sorted(set(sources))
        inside = all(0 <= source < layers for source in sources)
        _require(ascending and inside, key, sources, f"ascending layer numbers below num_hidden_layers {layers}")
        for source in sources:
            _require(ratios[source] > 0, key, source, f"a layer with a ratio > 0 (compress_ratios[{source}] is 0)")
    kv, index = config.kv_source_layer_ids, config.index_source_layer_ids
    _require(set(kv) <= set(index), "kv_source_layer_ids", kv, f"a subset of index_source_layer_ids {index}")
    for layer in range(layers):
        if ratios[layer] == 0:
            continue
        source = config.kv_source(layer)
        rule = f"the ratio {ratios[source]} of its KV source, layer {source}"
        _require(ratios[layer] == ratios[source], f"compress_ratios[{layer}]", ratios[layer], rule)


def _check_candidates(config: DeepseekV41Config) -> None:
    source = config.candidate_source_layer_id
    if source is None:
        return
    key, index = "candidate_source_layer_id", config.index_source_layer_ids
    _require(source in index, key, source, f"None or one of index_source_layer_ids {index}")
    rows = config.kv_source(source)
    for layer in index:
        if layer > source:
            rule = f"a layer whose KV source (layer {rows}) every later index source shares; layer {layer} does not"
            _require(config.kv_source(layer) == rows, key, source, rule)


def _check_engram(config: DeepseekV41Config) -> None:
    ids, layers = config.engram_layer_ids, config.num_hidden_layers
    ascending = list(ids) == sorted(set(ids)) and all(0 <= i < layers for i in ids)
    _require(ascending, "engram_layer_ids", ids, f"ascending layer numbers below num_hidden_layers {layers}")
    if not ids:
        return
    for key in ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size"):
        _require(getattr(config, key) > 0, key, getattr(config, key), "an int > 0")
    grams, width = config.engram_max_ngram_size, config.engram_head_dim
    _require(grams >= 2, "engram_max_ngram_size", grams, ">= 2")
    _require(width % 32 == 0, "engram_head_dim", width, "a multiple of 32 (the quantisation group)")
    pad = config.engram_pad_token_id
    _require(0 <= pad < config.vocab_size, "engram_pad_token_id", pad, f"0 .. vocab_size {config.vocab_size} - 1")
    primes = engram_primes(len(ids), grams, config.engram_n_heads, config.engram_vocab_size)
    rows = tuple(sum(sum(gram) for gram in layer) for layer in primes)
    _require(config.engram_num_embeddings == rows, "engram_num_embeddings", config.engram_num_embeddings, str(rows))
