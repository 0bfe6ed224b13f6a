"""Which ATen operations share a property that matching and rewriting rely on.

One table, so that "is this a view?" has one answer in the whole engine.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

aten = torch.ops.aten

RESHAPE = aten.reshape.default
PERMUTE = aten.permute.default
EXPAND = aten.expand.default
SLICE = aten.slice.Tensor
SELECT = aten.select.int
CLONE = aten.clone.default
CAST = aten._to_copy.default
FULL = aten.full.default

#: Value-preserving copies: the value read through them is the value that went in.
COPIES: frozenset[Any] = frozenset({
    CLONE, aten.alias.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default,
})  # fmt: skip

#: Operations that only rearrange elements (canonical spellings first).
LAYOUT: frozenset[Any] = COPIES | {
    RESHAPE, PERMUTE, EXPAND,
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.t.default, aten.transpose.int,
}  # fmt: skip

#: Operations that may return an alias of their first argument.
VIEWS: frozenset[Any] = (LAYOUT - {CLONE, aten.lift_fresh_copy.default}) | {
    SLICE, SELECT, aten.view.dtype, aten.as_strided.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unbind.int, aten.diagonal.default, aten.unfold.default, aten.narrow.default, aten.lift_fresh.default,
    aten.view_as_complex.default, aten.view_as_real.default, operator.getitem,
}  # fmt: skip

#: Dropping one of these in the target when its effect there is nothing is legal while matching.
SKIPPABLE: frozenset[Any] = frozenset({RESHAPE, PERMUTE, EXPAND, SLICE})

#: Both orders of the first two operands mean the same.
COMMUTATIVE: frozenset[Any] = frozenset({
    aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default, aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.logical_and.default, aten.logical_or.default,
    aten.eq.Tensor, aten.ne.Tensor,
})  # fmt: skip

#: Results that depend on the strides of their inputs, so a copy before them may not be dropped.
STRIDE_SENSITIVE: frozenset[Any] = frozenset({
    aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype, aten.view_as_complex.default,
    aten._grouped_mm.default, aten._scaled_mm.default, aten.empty_like.default, aten.unfold.default,
})  # fmt: skip

#: ``op(x, dims, keepdim)``.
REDUCTIONS: frozenset[Any] = frozenset({
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default,
})  # fmt: skip

#: Cheap to compute twice: a matched node of this kind may keep users outside the match.
CHEAP: frozenset[Any] = LAYOUT | {
    SLICE, SELECT, CAST, FULL, operator.getitem, aten.neg.default, aten.arange.start_step,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
}  # fmt: skip

#: Too common to say anything about what a graph computes: never the key of a pattern by default.
COMMON: frozenset[Any] = CHEAP | {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar, aten.sum.dim_IntList,
    aten.mean.dim, aten.cat.default, aten.where.self, aten.mm.default, aten.index.Tensor,
}  # fmt: skip


def is_op(target: Any) -> bool:
    """True for an operator overload with a schema."""
    return isinstance(target, torch._ops.OpOverload)


@functools.cache
def mutated_args(target: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator writes to (empty for functional operators)."""
    if not is_op(target) or not target._schema.is_mutable:
        return ()
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def is_pure(target: Any) -> bool:
    """True if equal arguments always give an equal result and nothing else happens."""
    if target is operator.getitem:
        return True
    if not is_op(target) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target.namespace not in ("aten", "prims", "dsv4"):
        return False
    return not target._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::_assert"))


def op_name(target: Any) -> str:
    """Readable name, such as ``aten.mul`` or ``getitem``."""
    if is_op(target):
        overload = target._overloadname
        name = target._schema.name.replace("::", ".")
        return name if overload in ("default", "Tensor", "int", "dim", "dim_IntList", "self") else f"{name}.{overload}"
    return getattr(target, "__name__", str(target))
