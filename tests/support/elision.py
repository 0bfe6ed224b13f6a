"""A V4.1 model small enough to be compiled several times in a test, with layers behind its last KV source."""

from typing import Any

import torch
from torch import Tensor

from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.cache import DeepseekV41Cache

WINDOW = 8

#: Layer 0 window only; 1 and 2 Full, the last KV source; 3 and 5 Reuse; 4 Reindex.
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "n_routed_experts": 8,
    "compress_ratios": (0, 2, 1, 1, 1, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2, 4),
    "candidate_source_layer_id": 2,
    "hc_sinkhorn_iters": 2,
}


def small_model(**changes: Any) -> DeepseekV41ForCausalLM:
    """fp32, random weights, the same on every call."""
    return v41_model(torch.float32, **{**SMALL, **changes})


def cache_rows(cache: DeepseekV41Cache) -> dict[str, Tensor]:
    """Every row that a later call can read, by part and layer: all pools without their scratch row."""
    parts = ("window", "compressed", "index_keys", "open_groups")
    return {f"{part} {layer}": pool[:-1] for part in parts for layer, pool in getattr(cache, part).items()}
