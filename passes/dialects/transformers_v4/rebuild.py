"""A window mask that is made in front of layer regions is made again inside them, where it can be read.

A region gets the mask as an argument and cannot see what it means. Where every call of a region hands in a window mask
of one width, the argument becomes one number, how far the first query is ahead of the first key, and the region makes
the mask from it. What is not used after that goes away.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dscompile.passes.dialects.common.splice import splice
from dscompile.passes.dialects.transformers_v4.masks import WindowMask, window_mask
from dscompile.passes.dialects.transformers_v4.values import Values
from dscompile.passes.engine import PassContext, PassResult
from dscompile.passes.engine.fxutil import fake_mode, set_val
from dscompile.passes.regions import HOP, region_calls, region_module, region_operands


@dataclass(frozen=True)
class RebuildMasks:
    """Replaces mask arguments of regions by the number that says where the window is."""

    name: str = "window_masks"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        start = time.perf_counter()
        calls: dict[GraphModule, list[Node]] = defaultdict(list)
        for call in region_calls(gm):
            calls[region_module(gm, call)].append(call)
        values, leads = Values(gm.graph), dict[Node, Node]()
        count = 0
        for region, sites in calls.items():
            for index, placeholder in enumerate(region.graph.find_nodes(op="placeholder")):
                handed_in = [region_operands(site)[index] for site in sites]
                meanings = _meanings(values, placeholder, handed_in)
                if not meanings:
                    continue
                for site, mask, meaning in zip(sites, handed_in, meanings, strict=True):
                    _set_operand(site, index, _lead(gm, mask, meaning, leads))
                _rebuild(region, placeholder, meanings[0])
                count += 1
            region.recompile()
        gm.recompile()
        return PassResult(self.name, seconds=time.perf_counter() - start, notes=(f"{count} masks",))


def _meanings(values: Values, placeholder: Node, masks: list[Any]) -> list[WindowMask]:
    """What a region's argument is at each call; empty unless it always is a window mask of one width."""
    value = placeholder.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dim() != 4:
        return []
    found = [window_mask(values, mask) if isinstance(mask, Node) else None for mask in masks]
    known = [m for m in found if isinstance(m, WindowMask)]
    return known if len(known) == len(masks) and len({(m.window, m.low) for m in known}) == 1 else []


def _lead(gm: GraphModule, mask: Node, meaning: WindowMask, leads: dict[Node, Node]) -> Node:
    """int64 scalar: position of the first query less that of the first key; in front of the mask, once a mask."""

    def lead(queries: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        if queries is None or keys is None:
            return torch.full((), meaning.window - 1, dtype=torch.int64, device=mask.meta["val"].device)
        return queries[0, 0, 0, 0] - keys[0, 0, 0, 0]

    if mask not in leads:
        positions = {} if meaning.queries is None else {"queries": meaning.queries, "keys": meaning.keys}
        (leads[mask],) = splice(gm, mask, lead, mask, **positions)  # type: ignore[arg-type]
    return leads[mask]


def _set_operand(call: Node, index: int, value: Node) -> None:
    if call.target is HOP.invoke_subgraph:
        call.update_arg(index + 2, value)
    else:
        call.update_kwarg(f"arg{index}", value)


def _rebuild(region: GraphModule, placeholder: Node, meaning: WindowMask) -> None:
    """The placeholder becomes the number, and what used the mask uses one made from it."""
    value = placeholder.meta["val"]
    batch, _, tokens, rows = value.shape
    window, low, dtype, device = meaning.window, meaning.low, value.dtype, value.device

    def mask(lead: Tensor) -> Tensor:
        queries = (torch.arange(tokens, device=device) + lead).view(1, 1, -1, 1)
        keys = torch.arange(rows, device=device).view(1, 1, 1, -1)
        visible = ((keys > queries - window) & (queries >= keys)).expand(batch, 1, tokens, rows)
        zero, lowest = (torch.full((), v, dtype=dtype, device=device) for v in (0.0, low))
        return torch.where(visible, zero, lowest)

    users = list(placeholder.users)
    with fake_mode(region):
        set_val(placeholder, torch.empty((), dtype=torch.int64, device=device))
    first = next(n for n in region.graph.nodes if n.op != "placeholder")
    (made,) = splice(region, first, mask, users[0] if users else placeholder, lead=placeholder)
    for user in users:
        user.replace_input_with(placeholder, made)
