"""What was recognised, what was not, and why: one structure, printed as text, JSON or HTML.

A `GraphReport` describes one compiled graph; a `Report` holds all graphs that one model produced. Both are plain
data, filled by the backend, and know nothing about FX.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dscompile.passes.decoding import Decoding
from dscompile.passes.elision import Elision
from dscompile.passes.timeline import Schedule


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
            parts.extend(_render_graph(graph))
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
            + "".join(_html_graph(graph) for graph in self.graphs)
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


def layer_table(graph: GraphReport) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the coverage table: a row per layer, a column per family.

    A cell holds the number of matches, with "!" and the number of misses where there are any.
    """
    families = sorted({m.family for m in graph.matches} | {m.family for m in graph.misses})
    layers = sorted({m.layer for m in graph.matches} | {m.layer for m in graph.misses}, key=_layer_key)
    hits = Counter((m.layer, m.family) for m in graph.matches)
    misses = Counter((m.layer, m.family) for m in graph.misses)
    rows = []
    for layer in layers:
        row = [layer or "(outside layers)"]
        for family in families:
            hit, miss = hits[layer, family], misses[layer, family]
            row.append((str(hit) if hit else "") + (f" !{miss}" if miss else ""))
        rows.append(row)
    return ["layer", *families], rows


_KERNEL_HEADER = ["operation", "kernel", "count", "MB moved at least", "MFLOP"]


def kernel_table(graph: GraphReport) -> list[list[str]]:
    """Rows of `_KERNEL_HEADER`: what the calls of one operation by one kernel need together.

    Where sizes are symbolic there is no number, and the cell says so.
    """
    rows = []
    for (operation, kernel), count in graph.kernel_counts().items():
        calls = [low for low in graph.lowerings if (low.operation, low.kernel) == (operation, kernel)]
        moved = _millions(part for low in calls for part in (low.read_bytes, low.write_bytes))
        rows.append([operation, kernel, str(count), moved, _millions(low.flops for low in calls)])
    return rows


def _millions(parts: Iterable[str]) -> str:
    found = [part for part in parts if part]
    if not found:
        return ""
    try:
        return f"{sum(float(part) for part in found) / 1e6:.4g}"
    except ValueError:
        return "symbolic"


def _layer_key(layer: str) -> tuple[int, str]:
    digits = "".join(ch for ch in layer if ch.isdigit())
    return (int(digits) if digits else -1, layer)


def _headline(graph: GraphReport) -> str:
    total = len(graph.matches)
    if not total and not graph.misses:
        return f"{graph.name}: nothing matched, {graph.nodes_before} operations are as they were"
    return (
        f"{graph.name} [{graph.inputs}]: {total} matches, {len(graph.misses)} near misses, "
        f"{graph.nodes_before} -> {graph.nodes_after} nodes, {graph.regions} layer kinds for {graph.region_calls} "
        f"layers, "
        f"capture {graph.capture_seconds:.1f} s, rewrite {graph.rewrite_seconds:.1f} s, "
        f"compile {graph.compile_seconds:.1f} s"
    )


def _render_graph(graph: GraphReport) -> Iterator[Any]:
    yield Text(_headline(graph), style="bold")
    if graph.matches or graph.misses:
        header, rows = layer_table(graph)
        table = Table(show_edge=False, pad_edge=False)
        table.add_column(header[0], no_wrap=True)
        for family in header[1:]:  # a narrow terminal breaks a name rather than losing its end
            table.add_column(family, overflow="fold")
        for row in rows:
            table.add_row(*row)
        yield table
    patterns = Counter((m.family, m.pattern) for m in graph.matches)
    if patterns:
        table = Table("family", "pattern", "count", show_edge=False, pad_edge=False)
        for (family, pattern), count in sorted(patterns.items()):
            table.add_row(family, pattern, str(count))
        yield table
    if graph.lowerings:
        table = Table(*_KERNEL_HEADER, show_edge=False, pad_edge=False)
        for row in kernel_table(graph):
            table.add_row(*row)
        yield table
    for line in graph.exchanges:
        yield Text(f"exchange: {line}")
    if graph.schedule:
        yield Text(f"schedule: {graph.schedule.summary()}")
    for record in (graph.elision, graph.decoding):
        for line in record.lines() if record else ():
            yield Text(line)
    for line in graph.shared:
        yield Text(f"shared: {line}")
    for miss in graph.misses:
        where = f"{miss.layer or 'outside layers'}, {miss.node}" + (f", {miss.source}" if miss.source else "")
        yield Text(f"near miss: {miss.family}/{miss.pattern} at {where}: {miss.reason}", style="yellow")
    for line in graph.gaps:
        yield Text(f"missing: {line}", style="yellow")
    for note in graph.notes:
        yield Text(f"note: {note}")


def _html_table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _html_graph(graph: GraphReport) -> str:
    parts = [f"<h2>{html.escape(_headline(graph))}</h2>", _html_table(*layer_table(graph))]
    parts.append(
        _html_table(
            ["layer", "family", "pattern", "source"],
            [[m.layer, m.family, m.pattern, m.source] for m in graph.matches],
        )
    )
    if graph.lowerings:
        parts.append(_html_table(_KERNEL_HEADER, kernel_table(graph)))
        header = ["layer", "operation", "kernel", "reason", "bytes read", "bytes written", "FLOP"]
        parts.append(_html_table(header, [list(astuple(lowering)) for lowering in graph.lowerings]))
    if graph.misses:
        parts.append(
            _html_table(
                ["layer", "family", "pattern", "node", "source", "reason"],
                [[m.layer, m.family, m.pattern, m.node, m.source, m.reason] for m in graph.misses],
            )
        )
    elided = [line for record in (graph.elision, graph.decoding) if record for line in record.lines()]
    parts.extend(
        f"<p>{html.escape(line)}</p>" for line in [*elided, *graph.exchanges, *graph.shared, *graph.gaps, *graph.notes]
    )
    return "".join(parts)
