"""Lowering for the CPU: each `dsv4::` op of a graph becomes its best template.

An "inline" template is traced on the node's own fake values and its ATen nodes take the op's place, so that Inductor
fuses them with their neighbours. An "opaque" one becomes a call of the custom op `dsv4_cpu::<template>`, which has the
schema, the mutations and the fake kernel of the op that it replaces. Where no template fits, the op's reference is
inlined if it can be traced without looking at data, else the op stays and runs its reference as a call.

ATen ops that have a template (the product of a few rows with a weight) are replaced where it fits and stay otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dscompile import compat
from dscompile.lowering import products
from dscompile.lowering.calls import arguments_of, graph_modules, op_of, value_of
from dscompile.lowering.inlining import inline_or_call
from dscompile.lowering.template import CpuTemplate, LoweringRecord, choose, cpu_templates
from dscompile.ops import NAMESPACE, OPS
from dscompile.templates.cpu.memory import keep_freed_blocks

CPU_NAMESPACE = "dsv4_cpu"

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
    for graph_module in graph_modules(gm) if nested else (gm,):
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
    return inline_or_call(gm, node, op, choice)


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
