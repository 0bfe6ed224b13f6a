"""A report as tables: for a terminal and for a page. `dscompile.report` says what is in it."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dscompile.report import GraphReport


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


def headline(graph: GraphReport) -> str:
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


def render_graph(graph: GraphReport) -> Iterator[Any]:
    yield Text(headline(graph), style="bold")
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


def html_graph(graph: GraphReport) -> str:
    parts = [f"<h2>{html.escape(headline(graph))}</h2>", _html_table(*layer_table(graph))]
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
