"""How many kernels a layer of a model starts on a GPU, counted from the lowered graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

from dscompile.lowering.calls import bound
from dscompile.lowering.gpu import TRITON_NAMESPACE
from dscompile.lowering.template import triton_templates
from dscompile.ops import NAMESPACE, OPS
from dscompile.options import Options
from dscompile.passes.engine.fxutil import layer_name
from dscompile.passes.engine.graphs import Subgraph, subgraphs
from dscompile.passes.engine.optable import LAYOUT, VIEWS
from dscompile.report import GraphReport
from dscompile.targets import Target, get_target
from dscompile.tuning.calls import TensorSpec
from dscompile.tuning.offline import launches_of
from dscompile.tuning.selection import dtypes_of, select
from dscompile.workload import visit_graphs

_PRODUCTS = frozenset((torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default))


def layer_launches(target: str, model: Callable[..., Any], *args: Any) -> dict[str, list[str]]:
    """Layer -> the kernels that one call of `model` starts in it, by name, in order.

    A call of an operation starts the kernels of its template with the config that would be chosen for it; a matrix
    product is one; operators between them that depend on each other are taken as one kernel of Inductor's ("inductor"),
    views as none. Give it fake tensors. Layers of one kind have equal lists.
    """
    found: dict[str, list[str]] = {}
    machine = get_target(target)

    def visit(graph: fx.GraphModule, labels: dict[str, list[str]], entry: GraphReport) -> None:
        for sub in subgraphs(graph):
            for layer, kernels in _of_graph(sub, labels.get(sub.path), machine).items():
                found.setdefault(layer, []).extend(kernels)

    visit_graphs(Options(target=target), visit, model, *args)
    return found


def _of_graph(sub: Subgraph, labels: list[str] | None, target: Target) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    fused: dict[str, nx.Graph] = {}
    for node in sub.gm.graph.nodes:
        if node.op != "call_function":
            continue
        for layer in labels or [layer_name(node)]:
            kernels = found.setdefault(layer, [])
            custom = _template_call(node, target)
            if custom is not None:
                kernels += custom
            elif node.target in _PRODUCTS:
                kernels.append("matrix product")
            elif _computes(node):
                graph = fused.setdefault(layer, nx.Graph())
                graph.add_node(node)
                graph.add_edges_from((node, source) for source in node.all_input_nodes if source in graph)
    for layer, graph in fused.items():
        found[layer] += ["inductor"] * nx.number_connected_components(graph)
    return found


def _computes(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target is torch.ops.aten.copy_.default and node.args[0] in node.graph.find_nodes(op="placeholder"):
        return not _written_in_place(node.args[1])
    return target not in LAYOUT and target not in VIEWS and isinstance(node.meta.get("val"), torch.Tensor)


def _written_in_place(value: Any) -> bool:
    """Whether `value` is what an operation made of a tensor that it writes to: Inductor lets it write in place."""
    made_by = value.args[0] if isinstance(value, fx.Node) and value.target is operator.getitem else None
    return isinstance(made_by, fx.Node) and made_by.target in (auto_functionalized, auto_functionalized_v2)


def _template_call(node: fx.Node, target: Target) -> list[str] | None:
    """Names of the kernels of a call of a template's custom op, wrapped by functionalisation or not; else None."""
    wrapped = node.args and isinstance(node.args[0], torch._ops.OpOverload)
    custom = node.args[0] if wrapped else node.target
    if not isinstance(custom, torch._ops.OpOverload) or custom.namespace != TRITON_NAMESPACE:
        return None
    name = custom._schema.name.split("::")[1].removesuffix(f"_{target.name}")
    (template,) = (t for found in triton_templates().values() for t in found if t.name == name)
    spec = OPS[template.op.removeprefix(f"{NAMESPACE}::")]
    given = bound(node, custom, bool(wrapped))
    values = [given.get(a.name, a.default_value) for a in spec.op._schema.arguments]
    args = tuple(TensorSpec.of(v).meta() if isinstance(v, torch.Tensor) else v for v in values)
    config, _ = select(template, spec.sizes(*args), dtypes_of(args), target)
    if config is None:
        return ["reference"]
    return [launch.name for launch in launches_of(template, args, config, target)]
