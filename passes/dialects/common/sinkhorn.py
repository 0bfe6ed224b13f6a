"""The Sinkhorn chain: a softmax plus eps, then alternating divisions by column and row sums plus eps, unrolled.

The traced part is the beginning, as far as the first division; how often it goes on is counted in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dscompile.passes.engine import Match, Pattern, Reject, Structural, fxutil, graphs
from dscompile.passes.engine.normalise import refresh_nodes

aten = torch.ops.aten


def _search(logits: Tensor, eps: float) -> Tensor:
    matrix = logits.softmax(-1) + eps
    return matrix / (matrix.sum(-2, keepdim=True) + eps)


def _half_step(matrix: Node, axis: int) -> tuple[Node, Any] | Reject:
    """The division of `matrix` by its sums over `axis` plus a number: (result, that number)."""
    users = list(matrix.users)
    sums = [u for u in users if u.target is aten.sum.dim_IntList and u.args[0] is matrix]
    divisions = [u for u in users if u.target is aten.div.Tensor and u.args[0] is matrix]
    if len(users) != 2 or len(sums) != 1 or len(divisions) != 1:
        return Reject("a matrix inside the chain is also used elsewhere", matrix)
    total, result = sums[0], divisions[0]
    if list(total.args[1]) != [axis] or total.args[2] is not True:  # type: ignore[arg-type]
        return Reject(f"the sum is over {total.args[1]}, a sum over axis {axis} (kept) comes next", total)
    padded = result.args[1]
    if not isinstance(padded, Node) or padded.target is not aten.add.Tensor or padded.args[0] is not total:
        return Reject("the matrix is divided by something else than its sums plus eps", result)
    if len(total.users) != 1 or len(padded.users) != 1:
        return Reject("sums of the chain are also used elsewhere", total)
    return result, padded.args[1]


def _continues(matrix: Node) -> bool:
    """Whether the chain goes on: some user sums over one of the two axes and another divides."""
    targets = {u.target for u in matrix.users if u.args and u.args[0] is matrix}
    return {aten.sum.dim_IntList, aten.div.Tensor} <= targets


def _count(first: Node, eps: float) -> tuple[Node, int] | Reject:
    """Follow rows and columns from the first division by columns: the last matrix, and the number of iterations."""
    rank = first.meta["val"].dim()
    matrix, halves = first, 1
    while _continues(matrix):
        step = _half_step(matrix, rank - 1 if halves % 2 else rank - 2)
        if isinstance(step, Reject):
            return step
        if step[1] != eps:
            return Reject(f"eps is {step[1]} in half step {halves + 1} and {eps} before", step[0])
        matrix, halves = step[0], halves + 1
    if halves % 2 == 0:
        return Reject("the chain ends on a division by row sums, it must end on columns", matrix)
    return matrix, (halves + 1) // 2


def _replace(gm: GraphModule, match: Match) -> Reject | None:
    first = match.outputs[0]
    assert first is not None
    found = _count(first, match.scalars["eps"])
    if isinstance(found, Reject):
        return found
    last, iters = found
    mode = fxutil.fake_mode(gm)
    with gm.graph.inserting_before(graphs.after([last])):
        new = fxutil.emit(
            gm.graph, torch.ops.dsv4.sinkhorn.default, (match.inputs["logits"], iters, match.scalars["eps"]),
            like=last, mode=mode,
        )  # fmt: skip
    new.meta["dsv4_pattern"] = match.pattern.name
    users = set(last.users)
    last.replace_all_uses_with(new)
    _erase_back(gm, last, first)
    refresh_nodes(gm.graph, users, mode)
    return None


def _erase_back(gm: GraphModule, last: Node, first: Node) -> None:
    """Erase the dead chain after the traced part (the engine erases that)."""
    todo = [last]
    while todo:
        node = todo.pop()
        if node is first or node.users or node._erased:
            continue
        sources = node.all_input_nodes
        gm.graph.erase_node(node)
        todo += sources


SINKHORN = Pattern(
    name="sinkhorn", family="mhc", dialect="common", search=_search, replace=Structural(_replace),
    inputs={"logits": "f32[*B n n]"}, scalars={"eps": 1.2345e-5}, key=aten._softmax.default,
)  # fmt: skip

PATTERNS = (SINKHORN,)
