"""The canonical form: one spelling per meaning, values and metadata exact."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dscompile.passes.engine import normalise
from dscompile.passes.engine.testing import functional_graph, run_flat

aten = torch.ops.aten


def graph_of(fn, *shapes, dtype=torch.float32):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return make_fx(fn)(*(torch.empty(s, dtype=dtype) for s in shapes))


def spelled(gm: GraphModule) -> str:
    """The graph as one expression, independent of node names, order and of 1 or 1.0."""

    def show(a):
        if isinstance(a, (list, tuple)):
            return f"[{', '.join(map(show, a))}]"
        if not isinstance(a, torch.fx.Node):
            return str(int(a) if isinstance(a, float) and a == a // 1 else a)
        return a.name if a.op == "placeholder" else f"{a.target}({show(a.args)}, {dict(a.kwargs)})"

    return show(gm.graph.output_node().args[0])


def targets(gm: GraphModule) -> list:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


SAME = {
    "square": (lambda x: x.square(), lambda x: x.pow(2), lambda x: x * x, lambda x: x**2.0),
    "reshape": (
        lambda x: x.unsqueeze(1) + 1,
        lambda x: x[:, None] + 1,
        lambda x: x.view(6, 1, 10) + 1,
        lambda x: x.reshape(6, -1, 10) + 1,
    ),
    "squeeze": (lambda x: x[:, None].squeeze(1) + 1, lambda x: x + 1, lambda x: x.clone() + 1),
    "transpose": (lambda x: x.t() + 1, lambda x: x.transpose(0, -1) + 1, lambda x: x.permute(1, 0) + 1),
    "aliases": (lambda x: x.mT + 1, lambda x: x.detach().t() + 1, lambda x: torch.ops.aten.alias(x).t() + 1),
    "twice": (lambda x: x.t().contiguous().t() + 1, lambda x: x + 1, lambda x: x.float() + 1),
    "dims": (lambda x: x.sum(-1), lambda x: x.sum(1), lambda x: torch.sum(x, (-1,))),
    "all": (lambda x: x.sum(), lambda x: x.sum((0, 1)), lambda x: x.sum((-1, -2))),
    "softmax": (lambda x: x.softmax(-1), lambda x: torch.softmax(x, 1)),
    "halves": (
        lambda x: operator.add(*x.chunk(2, -1)),
        lambda x: operator.add(*x.split(5, -1)),
        lambda x: operator.add(*x.split([5, 5], 1)),
        lambda x: x[:, :5] + x[:, 5:],
        lambda x: x[:, -10:-5] + x[:, 5:10],
        lambda x: x.narrow(1, 0, 5) + x[:, -5:],
    ),
    "rows": (lambda x: x.unbind(0)[2] + 1, lambda x: x[2] + 1, lambda x: x[-4] + 1, lambda x: x.select(0, 2) + 1),
    "clamp": (lambda x: x.clamp(min=0.5), lambda x: x.clamp_min(0.5)),
    "mask": (
        lambda x: x.masked_fill(x > 0, -1.0),
        lambda x: torch.where(x > 0, -1.0, x),
        lambda x: torch.where(0 < x, torch.tensor(-1.0), x),
        lambda x: x.masked_fill(x > 0, torch.tensor(-1.0)),
    ),
    "scalar": (lambda x: x * 0.5 + 2, lambda x: x * torch.tensor(0.5) + 2, lambda x: 2 + 0.5 * x),
    "subtract": (lambda x: 1 - x, lambda x: torch.rsub(x, 1), lambda x: torch.tensor(1.0) - x),
    "negate": (lambda x: x * -1, lambda x: -x, lambda x: x.neg().neg().neg()),
    "minus": (lambda x: x[0] - x[1], lambda x: x[0] + (-x[1]), lambda x: -x[1] + x[0]),
    "half powers": (lambda x: x.sqrt() + x.rsqrt(), lambda x: x**0.5 + x**-0.5),
    "nothing": (lambda x: x * 1 + 1, lambda x: x / 1 + 1, lambda x: x.expand(6, 10) + 1, lambda x: x[:] + 1),
    "maximum": (lambda x: x.amax(-1), lambda x: x.max(dim=-1).values),
    "compare": (lambda x: x[0] < x[1], lambda x: x[1] > x[0]),
    "zeros": (
        lambda x: torch.zeros_like(x) + x,
        lambda x: x.new_zeros(6, 10) + x,
        lambda x: torch.full((6, 10), 0.0) + x,
    ),
    "half open": (lambda x: torch.arange(6) * 2, lambda x: torch.arange(0, 6) * 2, lambda x: torch.arange(0, 6, 1) * 2),
    "logic": (lambda x: (x > 0) & ~(x > 1), lambda x: torch.logical_and(x > 0, torch.logical_not(x > 1))),
    "twice computed": (lambda x: x.exp() * x.exp().sum(), lambda x: (e := x.exp()) * e.sum()),
    "integer": (lambda x: x.long() // 3 + 0, lambda x: x.long().div(3, rounding_mode="floor"), lambda x: x.long() // 3),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_spellings_become_one(name):
    forms = []
    for fn in SAME[name]:
        gm = graph_of(fn, (6, 10))
        x = torch.rand(6, 10) + 0.1
        before = gm(x)
        normalise(gm, is_pattern=True)
        torch.testing.assert_close(gm(x), before, rtol=0, atol=0)
        forms.append(spelled(gm))
    for other in forms[1:]:
        assert other == forms[0]


def test_low_precision_promotion_is_explicit():
    def mixed(x, w):
        return w * x

    def cast(x, w):
        return w * x.float()

    forms = []
    for fn in (mixed, cast):
        with FakeTensorMode(), torch.no_grad():
            gm = make_fx(fn)(torch.empty(6, 10, dtype=torch.bfloat16), torch.empty(10))
        normalise(gm, is_pattern=True)
        forms.append(spelled(gm))
    assert forms[0] == forms[1]
    assert aten._to_copy.default in targets(gm)


def test_a_constant_that_bf16_cannot_hold_stays_a_tensor():
    gm = graph_of(lambda x: x * torch.tensor(0.1), (6, 10), dtype=torch.bfloat16)
    normalise(gm)
    assert aten.full.default in targets(gm)


def test_matmul_by_a_shared_weight_is_mm():
    def linear(x, w):
        return torch.nn.functional.linear(x, w)

    def batched(x, w):
        return torch.bmm(x, w.t().unsqueeze(0).expand(6, 10, 3))

    forms = []
    for fn in (linear, batched):
        gm = graph_of(fn, (6, 5, 10), (3, 10))
        normalise(gm, is_pattern=True)
        forms.append([t for t in targets(gm) if t is not aten.permute.default])
    assert forms[0] == forms[1] == [aten.reshape.default, aten.mm.default, aten.reshape.default]


def test_a_different_bmm_stays():
    gm = graph_of(lambda x, w: torch.bmm(x, w.expand(6, 10, 3)), (6, 5, 10), (6, 10, 3))
    normalise(gm)
    assert aten.bmm.default in targets(gm)


def test_negative_zero_is_respected():
    gm = graph_of(lambda x: x + 0.0, (6, 10))
    normalise(gm)
    assert targets(gm) == [aten.add.Tensor]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.clone(),  # returned: must not be the input's memory
        lambda x: x.t().contiguous().view(60),  # returned view of a copy
        lambda x: x.t().contiguous().view(torch.int32),  # reinterpreted bits depend on strides
    ],
)
def test_observable_copies_stay(fn):
    gm = graph_of(fn, (6, 10))
    x = torch.randn(6, 10)
    before = gm(x)
    normalise(gm)
    after = gm(x)
    assert torch.equal(after, before)
    assert after.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_copy_of_a_written_input_stays():
    def step(cache, x):
        old = cache.clone()
        cache.copy_(x)
        return old * 2

    gm = functional_graph(step, torch.zeros(6, 10), torch.ones(6, 10))
    before = run_flat(gm)
    normalise(gm)
    for a, b in zip(run_flat(gm), before):
        assert torch.equal(a, b)


def test_equal_reads_on_both_sides_of_a_write_stay_apart():
    gm = graph_of(lambda c, x: (c + 1, torch.ops.aten.copy_.default(c, x), c + 1), (6,), (6,))
    normalise(gm)
    assert targets(gm).count(aten.add.Tensor) == 2
    first, _, second = gm(torch.zeros(6), torch.ones(6))
    assert first[0] == 1 and second[0] == 2


def test_equal_reads_on_one_side_merge():
    gm = graph_of(lambda c, x: (c + 1, c + 1, torch.ops.aten.copy_.default(c, x)), (6,), (6,))
    normalise(gm)
    assert targets(gm).count(aten.add.Tensor) == 1


def test_random_numbers_do_not_merge():
    gm = graph_of(lambda x: torch.rand_like(x) + torch.rand_like(x), (6,))
    normalise(gm)
    assert targets(gm).count(aten.rand_like.default) == 2


def test_origin_is_kept():
    class M(torch.nn.Module):
        def forward(self, x):
            return x.view(60).unsqueeze(0).square()[0]

    gm = functional_graph(torch.nn.Sequential(M()), torch.randn(6, 10))
    normalise(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert "nn_module_stack" in node.meta and "x.view(60)" in node.meta["stack_trace"], node


def test_functional_writes_lose_the_values_they_overwrite():
    def pad(x):
        out = x.new_full((6, 20), float("-inf"))
        out[:, 10:] = x
        return out * 2

    gm = functional_graph(pad, torch.randn(6, 10))
    before = run_flat(gm)
    normalise(gm)
    assert targets(gm) == [aten.full.default, aten.slice_scatter.default, aten.mul.Tensor]
    assert torch.equal(run_flat(gm)[0], before[0])


def test_symbolic_sizes():
    def fn(x):
        b, t, d = x.shape
        return x.view(b, t, 2, d // 2).transpose(1, 2).reshape(b, 2, -1)[:, :, :-1].unsqueeze(1) * 1

    gm = functional_graph(fn, torch.randn(3, 7, 10), dynamic=True)
    before = run_flat(gm)
    normalise(gm)
    assert set(targets(gm)) <= {
        aten.reshape.default, aten.permute.default, aten.slice.Tensor, operator.mul, operator.floordiv, operator.add,
        aten.clone.default, aten.sym_size.int,
    }  # fmt: skip
    assert torch.equal(run_flat(gm)[0], before[0])


UNARY = {
    "t": lambda x: x.transpose(0, 1), "perm": lambda x: x.permute(2, 0, 1), "flat": lambda x: x.flatten(1),
    "unflat": lambda x: x.reshape(x.shape[0], -1, 1), "copy": lambda x: x.contiguous(), "sq": lambda x: x * x,
    "neg": lambda x: -x, "half": lambda x: x[..., : max(1, x.shape[-1] // 2)], "even": lambda x: x[:, ::2],
    "mean": lambda x: x - x.mean(-1, keepdim=True), "cast": lambda x: x.double().float(), "one": lambda x: x * 1,
    "chunk": lambda x: torch.cat(x.chunk(2, 0), 0), "expand": lambda x: x[:1].expand(2, *x.shape[1:]),
    "mask": lambda x: x.masked_fill(x > 1, 0.5), "soft": lambda x: x.softmax(-1),
    "stack": lambda x: torch.stack([x, -x]).sum(0),
    "self": lambda x: x + x.clone(), "max": lambda x: x.max(-1, keepdim=True).values + x,
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@example(["even", "copy", "chunk"], False)
@given(st.lists(st.sampled_from(sorted(UNARY)), min_size=1, max_size=7), st.booleans())
def test_any_chain_keeps_values_strides_and_is_stable(names, bf16):
    def fn(x):
        for name in names:
            x = UNARY[name](x if x.dim() == 3 else x.reshape(x.shape[0], -1, 1))
        return x

    dtype = torch.bfloat16 if bf16 else torch.float32
    gm = graph_of(fn, (2, 3, 4), dtype=dtype)
    x = torch.randn(2, 3, 4).to(dtype)
    before = gm(x)
    normalise(gm)
    once = spelled(gm)
    values: dict = {}

    class Check(torch.fx.Interpreter):
        def run_node(self, n):
            out = super().run_node(n)
            if isinstance(out, torch.Tensor) and n.op == "call_function":
                want = n.meta["val"]
                assert (out.shape, out.dtype) == (want.shape, want.dtype), n
                live = [i for i, s in enumerate(out.shape) if s > 1]
                assert [out.stride(i) for i in live] == [want.stride(i) for i in live], n
            values[n] = out
            return out

    after = Check(gm).run(x)
    assert torch.equal(after, before), names
    assert normalise(gm) == 0
    assert spelled(gm) == once
