"""One spelling per meaning: the canonical form that user graphs and traced patterns share.

Every rule keeps values exactly and depends only on the node, its arguments and its users' kinds, so a pattern and the
part of a user graph that it describes come out alike. A graph's views stay unmerged (a pattern may end between two;
the matcher looks through chains), identities go away. ``aten.reshape`` stands for every change of shape since it is
legal for any strides, which lets layout-only copies disappear. Metadata of whatever changed is evaluated again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.functions import FloorDiv

from . import fxutil, mutation
from .optable import CLONE, LAYOUT, REDUCTIONS, SLICE, STRIDE_SENSITIVE, VIEWS, aten, is_op, is_pure

Rule = Callable[["Context", Node], "Node | None"]
RULES: dict[Any, list[Rule]] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rewrite for nodes of these targets.

    It returns the node that replaces its argument, the argument itself if that was changed in place, or None.
    """

    def register(fn: Rule) -> Rule:
        for target in targets:
            RULES.setdefault(target, []).append(fn)
        return fn

    return register


_ARITHMETIC: dict[Any, Any] = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv,
}  # fmt: skip


class Context:
    """What a rule may use: emit a node in front of the current one, look at the epoch of writes, mark dirty nodes."""

    def __init__(self, gm: GraphModule, mode: FakeTensorMode, is_pattern: bool) -> None:
        self.gm, self.graph, self.mode, self.is_pattern = gm, gm.graph, mode, is_pattern
        self.writes = mutation.Writes(gm.graph)
        self.dirty: set[Node] = set()
        self.current: Node | None = None
        self.symbols: dict[Any, Node] = {}

    def emit(self, target: Any, args: tuple, kwargs: dict | None = None) -> Node:
        assert self.current is not None
        with self.graph.inserting_before(self.current):
            return fxutil.emit(self.graph, target, args, kwargs, like=self.current, mode=self.mode)

    def become(self, node: Node, target: Any, args: tuple, kwargs: dict | None = None) -> Node:
        """Turn ``node`` into another spelling of the same value: name, position and metadata stay."""
        if any(n in self.dirty for n in node.all_input_nodes):
            self.dirty.add(node)
        node.target = target
        node.args = args
        node.kwargs = kwargs or {}
        return node

    def sizes(self, node: Node) -> list[Any] | None:
        """Shape of ``node`` as arguments: ints, and nodes in front of it for symbolic sizes.

        A size that nothing computes becomes -1; None if there are two of these.
        """
        out = [self.size(size, node) for size in node.meta["val"].shape]
        return out if out.count(-1) <= 1 else None

    def size(self, size: Any, node: Node) -> Node | int:
        """A size as an argument of ``node``: an int or a node, -1 if nothing computes it."""
        symbolic = isinstance(size, torch.SymInt) and not size.node.is_constant()
        return self._symbol(size.node.expr, node) if symbolic else int(size)

    def _symbol(self, expr: Any, node: Node) -> Node | int:
        if (known := self._computed(expr)) is not None:
            return known
        if expr not in self.symbols:
            for source in node.all_input_nodes:
                value = source.meta.get("val")
                for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                    if isinstance(size, torch.SymInt) and size.node.expr == expr:
                        self.symbols[expr] = self.emit(torch.ops.aten.sym_size.int, (source, dim))
        return self.symbols.get(expr, -1)

    def _computed(self, expr: Any) -> Node | int | None:
        """A size from sizes that are there already, so that it does not depend on a tensor inside some match."""
        if expr in self.symbols:
            return self.symbols[expr]
        if expr.is_Integer:
            return int(expr)
        python = _ARITHMETIC.get(expr.func)
        parts = [self._computed(a) for a in expr.args] if python else []
        if not parts or any(p is None for p in parts):
            return None
        out: Any = parts[0]
        for part in parts[1:]:
            out = self.emit(python, (out, part))
        self.symbols[expr] = out
        return out

    def note(self, node: Node) -> None:
        """Remember which node computes a symbolic size."""
        if isinstance(value := node.meta.get("val"), torch.SymInt):
            self.symbols.setdefault(value.node.expr, node)


def normalise(gm: GraphModule, *, is_pattern: bool = False) -> int:
    """Bring ``gm`` (one graph, not its submodules) to canonical form in place; returns the number of rewrites.

    Idempotent. ``is_pattern`` treats the graph's outputs as inner values: copies in front of them may go.
    """
    gm.graph.eliminate_dead_code()
    ctx = Context(gm, fxutil.fake_mode(gm), is_pattern)
    count = 0
    for node in list(gm.graph.nodes):
        if node._erased:
            continue
        ctx.note(node)
        if node.op != "call_function":
            continue
        ctx.current = node
        for _ in range(8):
            explicit_args(node)
            new = next((r for fn in RULES.get(node.target, ()) if (r := fn(ctx, node)) is not None), None)
            if new is None:
                break
            count += 1
            if new is not node and reads_later(ctx, node, new):
                new = ctx.emit(CLONE, (new,))
            if new is not node:
                replace_node(ctx, node, new)
                if new.op != "call_function" or new.target not in RULES:
                    break
                node = ctx.current = new
    count += merge_equal(ctx)
    gm.graph.eliminate_dead_code()
    refresh_nodes(ctx.graph, ctx.dirty, ctx.mode)
    gm.recompile()
    return count


def reads_later(ctx: Context, old: Node, new: Node) -> bool:
    """Whether users of ``old``, a value of its own, would come to read written memory through ``new``."""
    return old.target not in VIEWS and new.target is not CLONE and ctx.writes.is_written(new)


def replace_node(ctx: Context, old: Node, new: Node) -> None:
    """Send the users of ``old`` to ``new`` and drop it."""
    if old is new:
        return
    changed = _layout_of(old) != _layout_of(new)
    for user in list(old.users):
        if changed:
            ctx.dirty.add(user)
        user.replace_input_with(old, new)
    fxutil.copy_origin(new, old)
    ctx.graph.erase_node(old)
    ctx.dirty.discard(old)


def _layout_of(node: Node) -> tuple:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return (id(value),)
    return (*value.stride(), fxutil.storage(value))


def explicit_args(node: Node) -> None:
    """All positional arguments written out with their defaults, dims counted from the front, no default keywords."""
    if not is_op(node.target):
        return
    schema = fxutil.schema_args(node.target)
    values = fxutil.bound_args(node)
    rank = next((v.meta["val"].dim() for v in values.values() if fxutil.is_tensor(v)), None)
    if rank is None and schema and isinstance(values[schema[0].name], (list, tuple)):
        rank = next((v.meta["val"].dim() for v in values[schema[0].name] if fxutil.is_tensor(v)), None)
    if node.target is aten.stack.default and rank is not None:
        rank += 1
    args, kwargs = [], {}
    for arg in schema:
        value = values[arg.name]
        if arg.name in ("dim", "dims") and rank:
            value = positive_dims(value, rank)
            if node.target in REDUCTIONS and arg.name == "dim":
                value = sorted(value) if value else list(range(rank))
        if not arg.kwarg_only:
            args.append(value)
        elif value != arg.default_value or type(value) is not type(arg.default_value):
            kwargs[arg.name] = value
    if tuple(args) != node.args or kwargs != node.kwargs:
        node.args, node.kwargs = tuple(args), kwargs


def positive_dims(dims: Any, rank: int) -> Any:
    if isinstance(dims, int) and not isinstance(dims, bool):
        return dims % rank if -rank <= dims < 0 else dims
    if isinstance(dims, (list, tuple)):
        return [positive_dims(d, rank) for d in dims]
    return dims


def copy_matters(ctx: Context, node: Node) -> bool:
    """Whether a copy must stay: its strides, its own memory or the moment of reading can be observed."""
    if ctx.writes.is_written(node.args[0]):
        return True
    seen, todo = set(), [node]
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "output":
                if not ctx.is_pattern:
                    return True
            elif user.target in LAYOUT or user.target in (SLICE, aten.select.int):
                todo.append(user)
            elif user.op != "call_function" or user.target in STRIDE_SENSITIVE:
                return True
            elif not ctx.is_pattern and not (is_op(user.target) and user.target.namespace in ("aten", "prims")):
                return user.target is not operator.getitem
            elif is_op(user.target) and user.target._schema.is_mutable:
                return True
    return False


def merge_equal(ctx: Context) -> int:
    """Common subexpressions of pure nodes, never across a write to what they read."""
    seen: dict[Any, Node] = {}
    count = 0
    for node in list(ctx.graph.nodes):
        if node.op not in ("call_function", "get_attr") or (node.op == "call_function" and not is_pure(node.target)):
            continue
        if node.target is CLONE:
            continue
        key = (node.op, node.target, _key(node.args), _key(node.kwargs), ctx.writes.epoch(node))
        first = seen.setdefault(key, node)
        if first is not node:
            replace_node(ctx, node, first)
            count += 1
    return count


def _key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    if isinstance(value, Node):
        return id(value)
    return (type(value), repr(value))


def refresh_nodes(graph: Graph, dirty: set[Node], mode: FakeTensorMode) -> None:
    """Evaluate again what depends on a changed layout, as far as the change reaches."""
    if not dirty:
        return
    for node in graph.nodes:
        if node not in dirty or node.op != "call_function" or "val" not in node.meta:
            continue
        if not is_op(node.target) and node.target is not operator.getitem:
            continue
        if is_op(node.target) and node.target._schema.is_mutable:
            continue
        before = _layout_of(node)
        fxutil.set_val(node, fxutil.evaluate(node, mode))
        if _layout_of(node)[:-1] != before[:-1] or node.target in VIEWS:
            dirty.update(node.users)
    dirty.clear()


def normalise_all(gm: GraphModule) -> int:
    """``normalise`` for a module and every graph module inside it."""
    return sum(normalise(m) for m in gm.modules() if isinstance(m, GraphModule))


from . import rules_layout, rules_math  # noqa: E402,F401  (the rules register themselves)
