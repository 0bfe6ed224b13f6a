"""Lowering for a GPU: each `dsv4::` op of a graph becomes the custom op of its best Triton template.

`dsv4_triton::<template>_<target>` has the schema, the mutations and the fake kernel of the op that it replaces. Which
config runs is decided when it is called, from the sizes of that call. Where no template fits, the op's reference is
inlined or called, as on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dscompile import compat
from dscompile.lowering.calls import arguments_of, graph_modules, op_of
from dscompile.lowering.inlining import inline_or_call
from dscompile.lowering.template import Choice, LoweringRecord, choose, triton_templates
from dscompile.ops import NAMESPACE, OPS
from dscompile.targets import Target
from dscompile.templates.triton.launching import interpreting
from dscompile.templates.triton.record import Config, TritonTemplate
from dscompile.tuning.selection import dtypes_of, select

TRITON_NAMESPACE = "dsv4_triton"

_LIBRARY = torch.library.Library(TRITON_NAMESPACE, "DEF")
_registered: set[str] = set()


class WrongDeviceError(RuntimeError):
    """A graph that was lowered for a GPU met tensors of another device."""


def lower_graph(gm: fx.GraphModule, target: Target, *, nested: bool = True) -> list[LoweringRecord]:
    """Replace every `dsv4::` op of `gm`, and (`nested`) of the graphs of its layer regions, by a Triton template.

    gm: as for the CPU. Returns one record per op, in the order of the graph.
    """
    records = []
    for graph_module in graph_modules(gm) if nested else (gm,):
        found = [_lower_node(graph_module, node, target) for node in list(graph_module.graph.nodes)]
        here = [record for record in found if record is not None]
        if here:
            graph_module.graph.lint()
            graph_module.recompile()
        records += here
    return records


def _lower_node(gm: fx.GraphModule, node: fx.Node, target: Target) -> LoweringRecord | None:
    found = op_of(node)
    if found is None:
        return None
    name, wrapped = found
    op = f"{NAMESPACE}::{name}"
    choice = choose(triton_templates().get(op, ()), arguments_of(node, name, wrapped))
    if choice.template is not None:
        custom = triton_op(choice.template, target)
        if wrapped:
            node.args = (custom, *node.args[1:])
        else:
            node.target = custom
        return LoweringRecord(op, choice.template.name, node.name, choice.reason)
    if wrapped or OPS[name].op._schema.is_mutable:
        return LoweringRecord(op, "reference (called)", node.name, choice.reason)
    return inline_or_call(gm, node, op, Choice(None, choice.reason))


def triton_op(template: TritonTemplate, target: Target) -> torch._ops.OpOverload:
    """The custom op of a template on a target, registered at the first question."""
    name = f"{template.name}_{target.name}"
    if name not in _registered:
        spec = OPS[template.op.removeprefix(f"{NAMESPACE}::")]
        _LIBRARY.define(
            name + spec.schema[spec.schema.index("(") :],
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
        )
        _LIBRARY.impl(name, _kernel(template, target), "CompositeExplicitAutograd")
        compat.register_fake(_LIBRARY, f"{TRITON_NAMESPACE}::{name}", spec.fake)
        _registered.add(name)
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, TRITON_NAMESPACE), name).default
    return op


def _kernel(template: TritonTemplate, target: Target) -> Callable[..., Any]:
    spec = OPS[template.op.removeprefix(f"{NAMESPACE}::")]
    arguments = spec.op._schema.arguments
    known: dict[tuple[Any, ...], Config | None] = {}

    def run(*args: Any) -> Any:
        _check_device(template, target, args)
        full = (*args, *(a.default_value for a in arguments[len(args) :]))
        sizes, dtypes = spec.sizes(*full), dtypes_of(full)
        key = (dtypes, *sizes.values())
        if key not in known:
            known[key] = config_for(template, sizes, dtypes, target)
        config = known[key]
        if config is None:
            return spec.reference(*full)
        return template.fn(*full, config=config, target=target)

    return run


def config_for(template: TritonTemplate, sizes: dict[str, Any], dtypes: str, target: Target) -> Config | None:
    """The config to run, from the tuning databases or the template's first; None, with a warning, if there is none."""
    config, _ = select(template, sizes, dtypes, target)
    if config is None:
        shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
        reasons = {template.check(config, sizes, target) for config in template.configs(sizes, target)}
        warnings.warn(
            f"{template.name} has no config for {shown} on {target.name} ({'; '.join(sorted(filter(None, reasons)))}): "
            "the plain reference runs instead",
            stacklevel=3,
        )
    return config


def _check_device(template: TritonTemplate, target: Target, args: tuple[Any, ...]) -> None:
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
    if device is None or device.type in (target.device_type, "meta") or (device.type == "cpu" and interpreting()):
        return
    raise WrongDeviceError(
        f"{template.name} was lowered for {target.name} ({target.product}) and its tensors are on {device}: move the "
        "model to such a GPU, leave out option 'target', or run kernels in Triton's interpreter (TRITON_INTERPRET=1)"
    )
