"""What is fused for GPUs: every place of a small V4.1, and the same numbers as before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dscompile.passes.default import default_pipeline
from dscompile.passes.engine.graphs import subgraphs
from dscompile.passes.engine.testing import functional_graph, run_flat
from dscompile.passes.fusing import fusing_pipeline

CONFIG = replace(
    DeepseekV41Config.miniature(), num_hidden_layers=3, compress_ratios=(0, 1, 1), kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,), candidate_source_layer_id=None, engram_layer_ids=(), engram_num_embeddings=(),
    hc_sinkhorn_iters=2,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "stored": {"weights": "packed", "activations": "fp8"}}


def graph_of(tokens: int, dtype: torch.dtype, **kind: Any) -> Any:
    torch.manual_seed(0)
    model = DeepseekV41ForCausalLM(CONFIG, dtype=dtype, **kind).eval()
    cache = model.new_cache(2, 160)
    ids = torch.randint(0, CONFIG.vocab_size, (2, tokens))
    positions = torch.arange(3, 3 + tokens).expand(2, tokens).contiguous()
    return functional_graph(lambda i, p: model(i, p, cache), ids, positions, dynamic=False)


def calls(graph: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for sub in subgraphs(graph):
        for node in sub.gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("dsv4", "aten"):
                found[node.target._schema.name.split("::")[1]] += 1
    return found


@pytest.mark.parametrize(
    ("kind", "dtype"), [("plain", torch.float32), ("plain", torch.bfloat16), ("stored", torch.bfloat16)], ids=str
)
def test_one_token(kind: str, dtype: torch.dtype) -> None:
    graph = graph_of(1, dtype, **KINDS[kind])
    default_pipeline().run(graph)
    before = run_flat(graph)
    fusing_pipeline().run(graph)
    after = run_flat(graph)
    found = calls(graph)
    assert found["sparse_attention_paged"] == 3 and not found["sparse_attention"]
    assert found["moe" if kind == "plain" else "moe_packed"] == 3 and not found["experts"] + found["experts_packed"]
    # A layer ends in its experts: their sum takes the way back into the streams.
    assert found["hc_post_pre"] == 3 and found["hc_pre"] == 3 and not found["hc_post"]
    if kind == "plain":
        narrow = dtype == torch.bfloat16
        # Of every layer the queries and the window rows; of the full layer the index keys, and x's third product.
        assert found["norm_linear"] == 4 * narrow and found["linears"] == 3 * narrow
    else:
        # Queries and window rows side by side; the queries' second product, in the full layer beside the indexer's.
        assert found["linears_packed"] == 3 + 1 and found["linear_packed"] == 2
        assert found["grouped_output_packed"] == 3
    for old, new in zip(before, after, strict=True):
        if old.dtype == torch.uint8:  # packed rows: a value may fall into the next code
            assert (new != old).double().mean() < 0.01
        elif old.is_floating_point() and old.itemsize > 1:
            torch.testing.assert_close(new, old, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_a_prompt_keeps_the_library_s_products() -> None:
    graph = graph_of(140, torch.bfloat16)
    default_pipeline().run(graph)
    before = calls(graph)
    fusing_pipeline().run(graph)
    found = calls(graph)
    assert found["sparse_attention"] == 3  # early tokens see rows that later ones replace
    assert found["moe"] == 3 and found["hc_post_pre"] == 3
    assert not found["linears"] + found["norm_linear"]
    assert found["mm"] == before["mm"] - 3 * 3


class RoundedExperts(torch.nn.Module):
    """A mixture of experts and its way back as transformers' V4 has them, after recognition."""

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor,
        gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, streams: torch.Tensor, post: torch.Tensor,
        comb: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        linear = torch.nn.functional.linear
        routed = torch.ops.dsv4.experts(x.flatten(0, 1), indices, weights, w13, w2, 7.0, False, x.dtype)
        act = torch.nn.functional.silu(linear(x, gate).clamp(max=7.0)) * linear(x, up).clamp(-7.0, 7.0)
        y = routed.view(x.shape) + linear(act, down)
        return torch.ops.dsv4.hc_post(y, streams, post, comb, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (2, 3), (1, 1)])
def test_rounded_experts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, size, inner, shared = shape[0] * shape[1], 24, 16, 40
    x, streams = torch.randn(*shape, size).to(dtype), torch.randn(*shape, 4, size).to(dtype)
    args = (
        x, torch.randint(0, 3, (tokens, 2)), torch.rand(tokens, 2).to(dtype), torch.randn(3, 2 * inner, size).to(dtype),
        torch.randn(3, size, inner).to(dtype), torch.randn(shared, size).to(dtype), torch.randn(shared, size).to(dtype),
        torch.randn(size, shared).to(dtype), streams, torch.rand(*shape, 4), torch.rand(*shape, 4, 4),
    )  # fmt: skip
    graph = functional_graph(RoundedExperts(), *args, dynamic=False)
    default_pipeline().run(graph)
    before = run_flat(graph)
    fusing_pipeline().run(graph)
    assert calls(graph)["moe"] == 1 and not calls(graph)["experts"] + calls(graph)["mm"] + calls(graph)["hc_post"]
    for old, new in zip(before, run_flat(graph), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


class TwoProducts(torch.nn.Module):
    """One goes to an operation of the vocabulary, the other where strides can be seen."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        linear = torch.nn.functional.linear
        return torch.ops.dsv4.rms_norm(linear(x, a), None, 1e-6, "fp32"), self.use(linear(x, b))


@pytest.mark.parametrize(
    ("use", "joined"),
    [
        (lambda y: y, 0), (lambda y: y.view(-1, 4), 0), (lambda y: y.as_strided((4,), (2,)), 0),
        (lambda y: y.clamp(max=1.0), 0), (lambda y: torch.ops.dsv4.rms_norm(y.unsqueeze(0), None, 1e-6, "fp32"), 1),
    ],
)  # fmt: skip
def test_parts_of_a_row_are_seen_by_operations_only(use: Any, joined: int) -> None:
    args = (torch.randn(2, 3, 16).bfloat16(), torch.randn(24, 16).bfloat16(), torch.randn(8, 16).bfloat16())
    graph = functional_graph(TwoProducts(use), *args, dynamic=False)
    default_pipeline().run(graph)
    before = run_flat(graph)
    fusing_pipeline().run(graph)
    assert calls(graph)["linears"] == joined
    for old, new in zip(before, run_flat(graph), strict=True):
        assert new.stride() == old.stride()
        torch.testing.assert_close(new, old, rtol=2e-2, atol=1e-5)


class WindowAttention(torch.nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both

    def forward(
        self, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, index: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        rows = pool[slots]
        comp = (rows, index) if self.both else (None, None)
        positions = torch.full_like(slots[:, :1], 5)
        return torch.ops.dsv4.sparse_attention(
            q, rows, positions, start, 4, *comp, None, None, 0.3, None, None, False, "none", "none"
        )


@pytest.mark.parametrize(("both", "dynamic", "paged"), [(False, False, 1), (True, False, 0), (False, True, 0)])
def test_the_window_is_read_in_place(both: bool, dynamic: bool, paged: int) -> None:
    """Negative slots count from the end. Not where the rows are compressed rows as well, nor in a pool of any size."""
    pool, slots = torch.randn(9, 16), torch.tensor([[1, -1, 3, 4, 2], [8, 0, -9, 5, 6]])
    if dynamic:
        torch._dynamo.mark_dynamic(pool, 0)
    args = (torch.randn(2, 1, 3, 16), pool, slots, torch.tensor([[[0, 4]], [[-1, 2]]]), torch.tensor([1, 2]))
    graph = functional_graph(WindowAttention(both), *args, dynamic=None if dynamic else False)
    default_pipeline().run(graph)
    before = run_flat(graph)
    fusing_pipeline().run(graph)
    assert calls(graph)["sparse_attention_paged"] == paged
    for old, new in zip(before, run_flat(graph), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


class UnclampedExperts(RoundedExperts):
    limit = 0.0

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        indices, weights, w13, w2, gate, up, down = rest[:7]
        linear = torch.nn.functional.linear
        routed = torch.ops.dsv4.experts(x.flatten(0, 1), indices, weights, w13, w2, 0.0, False, x.dtype)
        act = torch.nn.functional.silu(linear(x, gate).clamp(max=0.0)) * linear(x, up).clamp(-0.0, 0.0)
        return routed.view(x.shape) + linear(act, down)


def test_a_limit_of_zero_means_another_thing_in_the_operation() -> None:
    x = torch.randn(2, 3, 24)
    args = (x, torch.randint(0, 3, (6, 2)), torch.rand(6, 2), torch.randn(3, 32, 24), torch.randn(3, 24, 16),
            torch.randn(40, 24), torch.randn(40, 24), torch.randn(24, 40))  # fmt: skip
    graph = functional_graph(UnclampedExperts(), *args, dynamic=False)
    default_pipeline().run(graph)
    fusing_pipeline().run(graph)
    assert not calls(graph)["moe"]
