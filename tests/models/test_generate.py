"""Generation: prompts of several lengths at once, chunks, stops."""

from collections.abc import Callable

import pytest
import torch

from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, generate
from dscompile.models.deepseek_v41.generate import chunk_bounds

Model = DeepseekV41ForCausalLM


def test_greedy_equals_step_by_step(tiny: Model) -> None:
    ids = torch.randint(0, 64, (1, 5))
    got = generate(tiny, ids, 6)
    for step in range(6):
        cache = tiny.new_cache(1, 16)
        logits = tiny(ids, torch.arange(ids.shape[1]).unsqueeze(0), cache)
        assert got[0, step] == logits[0, -1].argmax()
        ids = torch.cat((ids, got[:, step : step + 1]), 1)


def test_padded_prompts_equal_their_own(tiny: Model) -> None:
    ids = torch.randint(0, 64, (3, 13))
    lengths = torch.tensor([13, 4, 9])
    got = generate(tiny, ids, 7, lengths=lengths, chunk_size=4)
    for b, length in enumerate(lengths.tolist()):
        assert got[b].equal(generate(tiny, ids[b : b + 1, :length], 7)[0])


@pytest.mark.parametrize("width", range(1, 30))
def test_no_chunk_of_one_token(width: int) -> None:
    for size in (3, 4, 8, None):
        bounds = chunk_bounds(width, size)
        assert bounds[0][0] == 0 and bounds[-1][1] == width
        assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
        assert all(1 < end - start <= (size or width) for start, end in bounds) or width == 1


def test_end_of_sequence(tiny: Model) -> None:
    ids = torch.randint(0, 64, (2, 5))
    free = generate(tiny, ids, 8)
    stop = int(free[0, 2])
    got = generate(tiny, ids, 8, eos_token_id=stop)
    for row, plain in zip(got.tolist(), free.tolist()):
        end = plain.index(stop) + 1 if stop in plain else 8
        assert row == plain[:end] + [stop] * (8 - end)


def test_sampling_follows_its_generator(tiny: Model) -> None:
    ids = torch.randint(0, 64, (2, 5))

    def draw(seed: int) -> torch.Tensor:
        return generate(tiny, ids, 8, temperature=1.0, generator=torch.Generator().manual_seed(seed))

    assert draw(1).equal(draw(1)) and not draw(1).equal(draw(2))


def test_refusals(tiny: Model, make_model: Callable[..., Model]) -> None:
    ids = torch.randint(0, 64, (1, 5))
    with pytest.raises(ValueError, match="cache: 8 tokens, allowed: >= 9"):
        generate(tiny, ids, 5, cache=tiny.new_cache(1, 8))
    with pytest.raises(ValueError, match="max_new_tokens: 0"):
        generate(tiny, ids, 0)
    with pytest.raises(ValueError, match="lengths"):
        generate(tiny, ids, 5, lengths=torch.tensor([6]))
    with pytest.raises(ValueError, match="temperature"):
        generate(tiny, ids, 5, temperature=-1.0)
    with pytest.raises(ValueError, match="chunk_size"):
        generate(tiny, ids, 5, chunk_size=2)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        generate(make_model(max_position_embeddings=8), ids, 5)
