"""Routers, experts and indexers on their own, compiled (cases R10, R11, R17 and R18)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.models.deepseek_v41.moe import MoE
from support.v4 import tiny

NAN = float("nan")


def v4_block(experts: int, top_k: int, **changes: Any) -> tuple[nn.Module, Tensor]:
    """transformers' MoE block and its selection bias."""
    model = tiny(
        num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"], n_routed_experts=experts,
        num_experts_per_tok=top_k, routed_scaling_factor=2.5, **changes,
    )  # fmt: skip
    model.set_experts_implementation("grouped_mm")
    block = model.model.layers[0].mlp
    return block, block.gate.e_score_correction_bias


def v41_block(experts: int, top_k: int, **changes: Any) -> tuple[nn.Module, Tensor]:
    """The project's MoE block and its selection bias."""
    config = DeepseekV41Config.miniature(
        hidden_size=64, moe_intermediate_size=32, n_routed_experts=experts, num_experts_per_tok=top_k,
        routed_scaling_factor=2.5, **changes,
    )  # fmt: skip
    block = MoE(config, torch.float32, packed=False).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=0.15 if parameter.dim() > 1 else 0.5)
    return block, block.gate.bias


BLOCKS = {"v4": v4_block, "v41": v41_block}
Build = Callable[..., tuple[nn.Module, Tensor]]


@pytest.fixture(params=BLOCKS)
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    torch._dynamo.reset()  # every test brings blocks of other sizes
    yield BLOCKS[request.param]


def chosen(block: nn.Module, bias: Tensor, x: Tensor, top_k: int) -> Tensor:
    """Which experts should be picked, by the formula."""
    scores = F.softplus(x.flatten(0, -2) @ block.gate.weight.T).sqrt()
    return (scores + bias).topk(top_k).indices


@pytest.mark.parametrize(("experts", "top_k"), [(300, 6), (384, 2), (257, 6)])
def test_experts_past_256_are_chosen_and_the_bias_only_selects(
    build: Build, dsv4: Callable[..., Any], experts: int, top_k: int
) -> None:
    """R17. No size, number of picks or scale is built in; +3 on every bias changes not one bit."""
    block, bias = build(experts, top_k)
    x = torch.randn(2, 5, 64)
    compiled = dsv4(block, dynamic=False)
    if experts - 256 >= top_k:
        bias[:256] -= 100
        assert (chosen(block, bias, x, top_k) >= 256).all()
    got = compiled(x)
    torch.testing.assert_close(got, block(x), rtol=1e-5, atol=1e-5)
    assert got.abs().max() > 0.1
    bias += 3
    assert compiled(x).equal(got)
    bias += torch.randn(experts) * 5
    assert not compiled(x).equal(got), "the bias does select"
    assert compiled.counts == {"router": 1, "experts": 1} and len(compiled.report.graphs) == 1


@pytest.mark.parametrize("tokens", [1, 2, 7, 9])
def test_recycled_memory_never_shows(build: Build, dsv4: Callable[..., Any], tokens: int) -> None:
    """R18. Rows past the last group are never read: twenty runs among freed NaN are bitwise equal, and eager's."""
    block, _ = build(16, 2)
    x = torch.randn(1, tokens, 64)
    compiled = dsv4(block, dynamic=False)
    want, first = block(x), None
    for _ in range(20):
        sizes = (tokens * 32, tokens * 64, tokens * 128, tokens * 2 * 32, tokens * 2 * 64, tokens * 2 * 128, 16 * 64)
        blocks = [torch.full((size,), NAN) for size in sizes for _ in range(8)]
        del blocks
        got = compiled(x)
        first = got if first is None else first
        assert got.equal(first)
    torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-5)
    assert compiled.counts == {"router": 1, "experts": 1}


def test_experts_without_tokens_add_nothing_whatever_they_hold(build: Build, dsv4: Callable[..., Any]) -> None:
    """R18. 0 x NaN is NaN: the weights of experts that nobody chose are poisoned."""
    block, bias = build(16, 2)
    x = torch.randn(2, 3, 64)
    bias[:12] -= 100
    want = block(x)
    compiled = dsv4(block, dynamic=False)
    clean = compiled(x)
    for name, parameter in block.experts.named_parameters():
        assert parameter.shape[0] == 16, name
        parameter.data[:12] = NAN
    got = compiled(x)
    assert got.equal(clean)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_one_bad_token_stays_alone(build: Build, dsv4: Callable[..., Any]) -> None:
    """R03, R18. A token of NaN makes its own output NaN and leaves the others as they were."""
    block, _ = build(8, 2)
    x = torch.randn(1, 6, 64)
    compiled = dsv4(block, dynamic=False)
    x[0, 5] = 0
    clean = compiled(x)
    x[0, 5] = NAN
    got = compiled(x)
    torch.testing.assert_close(got[:, :5], clean[:, :5], rtol=1e-5, atol=1e-6)
    assert got[0, 5].isnan().any()


# -- transformers' indexer --------------------------------------------------------------------------------------------


def indexer(index_topk: int, tokens: int = 40, batch: int = 2) -> tuple[nn.Module, tuple[Any, ...]]:
    """The indexer of a ratio-4 layer and the arguments of one call over `tokens` tokens."""
    kind = "compressed_sparse_attention"
    model = tiny(num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], index_topk=index_topk)
    found = [m for m in model.modules() if type(m).__name__ == "DeepseekV4Indexer"]
    positions = torch.arange(tokens).repeat(batch, 1)
    return found[0], (torch.randn(batch, tokens, 64), torch.randn(batch, tokens, 32), positions, None, 0)


def test_only_rows_whose_tokens_all_came_are_chosen(dsv4: Callable[..., Any]) -> None:
    """R10. With more picks than rows, query t gets exactly the rows j with (j + 1) * 4 <= t + 1."""
    torch._dynamo.reset()
    module, arguments = indexer(index_topk=64)
    compiled = dsv4(module, dynamic=False)
    picks = compiled(*arguments)
    assert compiled.counts["indexer"] == 1
    for t in range(40):
        for row in picks[:, t]:
            assert sorted(row[row >= 0].tolist()) == list(range((t + 1) // 4)), t
    assert picks[0, 2].max() == -1 and picks[0, 3].max() == picks[0, 6].max() == 0 and picks[0, 7].max() == 1


@pytest.mark.parametrize("scores", ["zero", "negative"])
def test_ties_fill_every_visible_place_once(dsv4: Callable[..., Any], scores: str) -> None:
    """R11. All scores equal: min(k, visible) picks, distinct, visible, the rest -1, and the same on every run."""
    torch._dynamo.reset()
    module, arguments = indexer(index_topk=4)
    if scores == "zero":
        module.scorer.weights_proj.weight.zero_()
    else:  # every product below zero: the ReLU makes them all 0, whatever the weights
        arguments = (arguments[0], torch.zeros_like(arguments[1]), *arguments[2:])
    compiled = dsv4(module, dynamic=False)
    picks = compiled(*arguments)
    assert compiled.counts["indexer"] == 1
    for t in range(40):
        for row in picks[:, t].tolist():
            live = [j for j in row if j >= 0]
            visible = (t + 1) // 4
            assert len(live) == len(set(live)) == min(4, visible) and all(j < visible for j in live)
            assert all(j == -1 for j in row if j < 0)
    assert all(compiled(*arguments).equal(picks) for _ in range(5))
