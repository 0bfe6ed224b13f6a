"""Small parameters that are narrower than the arithmetic they go into, cast once where they come in.

`model.to(torch.bfloat16)` also narrows what `from_pretrained` keeps in float32: the scale and the bias of a
hyper-connection. The model cuts them first, and promotion widens the pieces where they meet float32 numbers. To cut
what was cast is the same, bit for bit, and is what the model is in float32.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dscompile.passes.engine import PassContext, PassResult, fxutil
from dscompile.passes.engine.graphs import after, find, strip_views, subgraphs
from dscompile.passes.engine.mutation import written_roots
from dscompile.passes.engine.optable import CAST, EXPAND, RESHAPE, SELECT, SLICE

aten = torch.ops.aten
_CUTS = frozenset({SLICE, SELECT, RESHAPE, EXPAND})
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WidenParameters:
    """Moves the cast to float32 of pieces of a parameter with one axis in front of the cutting."""

    name: str = "parameters"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        count = 0
        for sub in subgraphs(gm):
            found = _Widening(sub.gm).run()
            if found:
                sub.gm.graph.eliminate_dead_code()
                sub.gm.recompile()
            count += found
        return PassResult(self.name, notes=(f"{count} pieces",), seconds=time.perf_counter() - start)


class _Widening:
    """One graph; each parameter is cast once."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.mode = gm, fxutil.fake_mode(gm)
        self.wide: dict[Node, Node] = {}
        written = (root for node in gm.graph.nodes for root in written_roots(node))
        self.written = frozenset(written)

    def run(self) -> int:
        """How many pieces were cast behind the cutting."""
        count = 0
        for cast in find(self.gm.graph, CAST):
            piece = cast.args[0]
            if cast.meta["val"].dtype == torch.float32 and self._is_piece(piece):
                cast.replace_all_uses_with(self._again(piece))
                count += 1
        for target in (aten.mul.Tensor, aten.add.Tensor):
            for node in find(self.gm.graph, target):
                count += self._widen_number(node)
        return count

    def _widen_number(self, node: Node) -> bool:
        """A factor without axes takes the other's dtype by itself: there is no cast to move."""
        a, b = node.args[:2]
        if not (fxutil.is_tensor(a) and fxutil.is_tensor(b)) or node.meta["val"].dtype != torch.float32:
            return False
        for number, other in ((a, b), (b, a)):
            wide = other.meta["val"].dtype == torch.float32 and other.meta["val"].dim() > 0
            if wide and number.meta["val"].dim() == 0 and self._is_piece(number):
                node.replace_input_with(number, self._again(number))
                return True
        return False

    def _is_piece(self, node: Any) -> bool:
        """Cut from an input of the graph that has one axis, is narrow and is never written."""
        if not isinstance(node, Node) or node.target not in _CUTS:
            return False
        source = strip_views(node, _CUTS)
        value = source.meta.get("val")
        narrow = isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in _NARROW
        return narrow and source.op in ("placeholder", "get_attr") and source not in self.written

    def _again(self, node: Node) -> Node:
        """The same cut of the parameter in float32."""
        if node.target in _CUTS:
            source = self._again(node.args[0])
            with self.gm.graph.inserting_before(node):
                return fxutil.emit(self.gm.graph, node.target, (source, *node.args[1:]), dict(node.kwargs), like=node,
                                   mode=self.mode)  # fmt: skip
        if node not in self.wide:
            with self.gm.graph.inserting_before(after([node])):
                self.wide[node] = fxutil.emit(self.gm.graph, CAST, (node,), {"dtype": torch.float32},
                                              like=next(iter(node.users)), mode=self.mode)  # fmt: skip
        return self.wide[node]
