"""A model that runs eagerly in a few milliseconds, and what `generate` says of it."""

from collections.abc import Callable

import pytest
import torch

from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, generate
from dscompile.serving.requests import Request
from support.serving import small_model


@pytest.fixture(scope="session")
def model() -> DeepseekV41ForCausalLM:
    """`small_model` in float32."""
    return small_model(torch.float32)


@pytest.fixture(scope="session")
def alone(model: DeepseekV41ForCausalLM) -> Callable[[Request], tuple[int, ...]]:
    """What one process says, by itself and in a dense cache of its own."""

    def run(request: Request) -> tuple[int, ...]:
        return tuple(generate(model, torch.tensor([request.prompt]), request.tokens)[0].tolist())

    return run
