"""Building the two models with seeded weights, and the calls that are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cpu_cases import Case, Setup
from torch import Tensor, nn

MARGIN = 64  # tokens of room in a cache after the context
SHOWN = 64  # rows of a prompt's logits that are compared


@torch.no_grad()
def build(setup: Setup) -> nn.Module:
    """The model of `setup`, the same weights in every process."""
    torch.manual_seed(setup.seed)
    if setup.model == "v4":
        return _build_v4(setup)
    from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM

    return DeepseekV41ForCausalLM(DeepseekV41Config.miniature(**setup.sizes()), dtype=getattr(torch, setup.dtype))


def _build_v4(setup: Setup) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v4 import DeepseekV4Config

    from dscompile.integrations.transformers import prepare

    config = DeepseekV4Config(**setup.sizes())
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, setup.dtype)
    ).eval()  # norms and mixes stay float32
    for name, weight in model.named_parameters():
        _fill(name, weight)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            picks = torch.rand(config.vocab_size, config.n_routed_experts).argsort(-1)[:, : buffer.shape[1]]
            buffer.copy_(picks)
        elif name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return prepare(model, regions=setup.mode != "eager")


def _fill(name: str, weight: Tensor) -> None:
    """Values that keep activations near 1 and every gate in play."""
    if "norm" in name:
        weight.normal_(1.0, 0.1)
    elif name.endswith(("sinks", "embed_tokens.weight")):
        weight.normal_()
    elif name.endswith("scale"):
        weight.fill_(0.5)
    elif weight.dim() < 2 or name.endswith("position_bias"):
        weight.normal_(std=0.5)
    else:
        weight.normal_(std=weight.shape[-1] ** -0.5)


def make_call(setup: Setup, case: Case, model: Any, forward: Callable[..., Any]) -> Callable[[], Tensor]:
    """What is timed: returns logits [rows, vocab], of a prompt a few of its tokens, of decoding all tokens.

    Decoding starts from a cache filled with random rows, the same in every process, as if `case.tokens` tokens had been
    seen, and takes `setup.steps` tokens; every repetition starts at the same position.
    """
    torch.manual_seed(setup.seed + 1)
    vocab = model.config.vocab_size
    if case.phase == "prefill":
        ids = torch.randint(0, vocab, (case.batch, case.tokens))
        return (_v4_prompt if setup.model == "v4" else _v41_prompt)(model, forward, ids)
    ids = torch.randint(0, vocab, (setup.steps, case.batch, 1))
    return (_v4_decode if setup.model == "v4" else _v41_decode)(case, model, forward, ids)


def _some(logits: Tensor) -> Tensor:
    length = logits.shape[1]
    return logits[0, torch.linspace(0, length - 1, min(SHOWN, length)).long()]


def _v4_prompt(model: Any, forward: Callable[..., Any], ids: Tensor) -> Callable[[], Tensor]:
    return lambda: _some(forward(ids, use_cache=False).logits)


def _v41_prompt(model: Any, forward: Callable[..., Any], ids: Tensor) -> Callable[[], Tensor]:
    positions = torch.arange(ids.shape[1]).repeat(ids.shape[0], 1)
    cache = model.new_cache(ids.shape[0], ids.shape[1])
    return lambda: _some(forward(ids, positions, cache))


def _v4_decode(case: Case, model: Any, forward: Callable[..., Any], ids: Tensor) -> Callable[[], Tensor]:
    from dscompile.integrations.transformers import StaticV4Cache

    cache = StaticV4Cache(model.config, case.batch, case.tokens + MARGIN, model.dtype)
    start, length, *rows = cache.tensors()
    for tensor in rows:
        tensor.normal_()

    def call() -> Tensor:
        start.fill_(case.tokens)
        length.fill_(case.tokens)
        return torch.cat([forward(step, cache=cache).logits[:, -1] for step in ids])

    return call


def _v41_decode(case: Case, model: Any, forward: Callable[..., Any], ids: Tensor) -> Callable[[], Tensor]:
    from dscompile.models.deepseek_v41.attention import COMPRESSED_FORMAT, WINDOW_FORMAT
    from dscompile.models.deepseek_v41.indexer import INDEX_FORMAT

    config = model.config
    cache = model.new_cache(case.batch, case.tokens + MARGIN)
    for pools, form, dim in (
        (cache.window, WINDOW_FORMAT, config.head_dim),
        (cache.compressed, COMPRESSED_FORMAT, config.head_dim),
        (cache.index_keys, INDEX_FORMAT, config.index_head_dim),
    ):
        for pool in pools.values():
            pool.copy_(form.pack(torch.randn(pool.shape[0], dim)))
    for pool in cache.open_groups.values():
        pool.normal_()
    positions = [torch.full((case.batch, 1), case.tokens + step) for step in range(len(ids))]
    return lambda: torch.cat([forward(step, at, cache)[:, -1] for step, at in zip(ids, positions)])
