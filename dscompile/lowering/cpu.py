"""Lowering for the CPU: each `dsv4::` op of a graph becomes its best template.

An "inline" template is traced on the node's own fake values and its ATen nodes take the op's place, so that Inductor
fuses them with their neighbours. An "opaque" one becomes a call of the custom op `dsv4_cpu::<template>`, which has the
schema, the mutations and the fake kernel of the op that it replaces. Where no template fits, the op's reference is
inlined if it can be traced without looking at data, else the op stays and runs its reference as a call.

ATen ops that have a template (the product of a few rows with a weight) are replaced where it fits and stay otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from dscompile import compat
from dscompile.lowering import products
from dscompile.lowering.calls import arguments_of, op_of, value_of
from dscompile.lowering.template import Choice, CpuTemplate, LoweringRecord, choose, cpu_templates
from dscompile.ops import NAMESPACE, OPS
from dscompile.templates.cpu.memory import keep_freed_blocks

CPU_NAMESPACE = "dsv4_cpu"
_KEPT_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten")

_ATEN = {"aten::mm": torch.ops.aten.mm.default}
_ATEN_FAKES: dict[str, Callable[..., Any]] = {"aten::mm": lambda x, y: x.new_empty((x.shape[0], y.shape[1]))}

_LIBRARY = torch.library.Library(CPU_NAMESPACE, "DEF")
_registered: set[str] = set()


def opaque_op(template: CpuTemplate) -> torch._ops.OpOverload:
    """The custom op of an opaque template, registered at the first question."""
    if template.name not in _registered:
        if template.op in _ATEN:
            aten, fake = _ATEN[template.op], _ATEN_FAKES[template.op]
            schema = template.name + str(aten._schema)[str(aten._schema).index("(") :]
        else:
            spec = OPS[template.op.removeprefix(f"{NAMESPACE}::")]
            schema, fake = template.name + spec.schema[spec.schema.index("(") :], spec.fake
        # The kernels take any strides, so Inductor may keep whatever layout it has.
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
        _LIBRARY.impl(template.name, template.fn, "CompositeExplicitAutograd")
        compat.register_fake(_LIBRARY, f"{CPU_NAMESPACE}::{template.name}", fake)
        _registered.add(template.name)
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, CPU_NAMESPACE), template.name).default
    return op


def lower_graph(gm: fx.GraphModule, *, nested: bool = True, keep_memory: bool = True) -> list[LoweringRecord]:
    """Replace every `dsv4::` op of `gm`, and (`nested`) of the graphs of its layer regions, by a CPU template.

    gm: a functional ATen graph whose nodes carry fake values in `meta["val"]`; ops that change an argument may appear
    as they are or inside `auto_functionalized`. keep_memory: also tell the C library, for the whole process, to keep
    large freed blocks, see `templates.cpu.memory`. Returns one record per op, in the order of the graph.
    """
    if keep_memory:
        keep_freed_blocks()
    records = []
    for graph_module in _graph_modules(gm) if nested else (gm,):
        changed = False
        _sort_choices_by_index(graph_module.graph)
        for node in list(graph_module.graph.nodes):
            record = _lower_node(graph_module, node)
            if record is not None:
                records.append(record)
                changed = True
        if changed:
            records = _merge(graph_module, records)
            graph_module.graph.lint()
            graph_module.recompile()
    return records


# Users of a choice of rows to whom its order means nothing, with the position of the indices among their arguments.
_ORDER_FREE = {"sparse_attention": 6, "unpack_used": 1}


def _sort_choices_by_index(graph: fx.Graph) -> None:
    """Let `index_topk` return rising indices where only the set of them matters.

    Then a query that sees no more rows than it may choose needs no scores, and runs of rows are read as runs.
    """
    for node in graph.nodes:
        found = op_of(node)
        if found != ("index_topk", False) or len(node.args) < 9 or node.args[8]:
            continue
        if node.users and all(_order_free(user, node) for user in node.users):
            node.args = (*node.args[:8], True)


def _order_free(user: fx.Node, choice: fx.Node) -> bool:
    found = op_of(user)
    if found is None or found[1] or found[0] not in _ORDER_FREE:
        return False
    return [i for i, value in enumerate(user.args) if value is choice] == [_ORDER_FREE[found[0]]]


def _merge(gm: fx.GraphModule, records: list[LoweringRecord]) -> list[LoweringRecord]:
    """Join products of one factor, and say so in their records."""
    product = getattr(torch.ops, CPU_NAMESPACE).mm.default if "mm" in _registered else None
    merged = products.merge_products(gm.graph, product, _merged_op()) if product is not None else set()
    return [
        replace(r, template="mm_many", reason="joined with products of the same factor") if r.node in merged else r
        for r in records
    ]


def _merged_op() -> torch._ops.OpOverload:
    if "mm_many" not in _registered:
        _LIBRARY.define(products.SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
        _LIBRARY.impl("mm_many", products.FN, "CompositeExplicitAutograd")
        compat.register_fake(_LIBRARY, f"{CPU_NAMESPACE}::mm_many", products.fake)
        _registered.add("mm_many")
    op: torch._ops.OpOverload = getattr(torch.ops, CPU_NAMESPACE).mm_many.default
    return op


def _graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """`gm` and the graphs that it reaches through higher-order ops, each once."""
    seen: set[int] = set()
    stack = [gm]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        names = dict.fromkeys(str(node.target) for node in current.graph.nodes if node.op == "get_attr")
        children = [getattr(current, name, None) for name in names]
        stack += [child for child in reversed(children) if isinstance(child, fx.GraphModule)]


def _lower_node(gm: fx.GraphModule, node: fx.Node) -> LoweringRecord | None:
    if node.target in _ATEN.values():
        return _lower_aten(node)
    found = op_of(node)
    if found is None:
        return None
    name, wrapped = found
    op = f"{NAMESPACE}::{name}"
    choice = choose(cpu_templates().get(op, ()), arguments_of(node, name, wrapped))
    if choice.template is not None and choice.template.form == "opaque":
        if wrapped:
            node.args = (opaque_op(choice.template), *node.args[1:])
        else:
            node.target = opaque_op(choice.template)
        return LoweringRecord(op, choice.template.name, node.name, choice.reason)
    if wrapped or OPS[name].op._schema.is_mutable:
        return LoweringRecord(op, "reference (called)", node.name, choice.reason)
    return _inline_or_call(gm, node, op, choice)


def _lower_aten(node: fx.Node) -> LoweringRecord | None:
    """Replace an ATen op by its template if that fits; None, and no record, if it stays as it is."""
    op = next(name for name, target in _ATEN.items() if target is node.target)
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    meta = {a.name: value_of(v) for a, v in zip(arguments, node.args, strict=False)} | value_of(dict(node.kwargs))
    if any(value is None for value in meta.values()):
        return None
    choice = choose(cpu_templates().get(op, ()), meta)
    if choice.template is None:
        return None
    record = LoweringRecord(op, choice.template.name, node.name, choice.reason)
    node.target = opaque_op(choice.template)
    return record


def _inline_or_call(gm: fx.GraphModule, node: fx.Node, op: str, choice: Choice) -> LoweringRecord:
    reason = choice.reason
    if choice.template is not None:
        failure = inline(gm, node, choice.template.fn)
        if failure is None:
            return LoweringRecord(op, choice.template.name, node.name, reason)
        reason = f"{choice.template.name} could not be traced: {failure}"
    failure = inline(gm, node, OPS[op.removeprefix(f"{NAMESPACE}::")].reference)
    if failure is None:
        return LoweringRecord(op, "reference (inlined)", node.name, reason)
    return LoweringRecord(op, "reference (called)", node.name, f"{reason}; reference not traceable: {failure}")


def inline(gm: fx.GraphModule, node: fx.Node, fn: Callable[..., Any]) -> str | None:
    """Put the nodes of `fn`, traced on the node's fake arguments, in the place of `node`.

    Symbolic sizes stay symbolic: sizes that `fn` reads become `sym_size` nodes of the arguments. Returns None, or the
    reason why nothing was changed (`fn` looks at data, or the traced result does not fit the node's value).
    """
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    sources = [value for value in flat if isinstance(value, fx.Node)]
    values = [value_of(source) for source in sources]
    if any(value is None for value in values):
        return "an argument has no fake value"

    def call(*inputs: Any) -> Any:
        rest = iter(inputs)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(v, fx.Node) else v for v in flat], spec)
        return fn(*args, **kwargs)

    try:
        with _fake_mode(values), torch.no_grad():
            traced = make_fx(call)(*values)
    except Exception as error:  # whatever tracing raises means: not traceable
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    traced.graph.eliminate_dead_code()
    mismatch = _mismatch(node.meta.get("val"), traced)
    if mismatch is not None:
        return mismatch
    _splice(gm, node, traced, sources)
    return None


def _fake_mode(values: Sequence[Any]) -> FakeTensorMode:
    for value in values:
        mode = getattr(value, "fake_mode", None)
        if isinstance(mode, FakeTensorMode):
            return mode
    return FakeTensorMode()


def _mismatch(expected: Any, traced: fx.GraphModule) -> str | None:
    """Why the traced results cannot stand for `expected` (fake values), or None."""
    result = next(n for n in traced.graph.nodes if n.op == "output").args[0]
    got, want = pytree.tree_leaves(value_of(result)), pytree.tree_leaves(expected)
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for have, need in zip(got, want):
        if isinstance(need, torch.Tensor) and (have.dtype != need.dtype or have.dim() != need.dim()):
            return f"a result is {have.dtype} of rank {have.dim()} instead of {need.dtype} of rank {need.dim()}"
    return None


def _splice(gm: fx.GraphModule, node: fx.Node, traced: fx.GraphModule, sources: Sequence[fx.Node]) -> None:
    graph = gm.graph
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, sources, strict=True))
    kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    result: Any = None
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                result = pytree.tree_map_only(fx.Node, env.__getitem__, inner.args[0])
                continue
            if inner.op == "get_attr":  # a constant of the trace moves along
                name = _new_attribute(gm, f"_dsv4_{inner.target}")
                setattr(gm, name, getattr(traced, inner.target))
                copy = graph.get_attr(name)
            else:
                copy = graph.node_copy(inner, env.__getitem__)
            copy.meta = {**inner.meta, **kept}
            env[inner] = copy
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # several results: every user is a getitem
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _new_attribute(gm: fx.GraphModule, wanted: str) -> str:
    name, count = wanted, 0
    while hasattr(gm, name):
        count += 1
        name = f"{wanted}_{count}"
    return name
