"""Small models and prompts for the tests of this folder; see also `support.paged`."""

from collections.abc import Callable, Sequence

import pytest
import torch

from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, generate

Ids = list[int]


@pytest.fixture(scope="session")
def model() -> DeepseekV41ForCausalLM:
    """The miniature with Engram, float32."""
    return v41_model(torch.float32, engram_layer_ids=(1,))


@pytest.fixture(scope="session")
def exact() -> DeepseekV41ForCausalLM:
    """The same, where a decode step equals the same token in a longer chunk."""
    return v41_model(torch.float32, engram_layer_ids=(1,), release_decode_keys=False)


@pytest.fixture(scope="session")
def prompt() -> Callable[..., Ids]:
    """prompt(length, seed=0): token ids."""

    def make(length: int, seed: int = 0) -> Ids:
        return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make


@pytest.fixture(scope="session")
def alone() -> Callable[..., Ids]:
    """alone(model, prompt, count): what eager `generate` says, by itself and in a cache of its own."""

    def run(model: DeepseekV41ForCausalLM, prompt: Sequence[int], count: int) -> Ids:
        return generate(model, torch.tensor([list(prompt)]), count)[0].tolist()

    return run
