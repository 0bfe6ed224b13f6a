"""A model that runs eagerly in a few milliseconds, and what `generate` says of it."""

from collections.abc import Callable

import pytest
import torch

from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, generate
from dscompile.serving.requests import Request


@pytest.fixture(scope="session")
def model() -> DeepseekV41ForCausalLM:
    """Window only; Full and Reuse of ratio 2; Full of ratio 1. 32 index heads keep scores clear of ties."""
    return v41_model(
        torch.float32, num_hidden_layers=4, compress_ratios=(0, 2, 2, 1), kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3), candidate_source_layer_id=3, index_n_heads=32, hidden_size=64, vocab_size=96,
        engram_layer_ids=(1,),
    )  # fmt: skip


@pytest.fixture(scope="session")
def alone(model: DeepseekV41ForCausalLM) -> Callable[[Request], tuple[int, ...]]:
    """What one process says, by itself and in a dense cache of its own."""

    def run(request: Request) -> tuple[int, ...]:
        return tuple(generate(model, torch.tensor([request.prompt]), request.tokens)[0].tolist())

    return run
