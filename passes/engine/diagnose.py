"""Why did it not match: near misses for the report, and a printed comparison for whoever writes a pattern."""

from __future__ import annotations

from torch.fx import Node

from . import fxutil
from .graphs import Subgraph
from .pattern import Pattern
from .records import Match, NearMiss, Reject


def refusal(match: Match, why: Reject, sub: Subgraph) -> NearMiss:
    """The near miss of a complete match that a guard or a check refused."""
    node = why.node if why.node is not None and not why.node._erased else match.anchor
    return _miss(match.pattern, sub, node, match.anchor, why.reason, 1.0)


def _miss(pattern: Pattern, sub: Subgraph, node: Node, origin: Node, reason: str, share: float) -> NearMiss:
    return NearMiss(
        pattern.family, pattern.name, fxutil.layer_name(origin) or fxutil.layer_name(node), origin.name,
        fxutil.source_line(node) or fxutil.source_line(origin), reason, sub.path, round(share, 2),
    )  # fmt: skip
def near_misses(patterns, sub, refused):
    return list(refused.values())
