"""Canonical forms of arithmetic: same bits, one spelling."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from . import fxutil
from .normalise import Context, rule
from .optable import CAST, EXPAND, FULL, PERMUTE, RESHAPE, aten

_BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default,
           aten.minimum.default, aten.eq.Tensor, aten.ne.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.lt.Tensor,
           aten.le.Tensor)  # fmt: skip
_TO_SCALAR = {
    aten.eq.Tensor: aten.eq.Scalar, aten.ne.Tensor: aten.ne.Scalar, aten.gt.Tensor: aten.gt.Scalar,
    aten.ge.Tensor: aten.ge.Scalar, aten.lt.Tensor: aten.lt.Scalar, aten.le.Tensor: aten.le.Scalar,
    aten.pow.Tensor_Tensor: aten.pow.Tensor_Scalar, aten.bitwise_and.Tensor: aten.bitwise_and.Scalar,
    aten.bitwise_or.Tensor: aten.bitwise_or.Scalar, aten.bitwise_xor.Tensor: aten.bitwise_xor.Scalar,
}  # fmt: skip
_MIRROR = {aten.lt.Tensor: aten.gt.Tensor, aten.le.Tensor: aten.ge.Tensor}
_KEEPS_SCALAR = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, *_TO_SCALAR)


def _kind(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _constant(node: Any) -> Any:
    """Value of a 0-d constant node, None otherwise."""
    if isinstance(node, Node) and node.target is FULL and not node.args[0] and not isinstance(node.args[1], Node):
        value = node.args[1]
        return float(torch.tensor(value, dtype=node.meta["val"].dtype)) if isinstance(value, float) else value
    return None


@rule(*_KEEPS_SCALAR)
def inline_constant(ctx: Context, node: Node) -> Node | None:
    """``op(x, 0-d constant)`` -> ``op(x, number)`` where neither dtype nor bits can change."""
    if len(node.args) < 2 or not fxutil.is_tensor(node.args[0]):
        return None
    a, b = node.args[:2]
    target = node.target
    if _constant(b) is None and _constant(a) is not None and target in (aten.add.Tensor, aten.mul.Tensor):
        a, b = b, a
    value = _constant(b)
    if value is None or not fxutil.is_tensor(a) or a.meta["val"].dim() == 0 or node.kwargs.get("alpha", 1) != 1:
        return None
    dtype = a.meta["val"].dtype
    if _kind(dtype) != _kind(b.meta["val"].dtype) or _kind(dtype) == 0:
        return None
    if isinstance(value, float) and torch.finfo(dtype).bits < 32 and float(torch.tensor(value, dtype=dtype)) != value:
        return None  # devices differ in whether they round the constant first
    return ctx.become(node, _TO_SCALAR.get(target, target), (a, value))


@rule(*_BINARY, aten.where.self)
def explicit_promotion(ctx: Context, node: Node) -> Node | None:
    """Operands of different dtypes -> an explicit cast in front, as a user who writes ``.float()`` has it."""
    first = 1 if node.target is aten.where.self else 0
    a, b = node.args[first : first + 2]
    if not (fxutil.is_tensor(a) and fxutil.is_tensor(b)):
        return _int_by_float(ctx, node, a, b)
    x, y = a.meta["val"], b.meta["val"]
    if x.dtype == y.dtype or x.device != y.device:
        return None
    common = torch.result_type(x, y)
    args = list(node.args)
    for i, (operand, value) in enumerate(((a, x), (b, y)), first):
        if value.dtype != common and value.dim():
            args[i] = ctx.emit(CAST, (operand,), {"dtype": common})
    return None if args == list(node.args) else ctx.become(node, node.target, tuple(args), dict(node.kwargs))


def _int_by_float(ctx: Context, node: Node, a: Any, b: Any) -> Node | None:
    if not fxutil.is_tensor(a) or not isinstance(b, float) or node.target not in (aten.add.Tensor, aten.sub.Tensor,
                                                                                 aten.mul.Tensor):  # fmt: skip
        return None
    if a.meta["val"].dtype.is_floating_point or a.meta["val"].dim() == 0 or node.meta["val"].dtype.is_complex:
        return None
    cast = ctx.emit(CAST, (a,), {"dtype": node.meta["val"].dtype})
    return ctx.become(node, node.target, (cast, b), dict(node.kwargs))


@rule(aten.square.default)
def square(ctx: Context, node: Node) -> Node | None:
    return ctx.become(node, aten.pow.Tensor_Scalar, (node.args[0], 2))


@rule(aten.mul.Tensor)
def multiply(ctx: Context, node: Node) -> Node | None:
    """x*x -> x^2 (the kernel of pow multiplies), x*1 -> x, x*-1 -> -x."""
    a, b = node.args
    same = not isinstance(b, Node) and a.meta["val"].dtype == node.meta["val"].dtype
    if a is b and a.meta["val"].dtype.is_floating_point:
        return ctx.become(node, aten.pow.Tensor_Scalar, (a, 2))
    if same and b == 1:
        return a
    if same and b == -1 and a.meta["val"].dtype.is_floating_point:
        return ctx.become(node, aten.neg.default, (a,))
    return None


@rule(aten.div.Tensor)
def divide(ctx: Context, node: Node) -> Node | None:
    a, b = node.args
    return a if not isinstance(b, Node) and b == 1 and a.meta["val"].dtype == node.meta["val"].dtype else None


@rule(aten.pow.Tensor_Scalar)
def power(ctx: Context, node: Node) -> Node | None:
    """The exponents that the kernel itself treats apart."""
    x, exponent = node.args
    if not x.meta["val"].dtype.is_floating_point or isinstance(exponent, Node):
        return None
    if exponent == 0.5:
        return ctx.become(node, aten.sqrt.default, (x,))
    if exponent == -0.5:
        return ctx.become(node, aten.rsqrt.default, (x,))
    if exponent == 2 and isinstance(exponent, float):
        return ctx.become(node, node.target, (x, 2))
    return x if exponent == 1 else None


@rule(aten.neg.default)
def negate(ctx: Context, node: Node) -> Node | None:
    x = node.args[0]
    return x.args[0] if x.target is aten.neg.default else None


@rule(aten.add.Tensor, aten.sub.Tensor)
def add_sub(ctx: Context, node: Node) -> Node | None:
    """a + -b -> a - b; integer x + 0 -> x; constant - x -> rsub."""
    a, b = node.args
    if node.kwargs.get("alpha", 1) != 1:
        return None
    dtype = node.meta["val"].dtype
    if isinstance(b, int) and b == 0 and not dtype.is_floating_point and a.meta["val"].dtype == dtype:
        return a
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return None
    if node.target is aten.add.Tensor and dtype.is_floating_point:
        if b.target is aten.neg.default:
            return ctx.become(node, aten.sub.Tensor, (a, b.args[0]))
        if a.target is aten.neg.default:
            return ctx.emit(aten.sub.Tensor, (b, a.args[0]))
    value = _constant(a)
    if node.target is aten.sub.Tensor and value is not None and fxutil.is_tensor(b) and b.meta["val"].dim():
        if _kind(b.meta["val"].dtype) == _kind(a.meta["val"].dtype) == 2:
            return ctx.become(node, aten.rsub.Scalar, (b, value, 1))
    return None


@rule(aten.rsub.Tensor)
def rsub(ctx: Context, node: Node) -> Node | None:
    a, b = node.args
    return ctx.emit(aten.sub.Tensor, (b, a)) if node.kwargs.get("alpha", 1) == 1 and isinstance(b, Node) else None


@rule(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar)
def scalar_overload(ctx: Context, node: Node) -> Node | None:
    target = getattr(aten, node.target._schema.name.split("::")[1]).Tensor
    alpha = node.args[2] if len(node.args) > 2 else 1
    return ctx.become(node, target, tuple(node.args[:2]), {} if alpha == 1 else {"alpha": alpha})


@rule(aten.clamp_min.default, aten.clamp_max.default)
def clamp(ctx: Context, node: Node) -> Node | None:
    x, bound = node.args
    args = (x, bound, None) if node.target is aten.clamp_min.default else (x, None, bound)
    return ctx.become(node, aten.clamp.default, args)


@rule(*_MIRROR)
def comparison(ctx: Context, node: Node) -> Node | None:
    """a < b -> b > a, a <= b -> b >= a."""
    a, b = node.args
    return ctx.emit(_MIRROR[node.target], (b, a)) if isinstance(b, Node) and isinstance(a, Node) else None


@rule(aten.logical_and.default, aten.logical_or.default, aten.logical_not.default)
def logical(ctx: Context, node: Node) -> Node | None:
    if any(a.meta["val"].dtype != torch.bool for a in node.args):
        return None
    name = node.target._schema.name.split("_")[-1]
    target = aten.bitwise_not.default if name == "not" else getattr(aten, f"bitwise_{name}").Tensor
    return ctx.become(node, target, node.args)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Context, node: Node) -> Node | None:
    """``masked_fill(x, mask, c)`` -> ``where(mask, c, x)``."""
    x, mask, value = node.args
    value = _constant(value) if isinstance(value, Node) else value
    like = x.meta["val"]
    if value is None or node.meta["val"].shape != like.shape:
        return None
    value = float(value) if like.dtype.is_floating_point else value
    const = ctx.emit(FULL, ([], value), {"dtype": like.dtype, "device": like.device})
    return ctx.emit(aten.where.self, (mask, const, x))


@rule(aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where_scalar(ctx: Context, node: Node) -> Node | None:
    cond, *rest = node.args
    out = node.meta["val"]
    new = [
        v if isinstance(v, Node) else ctx.emit(FULL, ([], float(v) if out.dtype.is_floating_point else v),
                                               {"dtype": out.dtype, "device": out.device})
        for v in rest
    ]  # fmt: skip
    return ctx.emit(aten.where.self, (cond, *new))


@rule(aten.sum.default, aten.mean.default)
def full_reduction(ctx: Context, node: Node) -> Node | None:
    name = aten.sum.dim_IntList if node.target is aten.sum.default else aten.mean.dim
    dims = list(range(node.args[0].meta["val"].dim()))
    return ctx.become(node, name, (node.args[0], dims, False), dict(node.kwargs)) if dims else None


@rule(aten.floor_divide.default)
def floor_divide(ctx: Context, node: Node) -> Node | None:
    if node.meta["val"].dtype.is_floating_point:
        return None
    return ctx.become(node, aten.div.Tensor_mode, tuple(node.args), {"rounding_mode": "floor"})


@rule(aten.linear.default)
def linear(ctx: Context, node: Node) -> Node | None:
    """Left whole only by tracers that keep it: -> reshape, mm with the permuted weight, reshape."""
    x, w, bias = node.args
    sizes = ctx.sizes(node)
    if bias is not None or sizes is None or w.meta["val"].dim() != 2:
        return None
    x = _rows(ctx, x)
    out = ctx.emit(aten.mm.default, (x, ctx.emit(PERMUTE, (w, [1, 0]))))
    return out if len(sizes) == 2 else ctx.emit(RESHAPE, (out, sizes))


def _rows(ctx: Context, x: Node) -> Node:
    shape = x.meta["val"].shape
    return x if len(shape) == 2 else ctx.emit(RESHAPE, (x, [-1, int(shape[-1])]))


@rule(aten.bmm.default)
def broadcast_weight(ctx: Context, node: Node) -> Node | None:
    """``bmm`` by a 2-d weight repeated over the batch -> ``reshape, mm, reshape``."""
    a, b = node.args
    w = b
    while isinstance(w, Node) and w.target in (RESHAPE, EXPAND) and w.meta["val"].dim() > 2:
        w = w.args[0]
    if w is b or not fxutil.is_tensor(w) or w.meta["val"].dim() != 2:
        return None
    k, m = b.meta["val"].shape[-2:]
    if not fxutil.same_shape(w.meta["val"].shape, (k, m)) or not _repeats(b, w):
        return None
    sizes = ctx.sizes(node) or [-1, *node.meta["val"].shape[1:]]
    if any(isinstance(s, torch.SymInt) for s in sizes):
        return None
    flat = ctx.emit(RESHAPE, (a, [-1, int(k)])) if isinstance(k, int) else None
    return None if flat is None else ctx.emit(RESHAPE, (ctx.emit(aten.mm.default, (flat, w)), sizes))


def _repeats(b: Node, w: Node) -> bool:
    """Each step between ``w`` and ``b`` keeps the last two dims, so only leading dims repeat."""
    node, want = b, tuple(w.meta["val"].shape)
    while node is not w:
        if not fxutil.same_shape(node.meta["val"].shape[-2:], want):
            return False
        node = node.args[0]
    return True
