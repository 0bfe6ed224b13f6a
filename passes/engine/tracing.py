"""From a plain PyTorch function on fake tensors to a graph of ATen and custom operators."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .optable import mutated_args


class _Unrecordable(Exception):
    """The quick recorder cannot represent this function."""


class Recorder(TorchDispatchMode):
    """Notes every operator with its fake result: what ``make_fx`` does, several times faster, for static shapes."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.nodes: dict[int, tuple[torch.Tensor, Node]] = {}
        for i, value in enumerate(inputs):
            self._note(self.graph.placeholder(f"arg{i}_1"), value)

    def _note(self, node: Node, value: Any) -> None:
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self.nodes[id(value)] = (value, node)
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                self._note(self.graph.call_function(operator.getitem, (node, i)), item)

    def node(self, value: Any) -> Any:
        """What stands for a value in the graph; tensors from outside become constants."""
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            raise _Unrecordable
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.nodes:
            real = getattr(value, "constant", value)
            if real is None:
                raise _Unrecordable
            name = f"_tensor_constant{len(self.constants)}"
            self.constants[name] = real
            self._note(self.graph.get_attr(name), value)
        return self.nodes[id(value)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "aten" and mutated_args(func):
            raise _Unrecordable
        names = tree_map(self.node, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        self._note(self.graph.call_function(func, *names), out)
        return out

    def finish(self, result: Any) -> GraphModule:
        values, _ = tree_flatten(result)
        nodes = [self.node(v) for v in values]
        self.graph.output(nodes[0] if isinstance(result, torch.Tensor) else tuple(nodes))
        module = torch.nn.Module()
        for name, value in self.constants.items():
            module.register_buffer(name, value, persistent=False)
        gm = GraphModule(module, self.graph)
        for node in [n for n in gm.graph.nodes if n.target is operator.getitem and not n.users]:
            gm.graph.erase_node(node)
        return gm


def trace(fn: Callable[..., Any], tensors: Mapping[str, torch.Tensor], others: Mapping[str, Any]) -> GraphModule:
    """Graph of ``fn(**tensors, **others)``; of ``others`` only what ``fn`` takes. Call it under a fake mode.

    Writes of ATen operators to inner values become functional; custom operators that write stay as they are.
    """
    known = inspect.signature(fn).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        others = {k: v for k, v in others.items() if k in known}
    keys, values = list(tensors), list(tensors.values())

    def flat(*args: torch.Tensor) -> Any:
        return fn(**dict(zip(keys, args)), **others)

    if not any(isinstance(s, torch.SymInt) for v in values for s in v.shape):
        try:
            recorder = Recorder(values)
            with recorder:
                result = flat(*values)
            return recorder.finish(result)
        except _Unrecordable:
            pass
    gm = make_fx(flat)(*values)
    if any(n.op == "call_function" and mutated_args(n.target) and n.target.namespace == "aten" for n in gm.graph.nodes):
        gm = make_fx(torch.func.functionalize(flat, remove="mutations"))(*values)
    return gm
