"""A tuple of passes run in order, checked after each, with a hook between them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from . import fxutil
from .graphs import subgraphs
from .passes import Pass, PassContext, PatternPass
from .records import NearMiss, PassResult

Hook = Callable[[str, GraphModule, PassResult], None]


class PassError(RuntimeError):
    """A pass left a graph that is not well formed; the message names the pass, the graph and the node."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. ``off`` names passes to leave out; unknown names are an error that lists the known ones."""

    passes: tuple[Pass, ...]
    off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = [p.name for p in self.passes]
        if len(set(names)) != len(names):
            raise ValueError(f"pass names must be unique: {names}")
        unknown = set(self.off) - set(names)
        if unknown:
            raise ValueError(f"unknown passes {sorted(unknown)}; known: {names}")

    def without(self, names: Collection[str]) -> Pipeline:
        """The same pipeline with these passes switched off."""
        return replace(self, off=self.off | frozenset(names))

    def run(self, gm: GraphModule, ctx: PassContext | None = None, hook: Hook | None = None) -> list[PassResult]:
        """Run all passes; ``hook(name, gm, result)`` is called after each. Near misses at nodes that a later pass
        rewrote are dropped from the results."""
        ctx = ctx or PassContext()
        results: list[PassResult] = []
        strides = _output_strides(gm)
        for step in self.passes:
            if step.name in self.off:
                continue
            result = step.run(gm, ctx)
            if result.matches or not isinstance(step, PatternPass):
                check(gm, step.name)
            results.append(result)
            if hook is not None:
                hook(step.name, gm, result)
        _restore_strides(gm, strides)
        return _settled(results)


def check(gm: GraphModule, name: str) -> None:
    """Lint every graph; every computed value must carry a fake value whose shape its users can rely on."""
    for sub in subgraphs(gm):
        try:
            sub.gm.graph.lint()
        except Exception as error:
            raise PassError(f"pass {name}: graph {sub.path or 'main'} is broken: {error}") from error
        for node in sub.gm.graph.nodes:
            if node.op == "call_function" and node.users and not {"val", "example_value"} & node.meta.keys():
                raise PassError(f"pass {name}: %{node.name} in graph {sub.path or 'main'} has no meta['val']")


def _settled(results: list[PassResult]) -> list[PassResult]:
    """Drop near misses at nodes that some later match took (of the same family, or as a part of something larger)."""
    out: list[PassResult] = []
    for i, result in enumerate(results):
        later = {(m.graph, n) for r in results[i:] for m in r.matches for n in m.nodes}
        keep: tuple[NearMiss, ...] = tuple(m for m in result.near_misses if (m.graph, m.node) not in later)
        out.append(replace(result, near_misses=keep))
    return out


def _output_strides(gm: GraphModule) -> list[tuple | None]:
    out = torch.utils._pytree.tree_leaves(gm.graph.output_node().args[0])
    return [v.stride() if isinstance(v := fxutil.val(n), torch.Tensor) else None for n in out]


def _restore_strides(gm: GraphModule, strides: list[tuple | None]) -> None:
    """What the graph returns keeps the strides it had: callers compiled against them."""
    mode = fxutil.fake_mode(gm)
    output = gm.graph.output_node()
    leaves, spec = torch.utils._pytree.tree_flatten(output.args[0])
    changed = False
    for i, (node, want) in enumerate(zip(leaves, strides)):
        value = fxutil.val(node)
        if want is None or not isinstance(node, Node) or not isinstance(value, torch.Tensor):
            continue
        if fxutil.same_size(value.numel(), 0):  # of a size that depends on values nobody knows
            continue
        if fxutil.same_shape(value.stride(), want) or not all(isinstance(s, int) for s in want):
            continue
        order = sorted(range(len(want)), key=lambda d: (-want[d], d))
        inverse = sorted(range(len(want)), key=lambda d: order[d])
        with gm.graph.inserting_before(output):
            a = fxutil.emit(gm.graph, torch.ops.aten.permute.default, (node, order), like=node, mode=mode)
            b = fxutil.emit(gm.graph, torch.ops.aten.clone.default, (a,), {"memory_format": torch.contiguous_format},
                            like=node, mode=mode)  # fmt: skip
            leaves[i] = fxutil.emit(gm.graph, torch.ops.aten.permute.default, (b, inverse), like=node, mode=mode)
        changed = True
    if changed:
        output.args = (torch.utils._pytree.tree_unflatten(leaves, spec),)
        gm.graph.lint()
        gm.recompile()
