"""Canonical forms of views, copies, factories and their indices."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from . import fxutil
from .normalise import Context, copy_matters, rule
from .optable import CAST, CLONE, EXPAND, FULL, PERMUTE, REDUCTIONS, RESHAPE, SELECT, SLICE, aten, is_op

_HUGE = 2**62


def _shape(node: Any) -> tuple:
    return tuple(node.meta["val"].shape)


@rule(RESHAPE, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
      aten.squeeze.dim, aten.squeeze.dims, aten._reshape_alias.default)  # fmt: skip
def reshape(ctx: Context, node: Node) -> Node | None:
    """Any change of shape -> ``reshape(x, sizes)`` with sizes written out; none -> x.

    Only in patterns, chains become one step and a reduction whose dims come back keeps them: in a graph a pattern may
    end between the two (the matcher reads a graph's chains both ways).
    """
    x = node.args[0]
    while ctx.is_pattern and x.target is RESHAPE:
        x = x.args[0]
    if fxutil.same_shape(_shape(x), _shape(node)):
        return x
    if ctx.is_pattern and x.target in REDUCTIONS and not x.args[2]:
        kept = [1 if d in x.args[1] else s for d, s in enumerate(_shape(x.args[0]))]
        if fxutil.same_shape(kept, _shape(node)):
            return ctx.become(node, x.target, (x.args[0], x.args[1], True), dict(x.kwargs))
    sizes = ctx.sizes(node)
    if sizes is None or (node.target is RESHAPE and x is node.args[0] and list(node.args[1]) == sizes):
        return None
    return ctx.become(node, RESHAPE, (x, sizes))


@rule(PERMUTE, aten.t.default, aten.transpose.int, aten.swapaxes.default, aten.numpy_T.default)
def permute(ctx: Context, node: Node) -> Node | None:
    """Transposes -> ``permute(x, order)``; the identity -> x."""
    x, rank = node.args[0], len(_shape(node))
    order = list(range(rank))
    if node.target is PERMUTE:
        order = [d % rank for d in node.args[1]]
    elif node.target in (aten.t.default, aten.numpy_T.default):
        order.reverse()
    elif rank:
        a, b = node.args[1] % rank, node.args[2] % rank
        order[a], order[b] = order[b], order[a]
    while ctx.is_pattern and x.target is PERMUTE:
        x, order = x.args[0], [x.args[1][d] for d in order]
    if order == list(range(rank)):
        return x
    if node.target is PERMUTE and list(node.args[1]) == order and x is node.args[0]:
        return None
    return ctx.become(node, PERMUTE, (x, order))


@rule(EXPAND)
def expand(ctx: Context, node: Node) -> Node | None:
    """Sizes written out (no -1); new leading dims come from a reshape; no expansion -> x."""
    x, sizes = node.args[0], ctx.sizes(node)
    have, want = _shape(x), _shape(node)
    if fxutil.same_shape(have, want):
        return x
    if sizes is None or -1 in sizes:
        return None
    if len(have) < len(want):
        lead = [1] * (len(want) - len(have)) + [s if isinstance(s, int) else -1 for s in have]
        if lead.count(-1) > 1:
            return None
        return ctx.emit(EXPAND, (ctx.emit(RESHAPE, (x, lead)), sizes))
    return None if list(node.args[1]) == sizes else ctx.become(node, EXPAND, (x, sizes))


@rule(SLICE)
def slice_(ctx: Context, node: Node) -> Node | None:
    """Start and end inside the dimension and not negative; the full range -> x."""
    x, dim, start, end, step = node.args
    size, length = _shape(x)[dim], _shape(node)[dim]
    if step == 1 and fxutil.same_size(size, length):
        return x
    if not isinstance(size, int) or isinstance(start, Node) or isinstance(end, Node):
        bounds = _symbolic_bounds(ctx, node, (start, end, step), size, length)
        return None if bounds == (start, end) else ctx.become(node, SLICE, (x, dim, *bounds, step))
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    if (start, end) == (node.args[2], node.args[3]):
        return None
    return ctx.become(node, SLICE, (x, dim, start, end, step))


def _symbolic_bounds(ctx: Context, node: Node, bounds: tuple, size: Any, length: Any) -> tuple[Any, Any]:
    """Start and end of a slice of symbolic size: an end that is left out or counts from the back becomes a node."""
    start, end, step = bounds
    start = 0 if start is None else start
    if isinstance(start, Node) or isinstance(end, Node) or step != 1:
        return start, end
    first = start if start >= 0 else size + start
    whole = end is None or end < 0 or end >= _HUGE
    new = (ctx.size(first, node), ctx.size(first + length, node) if whole else end)
    return (start, end) if -1 in new else new


@rule(SELECT)
def select(ctx: Context, node: Node) -> Node | None:
    x, dim, index = node.args
    size = _shape(x)[dim]
    if isinstance(index, int) and index < 0 and isinstance(size, int):
        return ctx.become(node, SELECT, (x, dim, index + size))
    return None


@rule(aten.slice_scatter.default)
def slice_scatter(ctx: Context, node: Node) -> Node | None:
    """Bounds as those of a slice; one that replaces everything -> what replaces it."""
    x, src, dim, start, end, step = node.args
    size, length = _shape(x)[dim], _shape(src)[dim]
    if step == 1 and fxutil.same_size(size, length):
        return src
    if not isinstance(size, int) or isinstance(start, Node) or isinstance(end, Node):
        bounds = _symbolic_bounds(ctx, node, (start, end, step), size, length)
        return None if bounds == (start, end) else ctx.become(node, node.target, (x, src, dim, *bounds, step))
    first = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
    last = min(size if end is None else end + size if end < 0 else end, size)
    if (first, last) == (start, end):
        return None
    return ctx.become(node, node.target, (x, src, dim, first, last, step))


@rule(operator.getitem)
def getitem(ctx: Context, node: Node) -> Node | None:
    """Pieces of split, chunk and unbind -> slice, select; values of max(dim) -> amax when the indices are unused."""
    src, i = node.args
    if not isinstance(src, Node) or not is_op(src.target):
        return None
    a = fxutil.bound_args(src)
    if src.target in (aten.unbind.int,):
        return ctx.become(node, SELECT, (a["self"], a["dim"] % a["self"].meta["val"].dim(), i))
    if src.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor):
        x = a["self"]
        dim = a["dim"] % x.meta["val"].dim()
        sizes = [v.shape[dim] for v in src.meta["val"]]
        if not all(isinstance(s, int) for s in sizes):
            return None
        start = sum(sizes[:i])
        if isinstance(_shape(x)[dim], int) and start == 0 and sizes[i] == _shape(x)[dim]:
            return x
        return ctx.become(node, SLICE, (x, dim, start, start + sizes[i], 1))
    if src.target in (aten.max.dim, aten.min.dim) and i == 0 and all(u.args[1] == 0 for u in src.users):
        reduce = aten.amax.default if src.target is aten.max.dim else aten.amin.default
        return ctx.become(node, reduce, (a["self"], [a["dim"] % max(a["self"].meta["val"].dim(), 1)], a["keepdim"]))
    return None


@rule(aten.alias.default, aten.detach.default)
def alias(ctx: Context, node: Node) -> Node | None:
    return node.args[0]


@rule(CLONE, aten.contiguous.default)
def clone(ctx: Context, node: Node) -> Node | None:
    """A copy goes unless somebody can tell the difference."""
    return None if copy_matters(ctx, node) else node.args[0]


@rule(CAST, torch.ops.prims.convert_element_type.default)
def cast(ctx: Context, node: Node) -> Node | None:
    """``_to_copy(x, dtype=..)`` with nothing but what changes; no change -> x."""
    x, a = node.args[0], fxutil.bound_args(node)
    have, want = x.meta["val"], node.meta["val"]
    kwargs: dict[str, Any] = {}
    if want.dtype != have.dtype:
        kwargs["dtype"] = want.dtype
    if want.device != have.device:
        kwargs.update(device=want.device, dtype=want.dtype, **({"non_blocking": True} if a.get("non_blocking") else {}))
    if not kwargs:
        return None if copy_matters(ctx, node) else x
    if node.target is CAST and node.kwargs.keys() - {"memory_format"} == kwargs.keys():
        if "memory_format" not in node.kwargs or copy_matters(ctx, node):
            return None
    change = ctx.emit if "memory_format" in node.kwargs else partial(ctx.become, node)
    return change(CAST, (x,), kwargs)


@rule(aten.copy.default)
def functional_copy(ctx: Context, node: Node) -> Node | None:
    """``copy(dst, src)`` -> src, cast and expanded like dst (dst's values do not matter)."""
    dst, src = node.args[:2]
    want, have = dst.meta["val"], src.meta["val"]
    if want.device != have.device or ctx.sizes(node) is None:
        return None
    if want.dtype != have.dtype:
        src = ctx.emit(CAST, (src,), {"dtype": want.dtype})
    if fxutil.same_shape(have.shape, want.shape):
        return src
    sizes = ctx.sizes(node)
    return None if sizes is None or -1 in sizes else ctx.emit(EXPAND, (src, sizes))


_FACTORIES = {
    aten.zeros.default: 0, aten.ones.default: 1, aten.new_zeros.default: 0, aten.new_ones.default: 1,
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.scalar_tensor.default: None,
    aten.new_full.default: None, aten.full_like.default: None, FULL: None,
}  # fmt: skip


@rule(*_FACTORIES)
def factory(ctx: Context, node: Node) -> Node | None:
    """Constant tensors -> ``full(sizes, value, dtype, device)``; no dependence on a tensor that only lent its dtype."""
    a, out = fxutil.bound_args(node), node.meta["val"]
    value: Any = _FACTORIES[node.target]
    if value is None:
        value = a["s"] if node.target is aten.scalar_tensor.default else a["fill_value"]
    sizes = list(a["size"]) if "size" in a else ctx.sizes(node)
    symbolic = isinstance(value, Node) and isinstance(value.meta.get("val"), torch.SymInt)
    if (isinstance(value, Node) and not symbolic) or sizes is None or -1 in sizes or out.layout != torch.strided:
        return None
    if not symbolic:
        value = bool(value) if out.dtype == torch.bool else float(value) if out.dtype.is_floating_point else value
    kwargs = {"dtype": out.dtype, "device": out.device}
    if node.target is FULL and node.args == (sizes, value) and type(node.args[1]) is type(value):
        if dict(node.kwargs) == kwargs:
            return None
    change = partial(ctx.become, node) if out.is_contiguous() else ctx.emit
    return change(FULL, (sizes, value), kwargs)


@rule(aten.lift_fresh.default, aten.lift_fresh_copy.default)
def lifted(ctx: Context, node: Node) -> Node | None:
    """A lifted constant -> the constant; ``full([], value)`` if it is a number."""
    const = node.args[0]
    if const.op != "get_attr" or node.meta["val"].dim():
        if node.target is aten.lift_fresh_copy.default and copy_matters(ctx, node):
            return None
        fxutil.set_val(const, node.meta["val"])  # the constant itself may have a real value there
        return const
    value: Any = getattr(ctx.gm, str(const.target), None)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    with unset_fake_temporarily():  # the constant is real, also while a fake mode is on around the backend
        number = value.item()
    return ctx.become(node, FULL, ([], number), {"dtype": value.dtype, "device": node.meta["val"].device})


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(ctx: Context, node: Node) -> Node | None:
    """``arange(start, end, step)`` with its dtype written out."""
    a, out = fxutil.bound_args(node), node.meta["val"]
    args, kwargs = (a.get("start", 0), a["end"], a.get("step", 1)), {"dtype": out.dtype, "device": out.device}
    if node.target is aten.arange.start_step and node.args == args and dict(node.kwargs) == kwargs:
        return None
    return ctx.become(node, aten.arange.start_step, args, kwargs)


@rule(aten.index_select.default)
def index_select(ctx: Context, node: Node) -> Node | None:
    x, dim, index = node.args
    if index.meta["val"].dim() != 1:
        return None
    return ctx.become(node, aten.index.Tensor, (x, [None] * dim + [index]))


@rule(aten._assert_tensor_metadata.default)
def metadata_assert(ctx: Context, node: Node) -> Node | None:
    """Static facts about metadata: nothing uses them, and their uses would keep matched nodes alive."""
    if not node.users:
        ctx.graph.erase_node(node)
    return None
