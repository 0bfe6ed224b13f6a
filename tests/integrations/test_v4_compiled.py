"""The compiled side of the transformers integration: how many graphs, and that they give eager's numbers."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from dscompile import regions
from dscompile.integrations.transformers import StaticV4Cache, prepare
from support.v4 import tiny, token_ids

IDS = token_ids()
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Counting:
    """A backend that runs graphs as they are and keeps them."""

    def __init__(self):
        self.graphs = []

    def dynamo(self, gm, example_inputs):
        self.graphs.append(gm)
        return gm.forward

    def aot(self, gm, example_inputs):
        def compiler(graph, inputs):
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(
            fw_compiler=compiler, inference_compiler=compiler, decompositions={}, keep_inference_input_mutations=True
        )(gm, example_inputs)


def new_cache(model, batch=1, max_tokens=40):
    return StaticV4Cache(model.config, batch, max_tokens, model.dtype)


def region_names(graph):
    """The subgraph that each region call of `graph` runs, in order."""
    names = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.higher_order.invoke_subgraph:
            names.append(node.args[0].target)
        elif any(a is torch.ops.higher_order.invoke_subgraph for a in node.args):
            names.append(node.kwargs["subgraph"].target)
    return names


def test_34_decode_steps_are_one_graph_with_one_region_a_kind():
    """And the regions write to the cache: the next step reads it."""
    kinds = [WINDOW, CSA, HCA, CSA, HCA]
    model = tiny(
        num_hidden_layers=5, layer_types=kinds, mlp_layer_types=["hash_moe"] + ["moe"] * 4, hc_sinkhorn_iters=1
    )
    one_shot = model(IDS, use_cache=False).logits
    prepare(model)
    counting, cache = Counting(), new_cache(model)
    decode = torch.compile(model, backend=counting.aot, fullgraph=True)
    got = [model(IDS[:, :6], cache=cache).logits]
    got += [decode(IDS[:, i : i + 1], cache=cache).logits for i in range(6, 40)]
    assert len(counting.graphs) == 1
    torch.testing.assert_close(torch.cat(got, 1), one_shot, atol=1e-4, rtol=0)

    # The window layer occurs once, so torch puts it back in line; the CSA and the HCA layers share a subgraph each.
    calls = region_names(counting.graphs[0])
    assert len(set(calls)) == 2 and calls == calls[:2] * 2

    # A second cache, even a used one that was reset, runs the same graph.
    cache = new_cache(model)
    decode(IDS[:, :1], cache=cache)
    cache.reset()
    decode(IDS[:, 1:2], cache=cache)
    assert len(counting.graphs) == 1


@pytest.mark.parametrize(("way", "kind"), [("model.compile", HCA), ("model.forward", CSA)])
def test_generate_runs_compiled(way, kind):
    """One decode graph; the second prompt length makes the prefill dynamic, further lengths of its kind are free."""
    model = tiny(num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], hc_sinkhorn_iters=1)
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = (torch.arange(60) * 7 % 63 + 1).view(2, 30)
    lengths = (12, 17, 30, 10) if way == "model.compile" else (1,)
    want = [model.generate(ids[:, :n], **greedy) for n in lengths]
    prepare(model)
    counting = Counting()
    if way == "model.compile":
        model.compile(backend=counting.dynamo, fullgraph=True)
    else:
        model.forward = torch.compile(model.forward, backend=counting.dynamo, fullgraph=True)
    counts = []
    for n, expected in zip(lengths, want, strict=True):
        assert torch.equal(model.generate(ids[:, :n], cache=new_cache(model, 2), **greedy), expected)
        counts.append(len(counting.graphs))
    assert counts == ([2, 3, 3, 3] if way == "model.compile" else [1])


def test_a_mask_in_a_compiled_call_is_an_error_that_says_so():
    model = prepare(tiny(num_hidden_layers=1, layer_types=[HCA], mlp_layer_types=["moe"]))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="leave attention_mask out"):
        compiled(IDS, attention_mask=torch.ones_like(IDS), cache=new_cache(model))


# -- regions on their own ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim, scale):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.scale = scale

    def forward(self, x):
        return x + self.scale * self.linear(x)


class Stack(nn.Module):
    def __init__(self, scales):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 4)])
        self.blocks = nn.ModuleList([Block(4, s) for s in scales])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads[0](x)


def test_regions_are_shared_by_layers_of_one_kind():
    model, x = Stack([1.0, 2.0] * 6), torch.randn(3, 4)
    want = model(x)
    names = [name for name, _ in model.named_parameters()]
    assert regions.mark_regions(model) == 12 == regions.mark_regions(model)
    assert all(regions.is_region(b) and isinstance(b, Block) for b in model.blocks)
    assert not regions.is_region(model.heads[0]) and [n for n, _ in model.named_parameters()] == names
    counting = Counting()
    got = torch.compile(model, backend=counting.aot, fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    calls = region_names(counting.graphs[0])
    assert calls == ["repeated_subgraph0", "repeated_subgraph1"] * 6
    assert Block.forward is not type(model.blocks[0]).forward
    assert regions.unmark_regions(model) == 12 and type(model.blocks[0]) is Block and regions.unmark_regions(model) == 0


def test_regions_by_class_and_nothing_to_mark():
    model = Stack([1.0, 1.0])
    assert regions.mark_regions(model, nn.Linear) == 3
    assert not any(regions.is_region(b) for b in model.blocks)
    with pytest.raises(ValueError, match="Linear has no module in an nn.ModuleList"):
        regions.mark_regions(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Stack has no Conv2d"):
        regions.mark_regions(model, nn.Conv2d)
