"""Replacing matches: several outputs, what may stay, order, writes (case R22), results that do not fit."""

from __future__ import annotations

import pytest
import torch

import dscompile.ops  # noqa: F401  (registers torch.ops.dsv4)
from dscompile.passes.engine import Pattern, PatternError, PatternPass, Reject, Structural, normalise
from dscompile.passes.engine.graphs import find
from dscompile.passes.engine.passes import PassContext
from dscompile.passes.engine.testing import functional_graph, run_flat
from support.patterns import apply, reason

aten = torch.ops.aten
dsv4 = torch.ops.dsv4


def add_norm(x, r, w, eps):
    h = x + r
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)), h


def add_norm_op(x, r, w, eps):
    h = x + r
    return dsv4.rms_norm(h, w, eps, "fp32"), h


ADD_NORM = Pattern(
    "add_norm", "add_norm", "toy", add_norm, add_norm_op,
    {"x": "f32[*B D]", "r": "f32[*B D]", "w": "f32[D]"}, {"eps": 1.2345e-5},
)  # fmt: skip
XRW = (torch.randn(3, 16), torch.randn(3, 16), torch.rand(16))


def test_two_outputs():
    def fn(x, r, w):
        y, h = add_norm(x, r, w, 1e-6)
        return y.exp(), h.exp()

    gm, result = apply(ADD_NORM, fn, *XRW)
    assert result.counts == {"add_norm": 1} and len(find(gm.graph, dsv4.rms_norm.default)) == 1


def test_an_output_that_nobody_uses():
    gm, result = apply(ADD_NORM, lambda x, r, w: add_norm(x, r, w, 1e-6)[0].exp(), *XRW)
    assert result.counts == {"add_norm": 1}


PAIR = Pattern("pair", "pair", "toy", lambda x: (x.exp() * 2, x.exp().sin()), lambda x: pair_op(x), {"x": "f32[N]"},
               key=aten.exp.default)  # fmt: skip


def pair_op(x):
    e = x.exp()
    return e + e, e.sin()


def test_an_output_that_is_not_there():
    def fn(x):
        return x.exp() * 2

    gm, result = apply(PAIR, fn, torch.randn(4))
    assert result.counts == {"pair": 1} and not find(gm.graph, aten.mul.Tensor)
    needed = Pattern("pair", "pair", "toy", PAIR.search, PAIR.replace, PAIR.inputs, required=(0, 1))
    _, result = apply(needed, fn, torch.randn(4))
    assert not result.matches


def test_an_input_of_an_absent_output_cannot_be_left_out():
    p = Pattern("pair", "pair", "toy", lambda x, y: (x.exp() * 2, x.exp() - y), lambda x, y: (x.exp() * 2, x - y),
                {"x": "f32[N]", "y": "f32[N]"}, key=aten.exp.default)  # fmt: skip
    _, result = apply(p, lambda x: x.exp() * 2, torch.randn(4))
    assert "input y belongs only to outputs" in reason(result)


def test_users_between_two_outputs_move():
    """The first output has a user in front of an input of the second: it has to go behind the replacement."""
    p = Pattern("two", "two", "toy", lambda x, y: (x.exp() * 2, x.exp() * y), lambda x, y: (2 * x.exp(), y * x.exp()),
                {"x": "f32[N]", "y": "f32[N]"}, key=aten.exp.default)  # fmt: skip

    def fn(x, z):
        e = x.exp()
        a = (e * 2).sin().cos()
        return a, e * z.tanh()

    gm, result = apply(p, fn, torch.randn(4), torch.randn(4))
    assert result.counts == {"two": 1}


def test_an_output_that_feeds_an_input_is_refused():
    p = Pattern("two", "two", "toy", lambda x, y: (x.exp() * 2, x.exp() * y), lambda x, y: (2 * x.exp(), y * x.exp()),
                {"x": "f32[N]", "y": "f32[N]"}, required=(0, 1), key=aten.exp.default)  # fmt: skip

    def fn(x):
        e = x.exp()
        return e * (e * 2).sin()

    _, result = apply(p, fn, torch.randn(4))
    assert "an input depends on an output" in reason(result)


def test_cheap_inner_values_may_be_shared():
    def search(x, c):
        return x * c.unsqueeze(1).expand(-1, 4) + x.neg()

    p = Pattern("s", "s", "toy", search, lambda x, c: x * (c[:, None] - 1), {"x": "f32[N 4]", "c": "f32[N]"})

    def fn(x, y, c):
        return search(x, c) * 1.5, search(y, c), c.unsqueeze(1).expand(-1, 4) + 1

    gm, result = apply(p, fn, torch.randn(3, 4), torch.randn(3, 4), torch.randn(3))
    assert result.counts == {"s": 2} and len(find(gm.graph, aten.expand.default)) == 1


def test_masks_may_be_shared():
    """Layers with equal positions share their mask, which is inside each layer's match."""

    def search(x, positions, ratio):
        hidden = torch.arange(x.shape[1])[None] >= ((positions + 1) // ratio)[:, None]
        return x.masked_fill(hidden, float("-inf")).topk(2).values

    def replace(x, positions, ratio):
        return x.masked_fill(((positions + 1) // ratio)[:, None] <= torch.arange(x.shape[1]), -torch.inf).topk(2).values

    p = Pattern("m", "m", "toy", search, replace, {"x": "f32[T S]", "positions": "i64[T]"}, {"ratio": 211},
                key=aten.topk.default)  # fmt: skip

    def fn(x, y, positions):
        hidden = torch.arange(x.shape[1])[None] >= ((positions + 1) // 4)[:, None]
        return search(x, positions, 4), search(y, positions, 4), hidden

    gm, result = apply(p, fn, torch.randn(20, 6), torch.randn(20, 6), torch.arange(20) + 8)
    assert result.counts == {"m": 2}


def test_shared_operators_can_be_allowed():
    def search(x):
        return x.exp() * 2

    def fn(x):
        return x.exp() * 2, x.exp().sin()

    plain = Pattern("s", "s", "toy", search, lambda x: x.exp() + x.exp(), {"x": "f32[N]"}, key=aten.exp.default)
    assert "also used by aten.sin" in reason(apply(plain, fn, torch.randn(4))[1])
    shared = Pattern("s", "s", "toy", search, plain.replace, plain.inputs, shared=frozenset({aten.exp.default}))
    assert apply(shared, fn, torch.randn(4))[1].counts == {"s": 1}


@pytest.mark.parametrize(
    "replace, why",
    [
        (lambda x: x.exp()[:1] * 2, "output 0 has shape [1], the graph [4]"),
        (lambda x: x.exp().double(), "output 0 has dtype torch.float64, the graph torch.float32"),
        (lambda x: x.exp() @ x[:-1], "cannot be traced"),
        (Structural(lambda gm, match: Reject("not today", match.anchor)), "not today"),
    ],
)
def test_results_that_do_not_fit_are_refused(replace, why):
    p = Pattern("s", "s", "toy", lambda x: x.exp() * 2, replace, {"x": "f32[N]"}, key=aten.exp.default)
    gm, result = apply(p, lambda x: x.exp() * 2 + 1, torch.randn(4))
    assert why in reason(result) and len(find(gm.graph, aten.exp.default)) == 1


def test_the_number_of_results_is_checked():
    p = Pattern("s", "s", "toy", lambda x: x.exp() * 2, lambda x: (x, x), {"x": "f32[N]"})
    with pytest.raises(PatternError, match="replace returns 2 values, search 1"):
        apply(p, lambda x: x.exp() * 2, torch.randn(4))


def test_structural_replacement_and_dims():
    seen = {}

    def edit(gm, match):
        seen.update(match.dims)
        with gm.graph.inserting_before(match.anchor):
            from dscompile.passes.engine.fxutil import emit, fake_mode

            new = emit(gm.graph, aten.exp2.default, (match.inputs["x"],), like=match.anchor, mode=fake_mode(gm))
        match.anchor.replace_all_uses_with(new)

    p = Pattern("s", "s", "toy", lambda x: (x * 0.6931471805599453).exp(), Structural(edit), {"x": "f32[N]"})
    gm, result = apply(p, lambda x: (x * 0.6931471805599453).exp() + 1, torch.randn(4))
    assert result.counts == {"s": 1} and seen == {"N": 4}
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [aten.exp2.default, aten.add.Tensor]


def test_replacement_gets_what_it_names():
    got = {}

    def replace(x, dims, k):
        got.update(dims=dict(dims), k=k)
        return x.topk(k).values

    p = Pattern("s", "s", "toy", lambda x, w, k: x.topk(k).values + 0 * w, replace, {"x": "f32[N E]", "w": "f32[k]"},
                {"k": 211}, key=aten.topk.default)  # fmt: skip
    apply(p, lambda x, w: x.topk(3).values + 0 * w, torch.randn(5, 8), torch.randn(3))
    assert got["k"] == 3 and got["dims"] == {"N": 5, "E": 8, "k": 3}


def test_idempotent_and_repeated_sites():
    def fn(x, r, w):
        for _ in range(3):
            y, x = add_norm(x, r, w, 1e-6)
            x = x + y
        return x

    gm, result = apply(ADD_NORM, fn, *XRW)
    assert result.counts == {"add_norm": 3}
    assert not PatternPass("again", (ADD_NORM,)).run(gm, PassContext()).matches


def test_r22_halves_on_both_sides_of_a_write():
    """f reads a row before the write, g after it: g(f) must not be fused into one read."""
    p = Pattern("fg", "fg", "toy", lambda kv: kv * 2 + kv, lambda kv: kv * 3, {"kv": "f32[R]"}, key=aten.mul.Tensor)

    def fn(cache, new):
        a = cache[0] * 2
        cache[0] = new
        return a + cache[0]

    _, result = apply(p, fn, torch.ones(2, 4), torch.full((4,), 5.0))
    assert not result.matches


def test_r22_read_write_read():
    p = Pattern("sin", "sin", "toy", lambda x, y: (x.sin() + y) * 2, lambda x, y: 2 * (y + x.sin()),
                {"x": "f32[N]", "y": "f32[N]"}, key=aten.sin.default)  # fmt: skip

    def fn(x, y):
        a = x.sin()
        x.copy_(y)
        return (x + a) * 2

    gm, result = apply(p, fn, torch.ones(1), torch.full((1,), 5.0))
    assert result.counts == {"sin": 1}
    torch.testing.assert_close(run_flat(gm)[0], torch.tensor([2 * 5.84147]))


def test_r22_never_moves_a_read_over_a_mutating_node():
    """After a store pattern the graph itself mutates: the match would end behind the write that it must not see."""
    gm = functional_graph(lambda x, y: (x.sin() + y) * 2, torch.ones(3), torch.full((3,), 5.0))
    normalise(gm)
    (sin,) = find(gm.graph, aten.sin.default)
    x, y = (n for n in gm.graph.nodes if n.op == "placeholder")
    with gm.graph.inserting_before(sin.next):
        gm.graph.call_function(aten.copy_.default, (x, y))
    gm.recompile()
    before = run_flat(gm)
    p = Pattern("sin", "sin", "toy", lambda x, y: (x.sin() + y) * 2, lambda x, y: 2 * (y + x.sin()),
                {"x": "f32[N]", "y": "f32[N]"}, key=aten.sin.default)  # fmt: skip
    result = PatternPass("t", (p,)).run(gm, PassContext())
    assert "writes to what" in reason(result)
    assert all(map(torch.equal, run_flat(gm), before))
