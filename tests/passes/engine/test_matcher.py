"""What matches, what does not, and the reason given for it."""

from __future__ import annotations

import pytest
import torch

import dscompile.ops  # noqa: F401  (registers torch.ops.dsv4)
from dscompile.passes.engine import Pattern, PatternError, PatternPass, Reject, normalise
from dscompile.passes.engine.diagnose import explain_mismatch
from dscompile.passes.engine.graphs import find
from dscompile.passes.engine.passes import PassContext
from dscompile.passes.engine.testing import functional_graph, run_flat

aten = torch.ops.aten


def norm(x, weight, eps):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def norm_op(x, weight, eps):
    return torch.ops.dsv4.rms_norm(x, weight, eps, "cast_before_weight")


RMS = Pattern("rms.hf", "rms_norm", "hf", norm, norm_op, {"x": "act[*B D]", "weight": "act[D]"}, {"eps": 1.2345e-5})


def apply(pattern, fn, *inputs, dynamic=False, **kwargs):
    """Graph of fn after normalising and applying one pattern, with the result; values must not change."""
    gm = functional_graph(fn, *inputs, dynamic=dynamic)
    before = run_flat(gm)
    normalise(gm)
    result = PatternPass("test", (pattern,), **kwargs).run(gm, PassContext())
    for a, b in zip(run_flat(gm), before):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    return gm, result


def reason(result):
    assert not result.matches and len(result.near_misses) == 1, result
    return result.near_misses[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (1, 1, 2, 16)])
def test_dtypes_and_batch_dims(dtype, shape):
    gm, result = apply(RMS, lambda x, w: norm(x, w, 1e-6), torch.randn(shape).to(dtype), torch.rand(16).to(dtype))
    assert result.counts == {"rms_norm": 1}
    (call,) = find(gm.graph, torch.ops.dsv4.rms_norm.default)
    assert call.args[2] == 1e-6 and len(find(gm.graph, aten.rsqrt.default)) == 0
    assert call.meta["val"].dtype == dtype and "weight * h.to" in call.meta["stack_trace"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6)) * w,
        lambda x, w: w * (torch.rsqrt(1e-6 + (x * x).mean(-1, True)) * x),
        lambda x, w: (x * (x.float().pow(2).mean(-1, keepdim=True) + torch.tensor(1e-6)).rsqrt()).type_as(x) * w,
        lambda x, w: (y := x.clone().view(3, 16)) * torch.rsqrt(y.pow(2).mean(-1)[:, None] + 1e-6) * w.contiguous(),
    ],
)
def test_spellings_and_orders(fn):
    _, result = apply(RMS, fn, torch.randn(3, 16), torch.rand(16))
    assert result.counts == {"rms_norm": 1}


@pytest.mark.parametrize(
    "fn, why",
    [
        (
            lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-6)),
            "expected aten.add, found aten.sub",
        ),
        (lambda x, w: w + (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), "expected aten.mul after"),
        (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)), "dim B0 bound to 3, here 1"),
        (lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)), "2 expected, here 3"),
        (lambda x, w: w * (x.exp() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), "input x is %"),
        (
            lambda x, w: w[:, None, None] * (x * torch.rsqrt(x.square().mean(-1, True) + 1e-6)),
            "2 dims expected, here 3",
        ),
        (lambda x, w: (h := x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w + h, "also used by aten.add"),
        (lambda x, w: w[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), "dim D bound to 16, here 1"),
    ],
)
def test_near_misses_say_why(fn, why):
    _, result = apply(RMS, fn, torch.randn(3, 16), torch.rand(16))
    assert why in reason(result)
    miss = result.near_misses[0]
    assert miss.family == "rms_norm" and 0.5 <= miss.share <= 1 and "test_matcher.py" in miss.source


def test_other_mathematics_is_no_near_miss():
    _, result = apply(RMS, lambda x, w: torch.rsqrt(x.abs() + 1) * w, torch.randn(3, 16), torch.rand(16))
    assert not result.matches and not result.near_misses


def test_symbolic_sizes():
    gm, result = apply(RMS, lambda x, w: norm(x, w, 1e-6), torch.randn(3, 5, 16), torch.rand(16), dynamic=True)
    assert result.counts == {"rms_norm": 1}
    (call,) = find(gm.graph, torch.ops.dsv4.rms_norm.default)
    assert isinstance(call.meta["val"].shape[0], torch.SymInt)


def split_swish(x, limit):
    a, b = x.chunk(2, -1)
    return torch.nn.functional.silu(a.clamp(max=limit)) * b.clamp(-limit, limit)


SWISH = Pattern(
    "swish", "swish", "toy", split_swish, lambda x, limit: torch.ops.dsv4_toy.swish(x, limit), {"x": "f32[N 2*I]"},
    {"limit": 123.25}, key=aten.silu.default,
)  # fmt: skip

_LIB = torch.library.Library("dsv4_toy", "DEF")
_LIB.define("swish(Tensor x, float limit) -> Tensor")
_LIB.impl("swish", split_swish, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_toy::swish", lambda x, limit: x.new_empty(x.shape[0], x.shape[1] // 2), lib=_LIB)


def test_scalars_bind_with_their_sign():
    gm, result = apply(SWISH, lambda x: split_swish(x, 7.0), torch.randn(3, 10) * 9)
    assert result.counts == {"swish": 1}
    assert find(gm.graph, torch.ops.dsv4_toy.swish.default)[0].args[1] == 7.0


def test_scalars_must_agree():
    def uneven(x):
        a, b = x.chunk(2, -1)
        return torch.nn.functional.silu(a.clamp(max=7.0)) * b.clamp(-7.0, 8.0)

    _, result = apply(SWISH, uneven, torch.randn(3, 10))
    assert "scalar limit bound to 7.0, here 8.0" in reason(result)


def test_derived_sizes_must_agree():
    def uneven(x):
        a, b = x[:, :5], x[:, 3:8]
        return torch.nn.functional.silu(a.clamp(max=7.0)) * b.clamp(-7.0, 7.0)

    _, result = apply(SWISH, uneven, torch.randn(3, 10))
    assert "dim I bound to 5, here 3" in reason(result)


def heads(x, w):
    b, t, d = x.shape
    y = torch.nn.functional.linear(x, w).view(b, t, -1, 19).transpose(1, 2)
    return y.float().softmax(-1)


HEADS = Pattern(
    "heads", "heads", "toy", heads, lambda x, w: (x @ w.t()).unflatten(-1, (-1, 19)).permute(0, 2, 1, 3).softmax(-1),
    {"x": "f32[B T D]", "w": "f32[H*19 D]"},
)  # fmt: skip


@pytest.mark.parametrize("b, t, h", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 1), (1, 1, 4)])
def test_sizes_of_one(b, t, h):
    _, result = apply(HEADS, heads, torch.randn(b, t, 8), torch.randn(h * 19, 8))
    assert result.counts == {"heads": 1}


def test_literal_sizes_are_literal():
    def other(x, w):
        return torch.nn.functional.linear(x, w).view(2, 3, -1, 38).transpose(1, 2).softmax(-1)

    _, result = apply(HEADS, other, torch.randn(2, 3, 8), torch.randn(76, 8))
    assert "19 expected, here 38" in reason(result)


def test_inputs_in_another_layout():
    """The graph holds the input only after the pattern's first step: the engine undoes that step."""

    def pattern(x):
        return x.transpose(1, 2).exp() * 3

    def graph(x):
        return (x + 1).exp() * 3

    p = Pattern("t", "t", "toy", pattern, lambda x: x.mT.exp() * 3, {"x": "f32[A B C]"}, key=aten.exp.default)
    _, result = apply(p, graph, torch.randn(2, 3, 4))
    assert result.counts == {"t": 1}


def test_chains_of_views_are_cut_anywhere():
    def pattern(x, y):
        return (x.reshape(x.shape[0], -1) @ y).exp()

    def graph(x, y):
        return (x.view(2, 3, 4, 1).view(6, 4).view(2, 12) @ y).exp(), x.view(6, 4)

    p = Pattern("v", "v", "toy", pattern, lambda x, y: (x.flatten(1) @ y).exp(), {"x": "f32[A B C]", "y": "f32[B*C D]"})
    _, result = apply(p, graph, torch.randn(2, 3, 4), torch.randn(12, 5))
    assert result.counts == {"v": 1}


def test_constant_tables():
    def table(x):
        return torch.tensor([0.0, 0.5, 1.0, 2.0])[x] * 2

    def other(x):
        return torch.tensor([0.0, 0.5, 1.0, 3.0])[x] * 2

    p = Pattern("t", "t", "toy", table, lambda x: 2 * torch.tensor([0.0, 0.5, 1.0, 2.0])[x], {"x": "i64[N]"},
                key=aten.index.Tensor)  # fmt: skip
    x = torch.tensor([0, 1, 2, 3, 2, 1])
    assert apply(p, table, x)[1].counts == {"t": 1}
    assert "constant tensor" in reason(apply(p, other, x)[1])


def test_guard_reasons_reach_the_report():
    def guard(match):
        assert match.dims["D"] == 16 and match.val("x").shape == (3, 16) and match.scalars["eps"] == 1e-6
        return Reject("width 16 is not supported", match.inputs["weight"])

    p = Pattern("g", "rms_norm", "toy", norm, norm_op, RMS.inputs, RMS.scalars, guard=guard)
    gm, result = apply(p, lambda x, w: norm(x, w, 1e-6), torch.randn(3, 16), torch.rand(16))
    assert reason(result) == "width 16 is not supported" and result.near_misses[0].share == 1
    assert len(find(gm.graph, aten.rsqrt.default)) == 1


def test_guards_that_return_bools_are_refused():
    p = Pattern("g", "rms_norm", "toy", norm, norm_op, RMS.inputs, RMS.scalars, guard=lambda m: True)
    with pytest.raises(PatternError, match="guard returned True"):
        apply(p, lambda x, w: norm(x, w, 1e-6), torch.randn(3, 16), torch.rand(16))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scalars": {"eps": 1.2345e-5, "idle": 9.875}, "search": lambda x, weight, eps, idle: norm(x, weight, eps)},
         "scalar idle=9.875 does not appear"),
        ({"inputs": {"x": "activation[D]", "weight": "act[D]"}}, "unknown dtype class 'activation'"),
        ({"inputs": {"x": "act(D)", "weight": "act[D]"}}, "expected 'dtype"),
        ({"search": lambda x, weight, eps: x}, "output 0 is not computed"),
        ({"search": lambda x, weight, eps: x @ weight.t() @ weight + eps}, "search failed"),
    ],
)  # fmt: skip
def test_pattern_mistakes_are_named(change, message):
    fields = {"search": norm, "inputs": RMS.inputs, "scalars": RMS.scalars, **change}
    p = Pattern(name="bad", family="f", dialect="d", replace=norm_op, **fields)
    with pytest.raises(PatternError, match=message):
        for dtypes, rank in p.variants():
            p.variant(dtypes, rank)


def test_mismatch_is_explained_next_to_the_graph():
    gm = functional_graph(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-6)),
                          torch.randn(3, 16), torch.rand(16))  # fmt: skip
    normalise(gm)
    text = explain_mismatch(RMS, find(gm.graph, aten.rsqrt.default)[0])
    assert "+ aten.rsqrt <- aten.rsqrt %rsqrt" in text and "! expected aten.add, found aten.sub" in text
    assert text.splitlines()[-1].startswith("=> expected aten.add")
