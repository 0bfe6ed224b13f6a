"""Passes, pipelines, subgraphs, graph helpers, and the pace on a real model."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch

import dscompile.ops  # noqa: F401  (registers torch.ops.dsv4)
from dscompile.passes.engine import (
    Normalise,
    Pass,
    PassError,
    PassResult,
    Pattern,
    PatternPass,
    Pipeline,
    graphs,
    normalise,
)
from dscompile.passes.engine.testing import functional_graph, run_flat
from support.v4 import tiny, token_ids

aten = torch.ops.aten
dsv4 = torch.ops.dsv4


def norm(x, w, eps):
    return w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def bare_norm(x, eps):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)


NORM = Pattern("norm", "rms_norm", "hf", norm, lambda x, w, eps: dsv4.rms_norm(x, w, eps, "cast_before_weight"),
               {"x": "act[*B D]", "w": "act[D]"}, {"eps": 1.2345e-5})  # fmt: skip
BARE = Pattern("bare_norm", "rms_norm", "hf", bare_norm, lambda x, eps: dsv4.rms_norm(x, None, eps, "scale_cast"),
               {"x": "act[*B D]"}, {"eps": 1.2345e-5})  # fmt: skip


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(16))

    def forward(self, x):
        return norm(x, self.w, 1e-6).tanh() + x


def test_records_carry_layer_and_source_and_survive_json():
    model = torch.nn.Sequential(Layer(), Layer())
    gm = functional_graph(model, torch.randn(2, 16))
    results = Pipeline((Normalise(), PatternPass("norms", (NORM,)))).run(gm)
    assert [m.layer for m in results[1].matches] == ["0", "1"]
    assert all("return w * (x.float()" in m.source for m in results[1].matches)
    assert json.loads(json.dumps(results[1].to_json()))["matches"][0]["family"] == "rms_norm"


def test_near_miss_goes_when_another_dialect_or_a_later_pass_takes_the_place():
    fn, x = (lambda x: bare_norm(x, 1e-6) + 1), torch.randn(2, 16)
    alone = Pipeline((Normalise(), PatternPass("norms", (NORM,)))).run(functional_graph(fn, x))
    assert [m.pattern for m in alone[1].near_misses] == ["norm"]
    both = Pipeline((Normalise(), PatternPass("norms", (NORM, BARE)))).run(functional_graph(fn, x))
    assert both[1].counts == {"rms_norm": 1} and not both[1].near_misses
    later = Pipeline((Normalise(), PatternPass("a", (NORM,)), PatternPass("b", (BARE,)))).run(functional_graph(fn, x))
    assert later[2].counts == {"rms_norm": 1} and not later[1].near_misses


def test_regions_are_rewritten_once_and_counted_per_call():
    class Region(Layer):
        forward = torch.compiler.nested_compile_region(Layer.forward)

    gm = functional_graph(torch.nn.Sequential(Region(), Region(), Region()), torch.randn(2, 16))
    before = run_flat(gm)
    result = Pipeline((Normalise(), PatternPass("norms", (NORM,)))).run(gm)[1]
    (record,) = result.matches
    assert record.count == 3 and record.graph == "repeated_subgraph0" and result.counts == {"rms_norm": 3}
    assert [s.calls for s in graphs.subgraphs(gm)] == [1, 3]
    for a, b in zip(run_flat(gm), before):
        torch.testing.assert_close(a, b)


@dataclasses.dataclass(frozen=True)
class Spoil:
    name: str = "spoil"
    how: str = "order"

    def run(self, gm, ctx):
        call = next(n for n in gm.graph.nodes if n.op == "call_function")
        if self.how == "order":
            call.prepend(call.next)
        else:
            call.meta.pop("val")
        return PassResult(self.name)


def test_pipeline_switches_hooks_and_checks():
    line = Pipeline((Normalise(), PatternPass("norms", (NORM,))))
    seen = []
    gm = functional_graph(Layer(), torch.randn(2, 16))
    results = line.without(["norms"]).run(gm, hook=lambda name, gm, result: seen.append(name))
    assert seen == ["normalise"] and len(results) == 1 and graphs.find(gm.graph, aten.rsqrt.default)
    with pytest.raises(ValueError, match=r"unknown passes \['nrms'\]; known: \['normalise', 'norms'\]"):
        line.without(["nrms"])
    with pytest.raises(ValueError, match="unique"):
        Pipeline((Normalise(), Normalise()))
    assert isinstance(line.passes[1], Pass) and isinstance(Spoil(), Pass)
    for how, message in (("order", "graph main is broken"), ("meta", "has no meta")):
        with pytest.raises(PassError, match=f"pass spoil: .*{message}"):
            Pipeline((Spoil(how=how),)).run(functional_graph(Layer(), torch.randn(2, 16)))


def test_returned_strides_are_kept():
    def fn(x):
        return x.exp().transpose(0, 1).contiguous(), x.sin().transpose(0, 1)

    p = Pattern("t", "t", "toy", lambda x: x.exp().t(), lambda x: x.t().contiguous().exp(), {"x": "f32[A B]"})
    q = Pattern("s", "s", "toy", lambda x: x.sin().t(), lambda x: x.t().contiguous().sin(), {"x": "f32[A B]"})
    gm = functional_graph(fn, torch.randn(3, 4))
    before = [t.stride() for t in run_flat(gm)[:2]]
    results = Pipeline((Normalise(), PatternPass("p", (p, q)))).run(gm)
    assert len(results[1].matches) == 2
    out = run_flat(gm)
    assert [t.stride() for t in out[:2]] == before == [(3, 1), (1, 4)]
    assert [n.meta["val"].stride() for n in graphs.output_values(gm)] == before


def test_graph_helpers():
    def fn(x, y):
        a = x.view(2, 3).t().exp()
        return a.sum() + y, a.t()

    gm = functional_graph(fn, torch.randn(6), torch.randn(2))
    normalise(gm)
    (exp,), (total,) = graphs.find(gm.graph, aten.exp.default), graphs.find(gm.graph, aten.sum.dim_IntList)
    x, y = (n for n in gm.graph.nodes if n.op == "placeholder")
    assert graphs.strip_views(exp.args[0]) is x
    assert graphs.users_through_views(x) == [exp]
    assert graphs.depends_on(total, x) and not graphs.depends_on(total, y)
    assert graphs.producers(total)[0] is x and exp in graphs.producers(total)
    assert exp not in graphs.producers(total, until=lambda n: n.target is aten.exp.default)[:-1]
    assert graphs.after([x]).op == "call_function"
    assert graphs.dominators(gm.graph, x)[total] is exp
    assert graphs.digraph(gm.graph).number_of_nodes() == len(gm.graph.nodes)


def rope(x, cos, sin):
    cos = cos.repeat_interleave(2, dim=-1).unsqueeze(1)
    sin = sin.repeat_interleave(2, dim=-1).unsqueeze(1)
    nope, part = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    turned = torch.stack((-part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat([nope, ((part.float() * cos) + (turned.float() * sin)).to(x.dtype)], dim=-1)


ROPE = Pattern("rope", "rope", "hf", rope,
               lambda x, cos, sin: dsv4.rope(x, cos.unsqueeze(1), sin.unsqueeze(1), False),
               {"x": "act[B H T p+2*r]", "cos": "f32[B T r]", "sin": "f32[B T r]"})  # fmt: skip


def test_the_real_v4_graph():
    """Case R21 in small: counts follow from the model's structure, and nothing takes long."""
    gm = functional_graph(tiny(), token_ids(40), use_cache=False)
    before = run_flat(gm)
    start = time.perf_counter()
    results = Pipeline((Normalise(), PatternPass("norms", (NORM, BARE)), PatternPass("rope", (ROPE,)))).run(gm)
    seconds = time.perf_counter() - start
    # Per layer: two mixes (bare), two block norms, q, kv and per-head q (bare); compressors; final head and norm.
    names = [m.pattern for m in results[1].matches]
    assert names.count("norm") == 3 * 4 + 3 + 1 and names.count("bare_norm") == 3 * 3 + 1
    # q, kv and output of each layer; compressed rows of two layers; index keys and queries of one.
    assert results[2].counts == {"rope": 3 * 3 + 2 + 2}
    assert not results[1].near_misses and not results[2].near_misses
    assert {m.layer for m in results[2].matches} == {f"model.layers.{i}" for i in range(3)}
    for a, b in zip(run_flat(gm), before):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert seconds < 10, f"{seconds:.1f} s for {len(gm.graph.nodes)} nodes"
