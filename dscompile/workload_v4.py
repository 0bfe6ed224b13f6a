"""The calls of a step of transformers' DeepSeek-V4, as `workload` finds those of V4.1: without weights or memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dscompile.compat import require_extra
from dscompile.tuning.calls import Call, merged
from dscompile.workload import Role, capture_calls, checked_tokens, layer_index

if TYPE_CHECKING:
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM


def v4_flash_config() -> DeepseekV4Config:
    """The released DeepSeek-V4-Flash: 43 layers, two with a window only, then ratios 4 and 128 in turn.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    require_extra("transformers")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    yarn = {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32.0,
        "beta_slow": 1.0,
    }  # fmt: skip
    ratios: Any = {"compress_ratios": (0, 0, *(4, 128) * 20, 4)}  # as the checkpoint's own configuration has them
    return DeepseekV4Config(**ratios, rope_parameters=yarn)


def v4_calls(
    config: DeepseekV4Config, target: str, role: Role, batch: int, context: int, tokens: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Call]:  # fmt: skip
    """The calls of one step of transformers' V4 with `StaticV4Cache`; arguments and errors as in `v41_calls`.

    Also raises MissingExtraError if transformers is not installed.
    """
    tokens = checked_tokens(role, batch, context, tokens)
    require_extra("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dscompile.integrations.transformers import StaticV4Cache, prepare

    small, multiplicity = representative_v4(config)
    model = empty_model(small, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _to_fake(model)
        prepare(model)
        cache = StaticV4Cache(small, batch, context, dtype)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        found = list(capture_calls(target, model, ids, cache=cache))
    return merged(replace(call, count=multiplicity[layer_index(layer)]) for layer, call in found)


def representative_v4(config: DeepseekV4Config) -> tuple[DeepseekV4Config, Counter[int]]:
    """A model with one layer of every kind of `config`, and how often each of its layers stands for; -1: the rest."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for layer, kind in enumerate(zip(*_types(config), strict=True)):
        kinds.setdefault(kind, []).append(layer)
    kept = sorted(layers[0] for layers in kinds.values())
    small = with_layers(config, kept)
    counts = Counter({kept.index(layers[0]): len(layers) for layers in kinds.values()})
    counts[-1] = 1
    return small, counts


def with_layers(config: DeepseekV4Config, kept: Sequence[int]) -> DeepseekV4Config:
    """The same configuration with these of its layers."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(kept)
    small.layer_types, small.mlp_layer_types = ([kinds[layer] for layer in kept] for kinds in _types(config))
    small._attn_implementation = "eager"
    return small


def _types(config: DeepseekV4Config) -> tuple[list[str], list[str]]:
    return config.layer_types or [], config.mlp_layer_types or []


def empty_model(config: DeepseekV4Config, dtype: torch.dtype) -> DeepseekV4ForCausalLM:
    """The model on the meta device, with what the model itself keeps in fp32 in fp32."""
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    with torch.device("meta"):
        return DeepseekV4ForCausalLM._from_config(config, dtype=dtype).eval()


def _to_fake(model: torch.nn.Module) -> None:
    """Meta tensors replaced by what the current mode makes of tensors in memory; it cannot convert modules itself."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(_like(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _like(buffer)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
