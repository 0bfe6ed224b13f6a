"""Small models with random weights that still contain every kind of layer: for the command line, examples and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dscompile.compat import require_extra

if TYPE_CHECKING:
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM

# A callable, its positional arguments and its keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# 32 index heads keep the index scores clear of exact ties: with 4 heads the ReLU makes many scores exactly 0, and eager
# itself then differs between one-shot and token-by-token runs.
_V4: dict[str, Any] = {
    "vocab_size": 64,
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


def v4_config(**changes: Any) -> DeepseekV4Config:
    """The configuration of `v4_model` with `changes` applied to it. Needs the extra `transformers`."""
    require_extra("transformers")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(**{**_V4, **changes})
    config._attn_implementation = "eager"
    return config


def v4_model(**changes: Any) -> DeepseekV4ForCausalLM:
    """transformers' DeepSeek-V4, three layers with one of every attention kind; fp32, eval mode.

    The weights are random but the same on every call with the same `changes`. Needs the extra `transformers`.
    """
    require_extra("transformers")
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    config = v4_config(**changes)
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


def v41_model(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> DeepseekV41ForCausalLM:
    """The project's DeepSeek-V4.1 with `DeepseekV41Config.miniature(**changes)`; every layer mode, eval mode.

    The weights are random but the same on every call with the same `changes`.
    """
    from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return DeepseekV41ForCausalLM(DeepseekV41Config.miniature(**changes), dtype=dtype).eval()


def v4_call(tokens: int) -> Call:
    """A prefill of `tokens` tokens, batch 1, without a cache."""
    model = v4_model()
    return model, (token_ids(tokens),), {"use_cache": False}


def v41_call(tokens: int) -> Call:
    """A prefill of `tokens` tokens, batch 1, into a fresh cache."""
    model = v41_model()
    positions = torch.arange(tokens)[None]
    return model, (token_ids(tokens), positions, model.new_cache(1, max(tokens, 128))), {}


MINIATURES: dict[str, Callable[[int], Call]] = {"v41": v41_call, "v4": v4_call}


def token_ids(length: int = 40, batch: int = 1, vocab_size: int = 64) -> torch.Tensor:
    """Token ids int64 [batch, length] below `vocab_size`, every row the same."""
    return (torch.arange(length) * 7 % vocab_size).expand(batch, length).contiguous()
