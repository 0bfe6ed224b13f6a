"""The model under torch.compile: one full graph, two graphs in all, regions shared by layers of a kind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM, generate
from dscompile.models.deepseek_v41.generate import mark_length_dynamic

Model = DeepseekV41ForCausalLM


class Counting:
    """An AOTAutograd backend that runs its graphs eagerly and keeps them."""

    def __init__(self) -> None:
        self.captured: list[GraphModule] = []  # Dynamo's
        self.functional: list[GraphModule] = []  # AOTAutograd's

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Any:
        self.captured.append(gm)
        return aot_autograd(fw_compiler=self.keep)(gm, inputs)

    def keep(self, gm: GraphModule, inputs: list[Any]) -> Any:
        self.functional.append(gm)
        return gm.forward


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


@torch.no_grad()
def check(model: Model, compiled: Any, length: int, feed: Callable[..., Tensor], marked: bool) -> None:
    """One prompt and two decode steps, compiled and eager: the same logits and the same caches."""
    mine, theirs = model.new_cache(2, 96), model.new_cache(2, 96)
    ids = torch.randint(0, 64, (2, length + 2))
    prompt, positions = ids[:, :length].contiguous(), torch.arange(length).repeat(2, 1)
    if marked:
        mark_length_dynamic(prompt, positions)
    torch.testing.assert_close(compiled(prompt, positions, mine), model(prompt, positions, theirs), rtol=0, atol=1e-5)
    got = feed(compiled, ids[:, length:], [1, 1], mine, start=length)
    torch.testing.assert_close(got, feed(model, ids[:, length:], [1, 1], theirs, start=length), rtol=0, atol=1e-5)
    for pools, others in zip(mine[:4], theirs[:4]):
        for layer in pools:
            assert pools[layer][:-1].equal(others[layer][:-1])


def check_stores(graph: GraphModule) -> None:
    """No pool is cloned or masked: each is written by one index_put. Nothing reads data on the host."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.aten.index_put.default) == 4 + 2 + 2 + 1 + 1  # windows, rows, keys, open, tokens
    assert torch.ops.aten.nonzero.default not in targets
    assert torch.ops.aten._local_scalar_dense.default not in targets


def test_two_graphs_for_ten_lengths_and_34_steps(
    make_model: Callable[..., Model], feed: Callable[..., Tensor], backend: Counting
) -> None:
    model = make_model(
        release_decode_keys=True,
        hc_sinkhorn_iters=1,
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in (6, 2, 3, 4, 5, 7, 8, 16, 17, 33):
        check(model, compiled, length, feed, marked=True)
    assert len(backend.functional) == 2
    check_stores(backend.functional[0])
    ids = torch.randint(0, 64, (2, 6))
    got = generate(compiled, ids, 35, cache=model.new_cache(2, 96))
    assert got.equal(generate(model, ids, 35)) and len(backend.functional) == 2


def test_three_graphs_without_marks(
    make_model: Callable[..., Model], feed: Callable[..., Tensor], backend: Counting
) -> None:
    model = make_model(
        hc_sinkhorn_iters=1,
        num_hidden_layers=1,
        compress_ratios=(2,),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=None,
        engram_layer_ids=(),
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in (5, 9, 2):
        check(model, compiled, length, feed, marked=False)
    assert len(backend.functional) == 3


def test_layers_of_a_kind_share_a_region(make_model: Callable[..., Model], backend: Counting) -> None:
    """Two layers each of three kinds: three regions, and no layer number in them."""
    model = make_model(
        hc_sinkhorn_iters=1,
        num_hidden_layers=6,
        compress_ratios=(0, 0, 2, 2, 2, 2),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4),
        candidate_source_layer_id=None,
        engram_layer_ids=(),
        dtype=torch.bfloat16,
        weights="packed",
    )
    ids, positions = torch.randint(0, 64, (1, 9)), torch.arange(9).unsqueeze(0)
    mine, theirs = model.new_cache(1, 16), model.new_cache(1, 16)
    got = torch.compile(model, backend=backend, fullgraph=True)(ids, positions, mine)
    assert got.equal(model(ids, positions, theirs))
    calls = [n for n in backend.captured[0].graph.nodes if n.target is torch.ops.higher_order.invoke_subgraph]
    assert len(calls) == 6
    assert len({call.args[1] for call in calls}) == 3
