"""A schedule drawn: what each half of the batch computes, what travels, what runs meanwhile."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dscompile.passes.timeline import Cover, Row, Schedule
from dscompile.report import GraphReport, Report

_BARE = "NOTHING RUNS MEANWHILE"


def draw(report: Report) -> Group:
    """Per graph a table: rows in the order in which they run, a column for each half's work and one for the links."""
    parts: list[Any] = (
        [] if report.graphs else [Text("dsv4: no graph was compiled (was the compiled function called?)")]
    )
    for graph in report.graphs:
        parts.append(Text(f"{graph.name} [{graph.inputs}]", style="bold"))
        if graph.schedule is None:
            parts.append(Text("no exchanges: no experts that are spread over ranks were found"))
        else:
            parts += _graph(graph, graph.schedule)
        parts.append(Text(""))
    return Group(*parts)


def as_text(drawn: Any) -> str:
    """What `draw` gives, as lines of up to 140 characters."""
    text = io.StringIO()
    Console(width=140, file=text).print(drawn)
    return text.getvalue()


@contextlib.contextmanager
def spread_over(ranks: int, micro_batches: int) -> Iterator[dict[str, Any]]:
    """Options for experts over ranks that do not exist, for as long as the block lasts."""
    from dscompile.distributed.imagined import imagined_ranks

    with imagined_ranks(ranks) as group:
        yield {"mesh": group, "micro_batches": micro_batches}


def _graph(graph: GraphReport, schedule: Schedule) -> Iterator[Any]:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("#", justify="right")
    for half in range(schedule.halves):
        table.add_column("computes" if schedule.halves == 1 else f"half {half} computes", overflow="fold")
    table.add_column("on the links", overflow="fold")
    table.add_column("beside it", overflow="fold")
    ends = {cover.wait: cover for cover in schedule.covers}
    for number, row in enumerate(schedule.rows):
        table.add_row(*_cells(number, row, ends.get(number), schedule.halves))
    yield table
    yield Text(schedule.summary())
    for note in graph.notes:
        yield Text(f"note: {note}")


def _cells(number: int, row: Row, ended: Cover | None, halves: int) -> list[str]:
    lanes, links, beside = [""] * halves, "", ""
    name = f"{row.what} {row.layer}".rstrip() + (f", half {row.half}" if halves > 1 else "")
    if row.kind == "work":
        lanes[row.half] = f"{row.layer}: {row.what}" if row.layer else row.what
        links = " ".join("|" for _ in row.pending)
    elif row.kind == "start":
        links = f"{'| ' * len(row.pending)}> {name}"
    else:
        links = f"{'| ' * (len(row.pending) - 1)}< {name}"
    if ended is not None:
        beside = f"rows {', '.join(map(str, ended.work))}" if ended.work else _BARE
    return [str(number), *lanes, links, beside]
