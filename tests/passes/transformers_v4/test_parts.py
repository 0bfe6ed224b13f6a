"""The parts of transformers' V4 one by one: its own modules are recognised, a changed formula is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

import dscompile.ops  # noqa: F401 - registers the vocabulary
from dscompile.passes.dialects.common import norm, router, sinkhorn
from dscompile.passes.dialects.transformers_v4 import compressor, experts, indexer, mhc, output, store
from dscompile.passes.engine import Normalise, PatternPass, Pipeline
from dscompile.passes.engine.testing import functional_graph, run_flat
from tests.support.v4 import tiny_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten


def rewrite(fn: Callable[..., Any], *inputs: Tensor, patterns: tuple) -> tuple[dict[str, int], list[str], float]:
    """(vocabulary operations left in the graph, reasons of near misses, difference of all outputs and inputs)."""
    gm = functional_graph(fn, *inputs)
    before = run_flat(gm)
    steps = (Normalise(), PatternPass("norm", norm.PATTERNS), PatternPass("sinkhorn", sinkhorn.PATTERNS),
             *mhc.PASSES, *router.PASSES, PatternPass("part", patterns))  # fmt: skip
    results = Pipeline(steps).run(gm)
    after = run_flat(gm)
    counts: dict[str, int] = {}
    for node in gm.graph.nodes:
        if str(node.target).startswith("dsv4."):
            name = str(node.target).split(".")[1]
            counts[name] = counts.get(name, 0) + 1
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a.numel()]
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    return counts, [m.reason for r in results for m in r.near_misses], difference


def randomised(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape) * 0.3 if tensor.is_floating_point() else torch.zeros_like(tensor))
    return module.eval().to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 0.05


# -- hyper-connections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_hyper_connection_with_its_norm(dtype: torch.dtype) -> None:
    """The collapsed streams are normalised inside, unless something else reads them."""
    config = tiny_config(hc_sinkhorn_iters=4)
    module, after = randomised(hf.DeepseekV4HyperConnection(config)), randomised(hf.DeepseekV4RMSNorm(64))

    def with_norm(streams: Tensor) -> tuple[Tensor, ...]:
        post, comb, x = module(streams)
        return post, comb, after(x)

    streams = torch.randn(2, 3, 2, 64).to(dtype)
    counts, misses, difference = rewrite(with_norm, streams, patterns=mhc.PATTERNS)
    assert counts == {"hc_pre": 1} and not misses and difference < tolerance(dtype)

    def read_twice(streams: Tensor) -> tuple[Tensor, ...]:
        post, comb, x = module(streams)
        return post, comb, after(x), x + 1

    counts, _, difference = rewrite(read_twice, streams, patterns=mhc.PATTERNS)
    assert counts == {"hc_pre": 1, "rms_norm": 1} and difference < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hyper_head(dtype: torch.dtype) -> None:
    module = randomised(hf.DeepseekV4HyperHead(tiny_config()))
    counts, misses, difference = rewrite(module, torch.randn(2, 3, 2, 64).to(dtype), patterns=mhc.PATTERNS)
    assert counts == {"hc_head": 1} and not misses and difference < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("narrow", [("base",), ("scale",), ("fn", "base", "scale")])
def test_parameters_in_a_narrow_dtype(narrow: tuple[str, ...], dtype: torch.dtype) -> None:
    """`model.to(dtype)`: promotion widens them in the model, a cast in front of the operation; the same bits."""
    module = randomised(hf.DeepseekV4HyperConnection(tiny_config(hc_sinkhorn_iters=4)))
    for name in narrow:
        getattr(module, name).data = getattr(module, name).to(dtype)
    counts, misses, difference = rewrite(module, torch.randn(2, 3, 2, 64).to(dtype), patterns=mhc.PATTERNS)
    assert counts == {"hc_pre": 1} and not misses and difference < tolerance(dtype)


def narrow_product(module: Any, flat: Tensor) -> tuple[Tensor, ...]:
    """The mixes come out of a product in bfloat16, which is other mathematics than one in float32."""
    return F.linear(flat, module.fn.bfloat16()).split([2, 2, 4], -1)


def tanh_gate(module: Any, flat: Tensor) -> tuple[Tensor, ...]:
    return F.linear(flat, module.fn).tanh().split([2, 2, 4], -1)


@pytest.mark.parametrize(("mixes", "dtype", "reason"), [
    (narrow_product, torch.bfloat16, "found aten._to_copy"), (tanh_gate, torch.float32, "found aten.tanh"),
])  # fmt: skip
def test_a_hyper_connection_by_another_product_stays(
    mixes: Callable[..., Any], dtype: torch.dtype, reason: str
) -> None:
    """The near miss is that of the hyper-connection, not of the last collapse, which begins like it."""
    module = randomised(hf.DeepseekV4HyperConnection(tiny_config(hc_sinkhorn_iters=2)))

    def other(streams: Tensor) -> tuple[Tensor, ...]:
        pre, post, comb = mixes(module, module.input_norm(streams.flatten(2)))
        bases, scales = module.base.split([2, 2, 4]), module.scale.unbind(0)
        comb = (comb.view(2, 3, 2, 2) * scales[2] + bases[2].view(2, 2)).softmax(-1) + 1e-6
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        pre = torch.sigmoid(pre * scales[0] + bases[0]) + 1e-6
        post = 2 * torch.sigmoid(post * scales[1] + bases[1])
        return post, comb, (pre.unsqueeze(-1) * streams).sum(2).to(streams.dtype)

    counts, misses, difference = rewrite(other, torch.randn(2, 3, 2, 64).to(dtype), patterns=mhc.PATTERNS)
    assert "hc_pre" not in counts and difference < tolerance(dtype)
    assert misses == [m for m in misses if reason in m] and len(misses) == 1, misses


def test_another_hyper_connection_stays() -> None:
    """Streams mixed from another tensor than the one that is collapsed are another formula."""
    config = tiny_config()
    module = randomised(hf.DeepseekV4HyperConnection(config))

    def crossed(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        flat = module.input_norm(a.flatten(2).float())
        pre, post, comb = F.linear(flat, module.fn).split([2, 2, 4], -1)
        bases, scales = module.base.split([2, 2, 4]), module.scale.unbind(0)
        comb = ((comb.view(2, 3, 2, 2) * scales[2]) + bases[2].view(2, 2)).softmax(-1) + 1e-6
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        pre = torch.sigmoid(pre * scales[0] + bases[0]) + 1e-6
        return (pre.unsqueeze(-1) * b).sum(2), 2 * torch.sigmoid(post * scales[1] + bases[1]), comb

    counts, misses, difference = rewrite(crossed, torch.randn(2, 3, 2, 64), torch.randn(2, 3, 2, 64),
                                         patterns=mhc.PATTERNS)  # fmt: skip
    assert "hc_pre" not in counts and difference < 1e-6
    assert misses


# -- router and experts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_routers(dtype: torch.dtype) -> None:
    """Top-k by score plus a float32 bias; by a table of token ids; only the scores of the chosen ones weigh."""
    config, x = tiny_config(), torch.randn(2, 3, 64).to(dtype)
    chosen = randomised(hf.DeepseekV4TopKRouter(config), dtype)
    chosen.e_score_correction_bias = chosen.e_score_correction_bias.float()
    counts, misses, difference = rewrite(lambda x: chosen(x)[1:], x, patterns=router.PATTERNS)
    assert counts == {"router": 1} and not misses and difference < tolerance(dtype)
    hashed = randomised(hf.DeepseekV4HashRouter(config), dtype)
    ids = torch.randint(0, 64, (2, 3))
    counts, misses, difference = rewrite(lambda x, i: hashed(x, i)[1:], x, ids, patterns=router.PATTERNS)
    assert counts == {"router": 1} and not misses and difference < tolerance(dtype)


def test_a_router_whose_bias_weighs_stays() -> None:
    """R17: the bias selects; a formula in which it also weighs is not V4's."""

    def biased(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softplus(x @ w.T).sqrt() + b
        weights, indices = torch.topk(scores, 2, -1, sorted=False)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5, indices

    counts, misses, _ = rewrite(
        biased, torch.randn(6, 16), torch.randn(8, 16), torch.randn(8), patterns=router.PATTERNS
    )
    assert counts == {}
    assert misses == [] or all("gather" in reason for reason in misses), misses


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(form: str, dtype: torch.dtype) -> None:
    config = tiny_config()
    config._experts_implementation = form
    module = randomised(hf.DeepseekV4Experts(config), dtype)
    x, indices, weights = torch.randn(6, 64).to(dtype), torch.randint(0, 8, (6, 2)), torch.rand(6, 2).to(dtype)
    counts, misses, difference = rewrite(module, x, indices, weights, patterns=experts.PATTERNS)
    assert counts == {"experts": 1} and not misses and difference < tolerance(dtype)


def test_experts_with_another_gate_stay() -> None:
    """No clamp on one of the halves: the operation would clamp it."""
    config = tiny_config()
    config._experts_implementation = "batched_mm"
    module = randomised(hf.DeepseekV4Experts(config))

    def gate(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up.clamp(-10.0, 10.0)

    module._apply_gate = gate
    inputs = torch.randn(6, 64), torch.randint(0, 8, (6, 2)), torch.rand(6, 2)
    counts, misses, _ = rewrite(module, *inputs, patterns=experts.PATTERNS)
    assert counts == {}
    assert any("expected aten.clamp" in reason for reason in misses), misses


# -- compressor and indexer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [9, 4])
def test_compressors(dtype: torch.dtype, tokens: int) -> None:
    """Ratio 4 with overlap, of several groups and of one; ratio 8."""
    config = tiny_config()
    for kind in (hf.DeepseekV4CSACompressor, hf.DeepseekV4HCACompressor):
        module = randomised(kind(config), dtype)
        module.position_bias.data = module.position_bias.data.float()
        module.kv_norm.float()
        pooled = lambda x: module(x, x[..., :32], torch.arange(tokens)[None], None, 0)[0]  # noqa: B023, E731
        counts, _, difference = rewrite(pooled, torch.randn(2, tokens, 64).to(dtype),
                                        patterns=compressor.PATTERNS)  # fmt: skip
        expected = tokens >= module.compress_rate
        assert counts.get("compress", 0) == expected and difference < tolerance(dtype)


def test_a_pool_without_softmax_over_tokens_stays() -> None:
    def channels(kv: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
        return (kv * (gate + ape).softmax(-1, dtype=torch.float32)).sum(2)

    counts, misses, _ = rewrite(channels, torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8), torch.randn(4, 8),
                                patterns=compressor.PATTERNS)  # fmt: skip
    assert counts == {}
    assert misses and all("_softmax" in reason for reason in misses), misses


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_indexer_scores(dtype: torch.dtype, batch: int) -> None:
    config = tiny_config(index_topk=2)
    module = randomised(hf.DeepseekV4Indexer(config), dtype)
    module.position_bias.data = module.position_bias.data.float()
    module.kv_norm.float()
    x, latent = torch.randn(batch, 17, 64).to(dtype), torch.randn(batch, 17, 32).to(dtype)
    choose = lambda x, latent: module(x, latent, torch.arange(17)[None], None, 0)  # noqa: E731
    counts, _, difference = rewrite(choose, x, latent, patterns=(*compressor.PATTERNS, *indexer.PATTERNS))
    assert counts["index_topk"] == 1
    assert difference == 0 or dtype != torch.float32


def test_an_index_without_causal_rows_stays() -> None:
    """Without the last `where`, rows of the future would stay in the list: the operation would return -1."""

    def unmarked(q: Tensor, k: Tensor, w: Tensor, n: Tensor) -> Tensor:
        scores = (F.relu(torch.matmul(q.float(), k.transpose(1, 2).float().unsqueeze(1))) * 0.25 * w.unsqueeze(-1)).sum(
            2
        )
        hidden = torch.arange(7).view(1, 1, -1) >= n.unsqueeze(-1)
        return scores.masked_fill(hidden, -torch.inf).topk(3, -1).indices

    counts, _, _ = rewrite(unmarked, torch.randn(2, 5, 4, 16), torch.randn(2, 7, 16), torch.rand(2, 5, 4),
                           torch.arange(5).expand(2, 5).contiguous(), patterns=indexer.PATTERNS)  # fmt: skip
    assert counts == {}


# -- output and stores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_output(dtype: torch.dtype) -> None:
    first = randomised(hf.DeepseekV4GroupedLinear(64, 32, 2), dtype)
    second = randomised(torch.nn.Linear(32, 48, bias=False), dtype)
    counts, misses, difference = rewrite(
        lambda o: second(first(o).flatten(2)), torch.randn(2, 3, 2, 64).to(dtype), patterns=output.PATTERNS
    )
    assert counts == {"grouped_output": 1} and not misses and difference < tolerance(dtype)


def test_groups_with_a_step_in_between_stay() -> None:
    first, second = randomised(hf.DeepseekV4GroupedLinear(64, 32, 2)), randomised(torch.nn.Linear(32, 48, bias=False))
    counts, _, _ = rewrite(lambda o: second(F.relu(first(o).flatten(2))), torch.randn(2, 3, 2, 64),
                           patterns=output.PATTERNS)  # fmt: skip
    assert counts == {}


@pytest.mark.parametrize(("batch", "slots"), [(2, [1, 0]), (2, [-1]), (1, [1, 0]), (1, [-2])])
def test_blocks_of_rows(batch: int, slots: list[int]) -> None:
    """Also from the end: -1 is the last block for an assignment, and nothing for the operation."""

    def keep(pool: Tensor, slots: Tensor, blocks: Tensor) -> Tensor:
        pool[:, slots] = blocks
        return pool.sum()

    inputs = torch.randn(batch, 2, 4, 8), torch.tensor(slots), torch.randn(batch, len(slots), 4, 8)
    counts, misses, difference = rewrite(keep, *inputs, patterns=store.PATTERNS)
    assert counts == {"store_rows": 1} and not misses and difference == 0


def test_a_buffer_that_is_read_as_it_was_stays() -> None:
    """What reads the old rows afterwards would find the new ones."""

    def late(pool: Tensor, slots: Tensor, blocks: Tensor) -> Tensor:
        old = pool.clone()
        pool[:, slots] = blocks
        return old * 2 + pool

    inputs = torch.randn(2, 2, 4, 8), torch.tensor([1, 0]), torch.randn(2, 2, 4, 8)
    _, _, difference = rewrite(late, *inputs, patterns=store.PATTERNS)
    assert difference == 0
