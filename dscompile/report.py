"""What was recognised, what was not, and why: one structure, printed as text, JSON or HTML.

A `GraphReport` describes one compiled graph; a `Report` holds all graphs that one model produced. Both are plain
data, filled by the backend, and know nothing about FX.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from dscompile.passes.decoding import Decoding
from dscompile.passes.elision import Elision
from dscompile.passes.timeline import Schedule
from dscompile.report_tables import html_graph, render_graph


@dataclass(frozen=True)
class Match:
    """One recognised piece of mathematics.

    layer: module path of the layer, or "" outside layers; family: what it is (for example "attention"); pattern: which
    pattern recognised it; source: the user's source line.
    """

    layer: str
    family: str
    pattern: str
    source: str = ""


@dataclass(frozen=True)
class Miss:
    """A piece that resembles a pattern and was left untouched, with the constraint that failed."""

    layer: str
    family: str
    pattern: str
    node: str
    source: str
    reason: str


@dataclass(frozen=True)
class Lowering:
    """What runs one operation of one layer.

    operation: `dsv4::experts`; kernel: the template that runs it, or which form of its reference; reason: why that one.
    read_bytes, write_bytes, flops: the least that one call can move and compute (the operation's cost, see
    `dscompile.ops`): a number, a formula in the graph's symbolic sizes, or "" where there is none.
    """

    layer: str
    operation: str
    kernel: str
    reason: str
    read_bytes: str = ""
    write_bytes: str = ""
    flops: str = ""


@dataclass(frozen=True)
class PassTiming:
    name: str
    matches: int
    near_misses: int
    seconds: float


@dataclass
class GraphReport:
    """One graph as the backend compiled it. Times are seconds of this process's wall clock.

    gaps: layers that must hold a part which was not recognised in them, one line each. exchanges: layers whose experts
    are spread over ranks, and how their tokens travel. elision: what of a prompt was left out, if that was asked for.
    decoding: how steps run and whether they can be captured, in the role "decode". schedule: what runs while tokens
    travel, of a graph with exchanges.
    """

    name: str
    inputs: str = ""
    nodes_before: int = 0
    nodes_after: int = 0
    regions: int = 0
    region_calls: int = 0
    matches: list[Match] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    passes: list[PassTiming] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    exchanges: list[str] = field(default_factory=list)
    lowerings: list[Lowering] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    elision: Elision | None = None
    decoding: Decoding | None = None
    schedule: Schedule | None = None
    capture_seconds: float = 0.0
    rewrite_seconds: float = 0.0
    compile_seconds: float = 0.0

    def counts(self) -> dict[str, int]:
        """Matches per family, counted once for every layer that runs them."""
        return dict(sorted(Counter(match.family for match in self.matches).items()))

    def kernel_counts(self) -> dict[tuple[str, str], int]:
        """Calls per (operation, kernel), over all layers."""
        return dict(sorted(Counter((low.operation, low.kernel) for low in self.lowerings).items()))

    def pattern_counts(self) -> dict[str, int]:
        """Matches per pattern name."""
        return dict(sorted(Counter(match.pattern for match in self.matches).items()))


@dataclass
class Report:
    """All graphs compiled while the report was collected, in order."""

    graphs: list[GraphReport] = field(default_factory=list)

    def counts(self, graph: int = -1) -> dict[str, int]:
        """Matches per family of one graph (the last by default); empty when nothing was compiled."""
        return self.graphs[graph].counts() if self.graphs else {}

    @property
    def misses(self) -> list[Miss]:
        return [miss for graph in self.graphs for miss in graph.misses]

    def to_dict(self) -> dict[str, Any]:
        graphs = []
        for graph in self.graphs:
            entry = asdict(graph)
            entry["counts"] = graph.counts()
            graphs.append(entry)
        return {"graphs": graphs}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def render(self) -> Group:
        """The report as a rich renderable: per graph one table of layers by family, then the misses."""
        parts: list[Any] = []
        if not self.graphs:
            parts.append(Text("dsv4: no graph was compiled (was the compiled function called?)"))
        for graph in self.graphs:
            parts.extend(render_graph(graph))
        return Group(*parts)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(width=140, file=text).print(self.render())
        return text.getvalue()

    def to_html(self) -> str:
        """A self-contained page with the same tables."""
        return (
            "<!doctype html><meta charset='utf-8'><title>dscompile report</title>"
            "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}"
            "td,th{border:1px solid #bbb;padding:3px 8px;text-align:left;vertical-align:top}</style>"
            + "".join(html_graph(graph) for graph in self.graphs)
        )

    def write(self, path: str | Path) -> None:
        """Writes the report; the ending chooses the form: .json, .html, anything else plain text."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = {".json": self.to_json, ".html": self.to_html}.get(path.suffix, lambda: str(self))()
        path.write_text(text, encoding="utf-8")


_active: ContextVar[tuple[Report, ...]] = ContextVar("dscompile_reports", default=())
_last = Report()


@contextlib.contextmanager
def collect() -> Iterator[Report]:
    """Collects the reports of every graph that the backend compiles inside the block."""
    report = Report()
    token = _active.set((*_active.get(), report))
    try:
        yield report
    finally:
        _active.reset(token)


def publish(graph: GraphReport) -> None:
    """Called by the backend once per compiled graph."""
    for report in _active.get():
        report.graphs.append(graph)
    _last.graphs.append(graph)
    del _last.graphs[:-64]


def last_report() -> Report:
    """The most recent graphs of this process (at most 64), whoever compiled them."""
    return Report(list(_last.graphs))
