"""Small questions about FX nodes: values, fake evaluation, origin, sizes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from .optable import VIEWS, is_op, op_name

ORIGIN_KEYS = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "seq_nr", "from_node")


def val(node: Any) -> Any:
    """The fake value of a node, or the argument itself when it is no node."""
    return node.meta.get("val") if isinstance(node, Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def fake_mode(gm: GraphModule) -> FakeTensorMode:
    """The fake mode of a graph's values; a fresh one for a graph without tensors."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def evaluating(mode: FakeTensorMode) -> Iterator[None]:
    """Run operators on fake values without recording gradients or being recorded."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing(), torch.no_grad(), mode:
        yield


def evaluate(node: Node, mode: FakeTensorMode) -> Any:
    """Result of a ``call_function`` node on the fake values of its arguments."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), val)
    with evaluating(mode):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def set_val(node: Node, value: Any) -> None:
    """Store a fake value and the tensor metadata derived from it."""
    node.meta["val"] = value
    if isinstance(value, torch.Tensor) and not value.is_sparse:
        node.meta["tensor_meta"] = _extract_tensor_metadata(value)
    else:
        node.meta.pop("tensor_meta", None)


def copy_origin(dst: Node, src: Node | None) -> None:
    """Give ``dst`` the module stack and source line of ``src`` where it has none."""
    if src is None:
        return
    for key in ORIGIN_KEYS:
        if key in src.meta and key not in dst.meta:
            dst.meta[key] = src.meta[key]


def emit(graph: Graph, target: Any, args: tuple, kwargs: dict | None = None, *, like: Node | None = None,
         mode: FakeTensorMode) -> Node:  # fmt: skip
    """Insert ``target(*args)`` at the graph's insertion point, with its fake value and the origin of ``like``."""
    node = graph.call_function(target, args, kwargs or {})
    set_val(node, evaluate(node, mode))
    copy_origin(node, like)
    return node


def schema_args(target: Any) -> list[Any]:
    return list(target._schema.arguments) if is_op(target) else []


def bound_args(node: Node) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in; positional names are ``0, 1, ..`` for plain functions."""
    schema = schema_args(node.target)
    if not schema:
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    out = {}
    for i, arg in enumerate(schema):
        if i < len(node.args):
            out[arg.name] = node.args[i]
        elif arg.name in node.kwargs:
            out[arg.name] = node.kwargs[arg.name]
        else:
            out[arg.name] = arg.default_value
    return out


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes (int or SymInt) are equal whatever the symbols are; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    with contextlib.suppress(Exception):
        return bool(statically_known_true(a == b))
    return False


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(map(same_size, a, b))


def size_value(arg: Any) -> Any:
    """An int argument as int or SymInt: symbolic ones are nodes in the graph."""
    value = val(arg)
    if isinstance(value, torch.SymInt):
        return value.node.maybe_as_int() if value.node.is_constant() else value
    return value


def storage(value: Any) -> int | None:
    """Identity of a fake tensor's storage."""
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(Exception):
            return value.untyped_storage()._cdata
    return None


def root(node: Node) -> Node:
    """The node that owns the memory which ``node`` may be a view of."""
    while node.op == "call_function" and node.target in VIEWS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?\s*(.*)')


def source_line(node: Node) -> str:
    """``file.py:12 code`` of the user's line that made this node, or of its nearest producer that has one."""
    seen = 0
    while node is not None and seen < 20:
        frames = _FRAME.findall(node.meta.get("stack_trace") or "")
        if frames:
            path, line, _, code = frames[-1]
            return f"{path.rsplit('/', 1)[-1]}:{line} {code.strip()}".strip()
        node = next((n for n in node.all_input_nodes), None)  # type: ignore[assignment]
        seen += 1
    return ""


def layer_name(node: Node) -> str:
    """Module path up to its first number (``model.layers.3``), the whole path if there is none, "" if unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = re.sub(r"^L\['\w+'\]", "", str(list(stack.values())[-1][0]))  # the frame's own name for the model
    path = re.sub(r"\['?(\w+)'?\]", r".\1", path)
    parts = [p for p in path.split(".") if p not in ("", "_modules")]
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts)


def describe(node: Any) -> str:
    """``aten.mul %mul_3 f32[2, 8]``: operation, name, type."""
    if not isinstance(node, Node):
        return repr(node)
    what = op_name(node.target) if node.op == "call_function" else node.op
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return f"{what} %{node.name}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{what} %{node.name} {dtype}{[*value.shape]}"
