"""What the CPU benchmark runs: model sizes and cases. Plain data, shared by the parent process and the workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MODELS = {"v4": "transformers' DeepSeek-V4", "v41": "this project's DeepSeek-V4.1"}
MODES = ("eager", "stock", "dsv4")


@dataclass(frozen=True)
class Case:
    """One thing to time: a prompt of `tokens` tokens, or decoding after a context of `tokens` tokens."""

    phase: str  # "prefill" or "decode"
    batch: int
    tokens: int

    def __str__(self) -> str:
        what = f"prompt {self.tokens}" if self.phase == "prefill" else f"decode at {self.tokens}"
        return f"{what}, batch {self.batch}"


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know.

    model: a name in `MODELS`; `hidden`: width, from which the others follow; `layers`: how often the layer pattern is
    repeated; `steps`: tokens that one repetition of decoding takes; `tiny`: sizes for a smoke test, `hidden` is
    ignored; `miniature`: layers of V4.1's miniature instead (for the cost of compiling), 0 for the model above.
    """

    model: str
    mode: str
    hidden: int = 1024
    layers: int = 1
    steps: int = 8
    tiny: bool = False
    miniature: int = 0
    dtype: str = "bfloat16"
    threads: int = 2
    seed: int = 0

    def sizes(self) -> dict[str, Any]:
        """The configuration's fields that are not the default."""
        if self.miniature:
            return miniature_layers(self.miniature)
        return (v4_sizes if self.model == "v4" else v41_sizes)(self)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def v4_sizes(setup: Setup) -> dict[str, Any]:
    """Two layers of each kind: window with hash routing, ratio 4 with an indexer, ratio 128."""
    pairs = 2 * setup.layers
    window, csa, hca = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    if setup.tiny:
        kinds, hashed = [window, csa, hca], 1
    else:
        kinds, hashed = [window] * pairs + [csa, hca] * pairs, pairs
    common = {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (len(kinds) - hashed),
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 65536,
        "num_nextn_predict_layers": 0,
    }
    if setup.tiny:
        return common | {
            "vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 32,
            "q_lora_rank": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "o_groups": 2,
            "o_lora_rank": 16, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8, "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
            "compress_rates": {csa: 4, hca: 8},
        }  # fmt: skip
    return common | {
        "vocab_size": 1024, "hidden_size": setup.hidden, "moe_intermediate_size": setup.hidden // 2,
        "num_attention_heads": 16, "head_dim": 128, "q_lora_rank": setup.hidden // 2, "n_routed_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "o_groups": 4, "o_lora_rank": 256, "index_n_heads": 32,
        "index_head_dim": 64, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "compress_rates": {csa: 4, hca: 128},
    }  # fmt: skip


def v41_sizes(setup: Setup) -> dict[str, Any]:
    """Window; Full with ratio 2 and Reuse; Full with ratio 1, which publishes candidates; Reindex and Reuse."""
    pairs = 2 * setup.layers
    if setup.tiny:
        ratios, sources, indices = [0, 2, 2, 1, 1], [1, 3], [1, 3, 4]
    else:
        ratios = [0] * pairs + [2, 2] * pairs + [1, 1] + [1, 1] * pairs
        last = 3 * pairs  # the Full layer with ratio 1
        sources = [*range(pairs, last, 2), last]
        indices = [*sources, *range(last + 2, len(ratios), 2)]
    common = {
        "num_hidden_layers": len(ratios),
        "compress_ratios": tuple(ratios),
        "kv_source_layer_ids": tuple(sources),
        "index_source_layer_ids": tuple(indices),
        "candidate_source_layer_id": sources[-1],
        "max_position_embeddings": 65536,
    }
    if setup.tiny:
        return common | {
            "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 32, "o_groups": 2,
            "o_lora_rank": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "hc_mult": 2, "hc_sinkhorn_iters": 2,
        }  # fmt: skip
    return common | {
        "vocab_size": 1024, "hidden_size": setup.hidden, "num_attention_heads": 16, "head_dim": 128,
        "qk_rope_head_dim": 64, "q_lora_rank": setup.hidden // 2, "o_groups": 4, "o_lora_rank": 256,
        "sliding_window": 128, "moe_intermediate_size": setup.hidden // 2, "n_routed_experts": 32,
        "num_experts_per_tok": 4, "rope_scaling_original_max_position_embeddings": 4096, "index_n_heads": 16,
        "index_head_dim": 64, "index_topk": 512, "candidate_topk_blocks": 256, "candidate_block_size": 8,
    }  # fmt: skip


def miniature_layers(count: int) -> dict[str, Any]:
    """The miniature itself (8 layers), or its widths in the released model's layer pattern (40 layers)."""
    if count == 8:
        return {}
    if count == 40:
        return {
            "num_hidden_layers": 40,
            "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20,
            "kv_source_layer_ids": (2, 8, 14, 20),
            "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
            "candidate_source_layer_id": 20,
        }
    raise ValueError(f"miniature: {count}, allowed: 8 or 40")


def cases(prompts: list[int], contexts: list[int], batches: list[int]) -> list[Case]:
    """Prompts at batch 1, then decoding after every context at every batch size."""
    decode = [Case("decode", batch, context) for batch in batches for context in contexts]
    return [Case("prefill", 1, length) for length in prompts] + decode
