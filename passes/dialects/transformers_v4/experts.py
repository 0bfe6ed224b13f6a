"""The routed experts in transformers' two static forms: tokens sorted by expert, or weights gathered per token.

And as people write them without transformers: weights gathered per token and `einsum`, or every expert for every token
and a weighted sum in which most weights are 0.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from dscompile.passes.dialects.common.splice import splice
from dscompile.passes.dialects.transformers_v4.masks import constant, uncast
from dscompile.passes.engine import Match, Pattern, Reject, Structural
from dscompile.passes.engine.fxutil import bound_args, describe, fake_mode, same_shape
from dscompile.passes.engine.normalise import refresh_nodes

aten, dsv4 = torch.ops.aten, torch.ops.dsv4
GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


def _gated(both: Tensor, limit: float) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _sorted(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, grouped_mm: GroupedMM
) -> Tensor:
    k, experts = indices.shape[1], w13.shape[0]
    ids, order = torch.sort(indices.reshape(-1))
    counts = torch.histc(ids.float(), bins=experts, min=0, max=experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    both = grouped_mm(x[order // k], w13.transpose(1, 2), ends)
    out = grouped_mm(_gated(both, limit), w2.transpose(1, 2), ends) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return out[back].view(x.shape[0], k, x.shape[1]).sum(1).to(x.dtype)


def _fallback(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return _sorted(x, indices, weights, w13, w2, limit, torch.ops.transformers.grouped_mm_fallback)


def _grouped(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return _sorted(x, indices, weights, w13, w2, limit, torch.ops.aten._grouped_mm)


def _batched(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    k = indices.shape[1]
    ids = indices.reshape(-1)
    both = torch.bmm(w13[ids], x.repeat_interleave(k, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[ids], _gated(both, limit).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
    return out.view(x.shape[0], k, x.shape[1]).sum(1).to(x.dtype)


def _replace(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    return torch.ops.dsv4.experts(x, indices, weights, w13, w2, limit, False, x.dtype)


def _by_einsum(
    x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, x_first: bool, summed: bool
) -> Tensor:
    if x_first:
        hidden = _gated(torch.einsum("nd,nkod->nko", x, w13[indices]), limit)
        out = torch.einsum("nki,nkdi->nkd", hidden, w2[indices])
    else:
        hidden = _gated(torch.einsum("nkod,nd->nko", w13[indices], x), limit)
        out = torch.einsum("nkdi,nki->nkd", w2[indices], hidden)
    return torch.einsum("nkd,nk->nd", out, weights) if summed else (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _all_experts(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, summed: bool) -> Tensor:
    """weights [N, E], 0 for those that were not chosen."""
    hidden = _gated(torch.einsum("nd,eod->neo", x, w13), limit)
    out = torch.einsum("nei,edi->ned", hidden, w2)
    return torch.einsum("ned,ne->nd", out, weights) if summed else (out * weights.unsqueeze(-1)).sum(1)


def _choose(gm: GraphModule, match: Match) -> Reject | None:
    """Only the chosen experts run, if the weights of the others are proven to be 0."""
    weights = match.inputs["weights"]
    chosen = _scattered(weights)
    if isinstance(chosen, Reject):
        return chosen
    indices, given = chosen
    limit = float(match.scalars["limit"])
    out = match.anchor

    def experts(x: Tensor, indices: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return torch.ops.dsv4.experts(x, indices, weights, w13, w2, limit, False, x.dtype)

    inputs = {name: match.inputs[name] for name in ("x", "w13", "w2")}
    (new,) = splice(gm, out, experts, out, **inputs, indices=indices, weights=given)
    new.meta["dsv4_pattern"] = match.pattern.name
    users = set(out.users)
    out.replace_all_uses_with(new)
    refresh_nodes(gm.graph, users, fake_mode(gm))
    return None


def _scattered(weights: Node) -> tuple[Node, Node] | Reject:
    """(indices, weights) [N, k] of weights [N, E] that are 0 elsewhere; no index occurs twice for a token."""
    dense = uncast(weights)
    if dense.target is not aten.scatter.src:
        return Reject(
            f"every expert runs for every token, with weights from {describe(dense)}: expected the weights of the "
            "chosen ones, scattered into zeros", dense,
        )  # fmt: skip
    given = bound_args(dense)
    indices, values = given["index"], given["src"]
    if given["dim"] != 1 or constant(given["self"]) != 0.0:
        return Reject("the weights of the chosen experts are not scattered into zeros along the experts", dense)
    if not same_shape(indices.meta["val"].shape, values.meta["val"].shape):
        return Reject("not all of the weights are scattered", dense)
    source = indices.args[0] if indices.target is operator.getitem and indices.args[1] == 1 else None
    routed = isinstance(source, Node) and source.target is dsv4.router.default and source.args[3] is None
    if not routed and not (isinstance(source, Node) and source.target is aten.topk.default):
        return Reject("the chosen experts are not proven to be distinct (they come from no top-k)", indices)
    if values.meta["val"].dtype != weights.meta["val"].dtype:
        return Reject(f"weights are {values.meta['val'].dtype} in the choice and another dtype in the sum", weights)
    return indices, values


_INPUTS = {
    "x": "act[N D]", "indices": "i64[N k]", "weights": "w[N k]", "w13": "act[E 2*I D]", "w2": "act[E D I]",
}  # fmt: skip
_SCALARS = {"limit": 12.3456}
#: Under autocast the router's weights may be narrower than the tokens.
_WEIGHTS = {"w": ("act", torch.float32, torch.bfloat16, torch.float16)}

FALLBACK = Pattern(
    name="experts.grouped_fallback", family="experts", dialect="transformers_v4", search=_fallback, replace=_replace,
    inputs=_INPUTS, scalars=_SCALARS, dtypes=_WEIGHTS, key=torch.ops.aten.histc.default,
    needs=("transformers::grouped_mm_fallback",),
)  # fmt: skip
GROUPED = Pattern(
    name="experts.grouped", family="experts", dialect="transformers_v4", search=_grouped, replace=_replace,
    inputs=_INPUTS, scalars=_SCALARS, dtypes={"act": (torch.bfloat16,)}, key=torch.ops.aten.histc.default,
    sizes={"D": 8 * 101, "I": 8 * 127},  # the kernel wants rows of a multiple of 16 bytes
)  # fmt: skip
BATCHED = Pattern(
    name="experts.batched", family="experts", dialect="transformers_v4", search=_batched, replace=_replace,
    inputs=_INPUTS, scalars=_SCALARS, dtypes=_WEIGHTS, key=torch.ops.aten.silu.default,
)  # fmt: skip


def _einsum(x_first: bool, summed: bool) -> Pattern:
    return Pattern(
        name="experts.einsum." + ("x_first" if x_first else "weights_first") + (".einsum" if summed else ".sum"),
        family="experts", dialect="transformers_v4", search=partial(_by_einsum, x_first=x_first, summed=summed),
        replace=_replace, inputs={**_INPUTS, "weights": "act[N k]"} if summed else _INPUTS, scalars=_SCALARS,
        key=torch.ops.aten.silu.default,
    )  # fmt: skip


def _dense(summed: bool) -> Pattern:
    return Pattern(
        name="experts.all." + ("einsum" if summed else "sum"), family="experts", dialect="transformers_v4",
        search=partial(_all_experts, summed=summed), replace=Structural(_choose),
        inputs={"x": "act[N D]", "weights": "act[N E]", "w13": "act[E 2*I D]", "w2": "act[E D I]"}, scalars=_SCALARS,
        key=torch.ops.aten.silu.default,
    )  # fmt: skip


PATTERNS = (
    FALLBACK, GROUPED, BATCHED, *(_einsum(*form) for form in itertools.product((True, False), (False, True))),
    _dense(False), _dense(True),
)  # fmt: skip
