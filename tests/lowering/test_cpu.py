"""Lowering of a graph to CPU templates: what is inlined, what is called, and that nothing changes but the speed."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dscompile.lowering import CpuTemplate, LoweringRecord
from dscompile.lowering import cpu as cpu_lowering
from dscompile.lowering.cpu import lower_graph
from dscompile.lowering.inlining import inline
from dscompile.lowering.template import choose, cpu_templates
from dscompile.ops import OPS
from dscompile.templates.cpu.linear import MAX_ROWS

dsv4 = torch.ops.dsv4


def traced(fn, *inputs: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(fn, tracing_mode=mode)(*inputs)


def called(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def streams_case(tokens: int = 5, n: int = 4, dim: int = 32) -> tuple[torch.Tensor, ...]:
    mixes = n * (n + 2)
    return torch.randn(tokens, n, dim), torch.randn(mixes, n * dim) / dim, torch.rand(3), torch.randn(mixes)


def block(streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    x, _, post, comb = dsv4.hc_pre(streams, fn, scale, base, None, None, 1e-6, 1e-6, 4, 1e-6, True)
    return dsv4.hc_post(x, streams, post, comb, True)


def test_opaque_templates_take_the_place_of_their_ops() -> None:
    inputs = streams_case()
    gm = traced(block, *inputs)
    expected = gm(*inputs)
    records = lower_graph(gm)
    assert [(r.op, r.template, r.reason) for r in records] == [
        ("dsv4::hc_pre", "hc_pre", "fits"),
        ("dsv4::hc_post", "hc_post", "fits"),
    ]
    assert not [t for t in called(gm) if t.startswith("dsv4.")]
    torch.testing.assert_close(gm(*inputs), expected, rtol=1e-5, atol=1e-5)


def test_every_opaque_template_has_the_schema_and_the_mutations_of_its_op() -> None:
    count = 0
    for templates in cpu_templates().values():
        for template in templates:
            if template.form != "opaque" or not template.op.startswith("dsv4::"):
                continue
            op, spec = cpu_lowering.opaque_op(template), OPS[template.op.removeprefix("dsv4::")]
            assert str(op._schema).split("(", 1)[1] == str(spec.op._schema).split("(", 1)[1]
            assert op._schema.is_mutable == spec.op._schema.is_mutable
            count += 1
    assert count >= 5


def test_an_op_without_template_keeps_its_reference_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_lowering, "cpu_templates", dict)
    x, weight = torch.randn(3, 8), torch.rand(8)
    gm = traced(lambda x, w: dsv4.rms_norm(x, w, 1e-6, "fp32"), x, weight)
    expected = gm(x, weight)
    records = lower_graph(gm)
    assert records == [LoweringRecord("dsv4::rms_norm", "reference (inlined)", "rms_norm", "no template for this op")]
    assert called(gm) and all(t.startswith(("aten.", "prims.")) for t in called(gm))
    torch.testing.assert_close(gm(x, weight), expected, rtol=0, atol=0)


def test_a_reference_that_looks_at_data_stays_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_lowering, "cpu_templates", dict)
    table, rows = torch.randn(10, 4), torch.tensor([[1, 9]])
    gm = traced(lambda t, r: dsv4.engram_gather(t, None, r, torch.float32), table, rows)
    (record,) = lower_graph(gm)
    assert record.template == "reference (called)" and "not traceable" in record.reason
    assert called(gm) == ["dsv4.engram_gather.default"]
    with pytest.raises(IndexError, match="rows"):
        gm(table, torch.tensor([[1, 10]]))


def test_inlining_keeps_sizes_symbolic() -> None:
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, static_shapes=False)
    x = mode.from_tensor(torch.randn(6, 8), static_shapes=False)
    with mode:
        gm = make_fx(lambda x: dsv4.rms_norm(x, None, 1e-6, "fp32") * x.shape[0])(x)
    node = next(n for n in gm.graph.nodes if "rms_norm" in str(n.target))

    def fn(x: torch.Tensor, weight: None, eps: float, mode: str) -> torch.Tensor:
        return x.reshape(x.shape[0] * x.shape[1]).reshape(x.shape) * 2.0

    guards = len(shape_env.guards)
    assert inline(gm, node, fn) is None
    gm.recompile()
    assert len(shape_env.guards) == guards
    for rows in (3, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(gm(x), x * 2.0 * rows)


def test_inlined_nodes_inherit_where_they_come_from() -> None:
    gm = traced(lambda x: dsv4.rms_norm(x, None, 1e-6, "fp32"), torch.randn(2, 8))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["stack_trace"] = "model.py:7"
    node.meta["nn_module_stack"] = {"k": ("layers.3", object)}
    assert inline(gm, node, OPS["rms_norm"].reference) is None
    for inner in gm.graph.nodes:
        if inner.op == "call_function":
            assert inner.meta["stack_trace"] == "model.py:7" and inner.meta["nn_module_stack"] and "val" in inner.meta


def test_a_template_of_another_shape_is_refused_and_changes_nothing() -> None:
    x = torch.randn(2, 8)
    gm = traced(lambda x: dsv4.rms_norm(x, None, 1e-6, "fp32"), x)
    before = str(gm.graph)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert "instead of" in (inline(gm, node, lambda x, *rest: x.double()) or "")
    assert str(gm.graph) == before


def test_choice_names_every_refusal() -> None:
    def template(name: str, refusal: str | None) -> CpuTemplate:
        return CpuTemplate(name, "dsv4::rope", "inline", lambda *a: None, lambda meta: refusal)

    assert choose((), {}).reason == "no template for this op"
    both = choose((template("a", "too wide"), template("b", "too long")), {})
    assert both.template is None and both.reason == "a: too wide; b: too long"
    second = choose((template("a", "too wide"), template("b", None)), {})
    assert second.template is not None and second.template.name == "b" and "a: too wide" in second.reason


def test_products_of_few_rows_are_replaced_where_that_is_faster() -> None:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w.t())

    weight = torch.randn(24, 64).bfloat16()
    most = MAX_ROWS[torch.bfloat16]
    for rows, dtype, replaced in (
        (1, torch.bfloat16, True),
        (most, torch.bfloat16, True),
        (most + 1, torch.bfloat16, False),
        (1, torch.float32, False),
    ):
        x, w = torch.randn(rows, 64).to(dtype), weight.to(dtype)
        gm = traced(product, x, w)
        records = lower_graph(gm)
        assert [r.template for r in records] == (["mm"] if replaced else [])
        assert ("dsv4_cpu.mm.default" in called(gm)) == replaced
        torch.testing.assert_close(gm(x, w).float(), x.float() @ w.float().t(), rtol=2e-2, atol=6e-2)
    gm = traced(torch.mm, torch.randn(2, 64).bfloat16(), torch.randn(64, 24).bfloat16())
    assert lower_graph(gm) == []  # the second factor is no transposed weight


def test_products_of_one_factor_are_joined() -> None:
    def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.mm(x, a.t())
        second = torch.mm(torch.relu(first), c.t())
        return first, second, torch.mm(x, b.permute(1, 0)), torch.mm(x, torch.exp(b).t())

    inputs = tuple(torch.randn(*shape).bfloat16() / 8 for shape in ((3, 64), (24, 64), (40, 64), (32, 24)))
    gm = traced(block, *inputs)
    expected = gm(*inputs)
    records = lower_graph(gm)
    # exp(b) is computed after the first product, so that one cannot join.
    assert [r.template for r in records] == ["mm_many", "mm", "mm_many", "mm"]
    assert called(gm).count("dsv4_cpu.mm_many.default") == 1
    for have, want in zip(gm(*inputs), expected, strict=True):
        torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2)


def test_products_with_a_weight_that_changes_are_not_joined() -> None:
    def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.mm(x, a.t())
        b.mul_(2)
        return first, torch.mm(x, b.t())

    x, a, b = torch.randn(1, 64).bfloat16(), torch.randn(24, 64).bfloat16(), torch.randn(24, 64).bfloat16()
    gm = traced(block, x, a, b)
    expected = gm(x, a, b.clone())
    assert [r.template for r in lower_graph(gm)] == ["mm", "mm"]
    for have, want in zip(gm(x, a, b.clone()), expected, strict=True):
        torch.testing.assert_close(have, want, rtol=2e-2, atol=0.1)


def test_choices_are_sorted_where_only_the_set_matters() -> None:
    def block(q: torch.Tensor, kv: torch.Tensor, weights: torch.Tensor, pos: torch.Tensor, start: torch.Tensor):
        idx = dsv4.index_topk(q, kv, weights, pos + 1, None, 3, 1.0, "none", False)
        out = dsv4.sparse_attention(
            q, kv, pos, start, 4, kv, idx, None, None, 1.0, None, None, False, "none", "none"
        )  # fmt: skip
        return out, dsv4.index_topk(q, kv, weights, pos, None, 3, 1.0, "none", False)

    inputs = (
        torch.randn(1, 6, 2, 32),
        torch.randn(1, 6, 32),
        torch.randn(1, 6, 2),
        torch.arange(6)[None],
        torch.zeros(1, dtype=torch.long),
    )
    gm = traced(block, *inputs)
    expected = gm(*inputs)
    lower_graph(gm)
    assert [n.args[8] for n in gm.graph.nodes if "index_topk" in str(n.target)] == [True, False]
    for have, want in zip(gm(*inputs), expected, strict=True):
        torch.testing.assert_close(have, want)


def test_mutating_ops_inside_functionalisation_are_retargeted() -> None:
    pool, rows, slots = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(2, 8, dtype=torch.uint8), torch.tensor([2, -1])
    seen: dict[str, list[str]] = {}

    def backend(gm: fx.GraphModule, example_inputs: list[torch.Tensor]):
        from torch._dynamo.backends.common import aot_autograd

        def inner(graph: fx.GraphModule, inputs: list[torch.Tensor]):
            seen["records"] = [f"{r.op}->{r.template}" for r in lower_graph(graph)]
            seen["called"] = [str(a) for n in graph.graph.nodes for a in n.args[:1]]
            return graph.forward

        return aot_autograd(fw_compiler=inner)(gm, example_inputs)

    @torch.compile(backend=backend, fullgraph=True)
    def step(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        dsv4.store_rows(pool, rows, slots)
        return pool + 0

    with torch.no_grad():
        out = step(pool, rows, slots)
    assert seen["records"] == ["dsv4::store_rows->store_rows"]
    assert "dsv4_cpu.store_rows.default" in seen["called"]
    assert pool[2].eq(1).all() and pool.sum() == 8 and torch.equal(out, pool)
