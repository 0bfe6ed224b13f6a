"""Putting the traced nodes of a function in the place of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from dscompile.lowering.calls import value_of
from dscompile.lowering.template import Choice, LoweringRecord
from dscompile.ops import NAMESPACE, OPS

_KEPT_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten")


def inline_or_call(gm: fx.GraphModule, node: fx.Node, op: str, choice: Choice) -> LoweringRecord:
    """Inline the chosen template, else the reference of `op`; what can neither stays a call of the reference."""
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
