"""Tiny V4.1 models for the tests of this folder."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dscompile.models.deepseek_v41 import DeepseekV41Cache, DeepseekV41Config, DeepseekV41ForCausalLM

# Five layers: window, Full with ratio 2, Reuse, Full with ratio 1 publishing candidates, Reindex within them.
FIVE_LAYERS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "compress_ratios": (0, 2, 2, 1, 1),
    "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3, 4),
    "index_n_heads": 32,
    "index_topk": 4,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_sinkhorn_iters": 2,
    "engram_layer_ids": (1,),
    "release_decode_keys": False,
}

Feed = Callable[[Tensor, Sequence[int], DeepseekV41Cache], Tensor]


def five_layers(**changes: Any) -> DeepseekV41Config:
    return DeepseekV41Config.miniature(**{**FIVE_LAYERS, **changes})


@pytest.fixture(scope="session")
def make_config() -> Callable[..., DeepseekV41Config]:
    """The five-layer configuration with changes."""
    return five_layers


@pytest.fixture(scope="session")
def make_model() -> Callable[..., DeepseekV41ForCausalLM]:
    """A five-layer model with changes to its configuration; `seed` picks the weights."""

    def make(
        seed: int = 0, dtype: torch.dtype = torch.float32, weights: Any = "dequantised", activations: Any = "plain",
        **changes: Any,
    ) -> Any:  # fmt: skip
        torch.manual_seed(seed)
        return DeepseekV41ForCausalLM(five_layers(**changes), dtype, weights, activations=activations)

    return make


@pytest.fixture(scope="session")
def tiny(make_model: Callable[..., DeepseekV41ForCausalLM]) -> DeepseekV41ForCausalLM:
    """One five-layer model for the tests that do not change it."""
    return make_model()


@pytest.fixture(scope="session")
def feed() -> Callable[..., Tensor]:
    """feed(model, ids, sizes, cache, start=0): logits of ids fed in chunks of the given sizes, positions from start."""

    def run(model: Any, ids: Tensor, sizes: Sequence[int], cache: DeepseekV41Cache, start: int = 0) -> Tensor:
        logits, at = [], 0
        for size in sizes:
            positions = torch.arange(start + at, start + at + size).repeat(ids.shape[0], 1)
            logits.append(model(ids[:, at : at + size].contiguous(), positions, cache))
            at += size
        return torch.cat(logits, 1)

    return run
