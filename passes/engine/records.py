"""What the engine says about a graph: matches, rejections, near misses, results of a pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch.fx import Node

if TYPE_CHECKING:
    from .pattern import Pattern


@dataclass(frozen=True)
class Reject:
    """Why a match may not be rewritten; ``node`` is the graph node that shows it, if one does."""

    reason: str
    node: Node | None = None

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("Reject needs a reason in words")


@dataclass(frozen=True)
class Match:
    """One place in a graph that computes what a pattern describes.

    ``inputs`` maps the pattern's input names to graph nodes, ``scalars`` the captured constants, ``dims`` the named
    sizes (int or SymInt); ``outputs`` holds one node per pattern output, None where the graph does not compute it.
    ``nodes`` are the matched nodes in graph order, without the inputs.
    """

    pattern: Pattern
    nodes: tuple[Node, ...]
    inputs: dict[str, Node]
    scalars: dict[str, Any]
    dims: dict[str, Any]
    outputs: tuple[Node | None, ...]
    dtypes: dict[str, Any] = field(default_factory=dict)

    def val(self, name: str) -> Any:
        """Fake tensor of the input ``name``."""
        return self.inputs[name].meta["val"]

    @property
    def anchor(self) -> Node:
        """The first output that exists; reports and metadata refer to it."""
        return next(n for n in self.outputs if n is not None)


@dataclass(frozen=True)
class MatchRecord:
    """One rewritten place, in plain values."""

    family: str
    pattern: str
    layer: str
    source: str
    count: int = 1
    graph: str = ""
    nodes: tuple[str, ...] = ()
    op: str = ""


@dataclass(frozen=True)
class NearMiss:
    """A place that holds most of a pattern (``share`` of its operations), and the constraint that failed."""

    family: str
    pattern: str
    layer: str
    node: str
    source: str
    reason: str
    graph: str = ""
    share: float = 0.0


@dataclass(frozen=True)
class PassResult:
    """What one pass did to one graph module (its subgraphs included)."""

    name: str
    matches: tuple[MatchRecord, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of rewritten places per family."""
        out: dict[str, int] = {}
        for m in self.matches:
            out[m.family] = out.get(m.family, 0) + m.count
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists, ready for ``json.dumps``."""
        return asdict(self)
