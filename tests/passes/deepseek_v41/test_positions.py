"""What is proven of positions by the way in which they are cleaned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dscompile.models.deepseek_v41.plan import clean_positions
from dscompile.passes.default import default_pipeline
from dscompile.passes.dialects.deepseek_v41.positions import why_not_contiguous, why_padding_may_be_in_front


def cleaned(function: Callable[[Tensor], Tensor]) -> fx.Node:
    """The positions that a function returns, with what the passes note on them."""
    graph = make_fx(function, tracing_mode="fake")(torch.arange(12).view(2, 6))
    default_pipeline().run(graph)
    return graph.graph.output_node().args[0]  # type: ignore[return-value]


def by(*tests: Callable[[Tensor], Tensor], factor: int = 1) -> Callable[[Tensor], Tensor]:
    def clean(positions: Tensor) -> Tensor:
        steps = torch.arange(positions.shape[1])
        kept = positions == torch.add(positions[:, :1], steps, alpha=factor)
        for test in tests:
            kept = kept & test(positions)
        return torch.where(kept.long().cumprod(1) == 1, positions, -1)

    return clean


def test_the_model_cleans_all_that_is_not_a_token() -> None:
    positions = cleaned(lambda positions: clean_positions(positions, 100))
    assert why_not_contiguous(positions) is None and why_padding_may_be_in_front(positions) is None


@pytest.mark.parametrize("test", [lambda p: p >= 0, lambda p: p > -1])
def test_both_ways_to_write_that_positions_start_at_0(test: Callable[[Tensor], Tensor]) -> None:
    assert why_padding_may_be_in_front(cleaned(by(test))) is None


@pytest.mark.parametrize("test", [lambda p: p < 100, lambda p: p >= -4, lambda p: p + 1 >= 0])
def test_positions_that_rise_are_enough_for_attention_but_not_to_count_tokens(test: Callable[[Tensor], Tensor]) -> None:
    positions = cleaned(by(test))
    assert why_not_contiguous(positions) is None
    assert "not proven to be 0 or more" in str(why_padding_may_be_in_front(positions))


def test_positions_that_rise_by_two_are_not_contiguous() -> None:
    positions = cleaned(by(lambda p: p >= 0, factor=2))
    assert "not proven to rise by one" in str(why_not_contiguous(positions))
    assert why_padding_may_be_in_front(positions) == why_not_contiguous(positions)
