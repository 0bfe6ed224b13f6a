"""A miniature transformers `DeepseekV4ForCausalLM` with one layer of every attention kind.

The numbers are chosen, not arbitrary: 32 index heads keep the index scores clear of exact ties (with 4 heads the ReLU
makes many scores exactly 0, and eager itself then differs between one-shot and token-by-token runs).
"""

from typing import TYPE_CHECKING, Any

import torch

from dscompile.compat import require_extra

if TYPE_CHECKING:
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

VOCAB = 64

_DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 4096,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "num_nextn_predict_layers": 0,
}


def tiny_config(**changes: Any) -> "DeepseekV4Config":
    """The miniature's configuration with `changes` applied to it."""
    require_extra("transformers")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(**{**_DEFAULTS, **changes})
    config._attn_implementation = "eager"
    return config


def tiny(**changes: Any) -> "DeepseekV4ForCausalLM":
    """A model with fixed random weights, in eval mode and fp32; the same weights on every call."""
    require_extra("transformers")
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    config = tiny_config(**changes)
    model = DeepseekV4ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(normal(parameter) * 0.15)
            elif "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.5 + 0.5)
            else:
                parameter.copy_(normal(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint(0, config.n_routed_experts, buffer.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(normal(buffer) * 0.5)
    return model


def token_ids(length: int = 40, batch: int = 1) -> torch.Tensor:
    """Token ids int64 [batch, length], every row the same and every id below `VOCAB`."""
    return (torch.arange(length) * 7 % VOCAB).expand(batch, length).contiguous()
