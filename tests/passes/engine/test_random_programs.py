"""Random programs with a written pool: whatever matches, results and the pool's bytes stay the same (case R22)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dscompile.ops  # noqa: F401  (registers torch.ops.dsv4)
from dscompile.passes.engine import Normalise, Pattern, PatternPass, Pipeline
from dscompile.passes.engine.testing import run_flat

aten = torch.ops.aten
dsv4 = torch.ops.dsv4


def norm(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def store_op(pool, rows, slots):
    dsv4.store_rows(pool, rows.sin(), slots)
    return pool


def store_read_op(pool, rows, slots):
    old = pool.sum(0)
    dsv4.store_rows(pool, rows.cos(), slots)
    return pool, old


PATTERNS = (
    Pattern("norm", "norm", "toy", norm, lambda x, eps: dsv4.rms_norm(x, None, eps, "scale_cast"), {"x": "f32[N D]"},
            {"eps": 1.2345e-5}),
    Pattern("store", "store", "toy", lambda pool, rows, slots: aten.index_put(pool, [slots], rows.sin()), store_op,
            {"pool": "f32[S R]", "rows": "f32[N R]", "slots": "i64[N]"}),
    Pattern("store_read", "store", "toy",
            lambda pool, rows, slots: (aten.index_put(pool, [slots], rows.cos()), pool.sum(0)), store_read_op,
            {"pool": "f32[S R]", "rows": "f32[N R]", "slots": "i64[N]"}, required=(0, 1)),
    Pattern("read", "read", "toy", lambda pool: pool.exp().amax(0) * 2, lambda pool: 2 * pool.exp().amax(0),
            {"pool": "f32[S R]"}),
    Pattern("two", "two", "toy", lambda x, y: ((t := x.tanh()) - y, t.abs()),
            lambda x, y: (-y + x.tanh(), x.tanh().abs()), {"x": "f32[N D]", "y": "f32[N D]"}),
)  # fmt: skip


class Program:
    """A pool, a value x and everything read so far; steps change them in order, as a functionalised model would."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, base, x, slots):
        pool, out, keep = base, [], base
        for step in self.steps:
            if step == "norm":
                x = norm(x, 1e-6)
            elif step == "store":
                pool = aten.index_put(pool, [slots], x.sin())
            elif step == "store_read":
                old = pool.sum(0)
                pool = aten.index_put(pool, [slots], x.cos())
                x = x + old
            elif step == "read":
                out.append(pool.exp().amax(0) * 2)
            elif step == "read_first":
                out.append(base.exp().amax(0) * 2)
            elif step == "remember":
                keep = pool
            elif step == "read_remembered":
                out.append(keep.sum(0) + keep.exp().amax(0) * 2)
            elif step == "rows":
                x = x + pool[slots]
            elif step == "two":
                t = x.tanh()
                out.append(t.abs())
                x = t - out[-1].view(2, 4).flip(0)
            elif step == "view":
                x = x.t().contiguous().view(4, 2).permute(1, 0)
        aten.copy_(base, pool)
        return [x + 0.5, *out]


STEPS = ["norm", "store", "store_read", "read", "read_first", "remember", "read_remembered", "rows", "two", "view"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=2, max_size=9))
def test_rewriting_keeps_results_and_memory(steps):
    with FakeTensorMode(), torch.no_grad():
        gm = make_fx(Program(steps))(torch.empty(5, 4), torch.empty(2, 4), torch.empty(2, dtype=torch.int64))
    inputs = [torch.randn(5, 4), torch.randn(2, 4), torch.tensor([3, 1])]
    before = run_flat(gm, inputs)
    line = Pipeline((Normalise(), PatternPass("all", PATTERNS)))
    line.run(gm)
    for a, b in zip(run_flat(gm, inputs), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not [m for m in line.run(gm)[1].matches if m.family in ("norm", "store")]


def test_the_programs_do_match():
    """The property above is not empty: a plain program turns into the operations."""
    with FakeTensorMode(), torch.no_grad():
        program = Program(["norm", "store", "read", "rows", "store_read", "read"])
        gm = make_fx(program)(torch.empty(5, 4), torch.empty(2, 4), torch.empty(2, dtype=torch.int64))
    result = Pipeline((Normalise(), PatternPass("all", PATTERNS))).run(gm)[1]
    assert result.counts == {"norm": 1, "store": 2, "read": 2}
    assert not gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
