"""Generation: a prompt in chunks, then one token at a time, with an eager or a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dscompile.models.deepseek_v41.checks import check_positions
from dscompile.models.deepseek_v41.model import DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.paged import AnyCache

Forward = Callable[[Tensor, Tensor, AnyCache], Tensor]

_CACHE_STEP = 256  # cache sizes are rounded up, so that prompts of similar length share a compiled graph


def prompt_positions(lengths: Tensor, width: int) -> Tensor:
    """Lengths int64 [B] -> positions int64 [B, width]: 0, 1, ... in each row, -1 from its length on."""
    steps = torch.arange(width, device=lengths.device)
    return torch.where(steps < lengths.unsqueeze(1), steps, -1)


def chunk_bounds(width: int, chunk_size: int | None) -> list[tuple[int, int]]:
    """Cuts of a prompt of `width` tokens into chunks of `chunk_size`, none of which is a single token but for width 1.

    A chunk of one token would be taken for a decode step. `chunk_size` None: one chunk.
    """
    if chunk_size is not None and chunk_size < 3:
        raise ValueError(f"chunk_size: {chunk_size}, allowed: None or >= 3")
    size = chunk_size or width
    cuts = [*range(0, width, size), width]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
        cuts[-2] -= 1
    return list(zip(cuts, cuts[1:]))


def mark_length_dynamic(*tensors: Tensor) -> None:
    """Tell torch.compile that dimension 1 varies: one graph then serves every length above one."""
    for tensor in tensors:
        if tensor.shape[1] > 1:
            torch._dynamo.mark_dynamic(tensor, 1)


def sample(logits: Tensor, temperature: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
    """Logits [B, vocab] -> token ids int64 [B]: the most likely for temperature 0, else drawn."""
    if temperature < 0:
        raise ValueError(f"temperature: {temperature}, allowed: >= 0")
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1)


@torch.no_grad()
def prefill(
    forward: Forward, input_ids: Tensor, positions: Tensor, cache: AnyCache, chunk_size: int | None = None
) -> Tensor:
    """Run a prompt [B, T] chunk by chunk -> the logits float32 [B, vocab] after each row's last token."""
    check_positions(positions, cache)
    last = None
    for start, end in chunk_bounds(input_ids.shape[1], chunk_size):
        ids, part = input_ids[:, start:end].clone(), positions[:, start:end].clone()
        mark_length_dynamic(ids, part)
        logits = forward(ids, part, cache)
        count = (part >= 0).sum(1)
        ends = logits[torch.arange(len(count), device=logits.device), (count - 1).clamp(min=0)]
        last = ends if last is None else torch.where((count > 0).unsqueeze(1), ends, last)
    assert last is not None
    return last


@torch.no_grad()
def decode(
    forward: Forward,
    tokens: Tensor,
    positions: Tensor,
    cache: AnyCache,
    steps: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """From tokens [B] at positions [B], yield the next token of every row, `steps` times.

    Rows may be at different positions; one at -1 is idle and yields meaningless tokens. ValueError if a row would
    run past the cache.
    """
    check_positions(torch.where(positions >= 0, positions + max(steps - 1, 0), -1).unsqueeze(1), cache)
    for _ in range(steps):
        logits = forward(tokens.unsqueeze(1), positions.unsqueeze(1), cache)
        tokens = sample(logits[:, -1], temperature, generator)
        positions = torch.where(positions >= 0, positions + 1, -1)
        yield tokens


def generate(
    model: DeepseekV41ForCausalLM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    cache: AnyCache | None = None,
    chunk_size: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    eos_token_id: int | None = None,
) -> Tensor:
    """Continue prompts: input_ids int64 [B, T] -> new token ids int64 [B, max_new_tokens].

    `model` may be compiled (`torch.compile(model, ...)`): every prompt length above one then shares a graph, and every
    decode step another. `lengths` int64 [B] are the rows' own lengths where prompts are padded at the end. `cache` is a
    fresh one of enough tokens unless given. After `eos_token_id`, a row repeats it and generation ends early when all
    rows have met it. ValueError for lengths or a cache that do not fit.
    """
    batch, width = input_ids.shape
    if lengths is None:
        lengths = torch.full((batch,), width, device=input_ids.device)
    if lengths.shape != (batch,) or int(lengths.min()) < 1 or int(lengths.max()) > width:
        raise ValueError(f"lengths: {lengths.tolist()}, allowed: {batch} numbers from 1 to {width}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens}, allowed: >= 1")
    needed = int(lengths.max()) + max_new_tokens - 1
    if cache is None:
        limit = model.config.max_position_embeddings
        cache = model.new_cache(batch, max(min(-(-needed // _CACHE_STEP) * _CACHE_STEP, limit), needed))
    if needed > cache.max_tokens:
        raise ValueError(f"cache: {cache.max_tokens} tokens, allowed: >= {needed} for the prompt and what follows")
    logits = prefill(model, input_ids, prompt_positions(lengths, width), cache, chunk_size)
    tokens = [sample(logits, temperature, generator)]
    done = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    following = decode(model, tokens[0], lengths, cache, max_new_tokens - 1, temperature, generator)
    for step in range(1, max_new_tokens):
        if eos_token_id is not None:
            done = done | (tokens[-1] == eos_token_id)
            if bool(done.all()):
                tokens += [tokens[-1]] * (max_new_tokens - step)
                break
        fresh = next(following)
        tokens.append(torch.where(done, tokens[-1], fresh))
    return torch.stack(tokens, 1)
