"""Bad input is told early, by name."""

from collections.abc import Callable

import pytest
import torch

from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, check_positions

Model = DeepseekV41ForCausalLM

IDS = torch.tensor([[1, 2, 3]])
POSITIONS = torch.tensor([[0, 1, 2]])


def test_dtypes_and_shapes(tiny: Model) -> None:
    cache = tiny.new_cache(1, 16)
    with pytest.raises(TypeError, match="input_ids have dtype torch.float32"):
        tiny(IDS.float(), POSITIONS, cache)
    with pytest.raises(TypeError, match="positions have dtype torch.int32"):
        tiny(IDS, POSITIONS.int(), cache)
    with pytest.raises(ValueError, match="input_ids have shape"):
        tiny(IDS[0], POSITIONS[0], cache)
    with pytest.raises(ValueError, match="positions have shape"):
        tiny(IDS, POSITIONS[:, :2], cache)
    assert tiny(IDS.int(), POSITIONS, cache).equal(tiny(IDS, POSITIONS, tiny.new_cache(1, 16)))


def test_caches_of_another_kind(tiny: Model, make_model: Callable[..., Model]) -> None:
    with pytest.raises(ValueError, match="batch size 2"):
        tiny(IDS, POSITIONS, tiny.new_cache(2, 16))
    with pytest.raises(ValueError, match="window pool"):
        tiny(IDS, POSITIONS, make_model(sliding_window=4).new_cache(1, 16))
    with pytest.raises(ValueError, match="KV sources"):
        tiny(IDS, POSITIONS, make_model(compress_ratios=(0, 3, 3, 1, 1)).new_cache(1, 16))
    with pytest.raises(ValueError, match="max_tokens 2"):
        tiny(IDS, POSITIONS, tiny.new_cache(1, 2))
    with pytest.raises(ValueError, match="Engram"):
        tiny(IDS, POSITIONS, make_model(engram_layer_ids=()).new_cache(1, 16))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([14, 15, 16], r"positions\[0, 2\]: 16, allowed: < max_tokens 16"),
        ([3, 5, 6], r"positions\[0, 1\]: 5, allowed: 4"),
        ([-1, 0, 1], r"positions\[0\]: -1 at 0 before a token"),
        ([0, -1, 2], r"positions\[0\]: -1 at 1 before a token"),
        ([-2, -1, -1], r"positions\[0, 0\]: -2"),
    ],
)
def test_positions(tiny: Model, row: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_positions(torch.tensor([row]), tiny.new_cache(1, 16))


def test_good_positions(tiny: Model) -> None:
    check_positions(torch.tensor([[13, 14, 15], [0, -1, -1], [-1, -1, -1]]), tiny.new_cache(3, 16))


def test_constructor(make_model: Callable[..., Model]) -> None:
    with pytest.raises(ValueError, match="weights: 'fp4'"):
        make_model(weights="fp4")
    with pytest.raises(ValueError, match="dtype: torch.float64"):
        make_model(dtype=torch.float64)


def test_no_gradients(tiny: Model) -> None:
    assert not any(parameter.requires_grad for parameter in tiny.parameters()) and not tiny.training


def test_no_tokens(tiny: Model) -> None:
    with pytest.raises(ValueError, match=r"input_ids have shape \(1, 0\), allowed: at least one token"):
        tiny(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int64), tiny.new_cache(1, 16))
