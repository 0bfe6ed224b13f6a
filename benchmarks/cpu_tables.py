"""What the CPU benchmark prints, and the machine it ran on."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Date, machine, versions and settings: what a number needs beside it."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "dscompile", "numpy")}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
            "load_at_start": os.getloadavg(),
        },
        "versions": {"python": platform.python_version(), **versions, "commit": _commit()},
        "settings": dict(vars(options)),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def print_all(console: Console, results: dict[str, Any], tables: list[Callable[[dict[str, Any]], Table]]) -> None:
    for make in tables:
        console.print(make(results))
        console.print()
    there, versions = results["machine"], results["versions"]
    console.print(
        f"{there['processor']}, {results['settings']['threads']} threads; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, commit {versions['commit']}; {results['date']}",
        style="dim",
    )
    load = max([there["load_at_start"][0], *(case["load"] for case in results["cases"] or results["compile_cost"])])
    if load > 1.25 * there["cores"]:
        console.print(f"The machine was busy (load {load:.1f} on {there['cores']} cores): these times mean little.",
                      style="yellow")  # fmt: skip


def _table(title: str, *columns: str, left: int) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place >= left else "left", no_wrap=place == 0)
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"


def _case(case: dict[str, Any]) -> str:
    return f"{case['model']} {case['name'].removesuffix(', batch 1')}"


def _short(error: str) -> str:
    """A cell's worth of an error; the whole message stands below the tables."""
    if error.startswith("did not finish in "):
        return "> " + error.removeprefix("did not finish in ")
    return "not tried" if error.startswith("not tried") else "failed"


def case_table(results: dict[str, Any]) -> Table:
    """Ratios first: how much faster dsv4 is; then the medians."""
    modes = results["settings"]["modes"]
    others = [other for other in ("stock", "eager") if other in modes and "dsv4" in modes]
    table = _table("Median times: a whole prompt, or one decoded token of every sequence", "case",
                   *(f"dsv4 vs {other}" for other in others), *modes, left=1)  # fmt: skip
    for case in results["cases"]:
        records = [case["modes"][mode] for mode in modes]
        ratios = [_ratio(case["ratios"].get(f"dsv4 vs {other}")) for other in others]
        times = [_short(r["error"]) if "error" in r else _seconds(r.get("median_seconds")) for r in records]
        table.add_row(_case(case), *ratios, *times)
    return table


def memory_table(results: dict[str, Any]) -> Table:
    """Peak memory of each process while it ran the case, and how far outputs agree with the first mode's."""
    modes = results["settings"]["modes"]
    table = _table("Peak memory in GB (weights and torch included); logits beside the first mode's", "case", *modes,
                   *(f"{mode} {what}" for mode in modes[1:] for what in ("cosine", "same token")), left=1)  # fmt: skip
    for case in results["cases"]:
        records = [case["modes"][mode] for mode in modes]
        cells = [f"{r['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in r else "-" for r in records]
        for r in records[1:]:
            cells += [f"{r['cosine_mean']:.4f}", f"{r['same_token']:.0%}"] if "cosine_mean" in r else ["-", "-"]
        table.add_row(_case(case), *cells)
    return table


def compile_table(results: dict[str, Any]) -> Table:
    """Seconds of compiling from nothing, and the backend's part of it (the rest is Dynamo's)."""
    modes = [mode for mode in results["settings"]["modes"] if mode != "eager"]
    columns = [column for mode in modes for column in (mode, "backend")]
    table = _table("Seconds of compiling, and the backend's part", "case", *columns, "matches", "near misses", left=1)
    for case in results["cases"]:
        cells = []
        for mode in modes:
            record = case["modes"][mode]
            if "first_call_seconds" not in record:
                cells += [_short(record["error"]) if "error" in record else "-", "-"]
                continue
            run = record.get("median_seconds", 0.0)
            steps = results["settings"]["steps"] if case["phase"] == "decode" else 1
            cells += [f"{record['first_call_seconds'] - run * steps:.1f}", f"{record['backend_seconds']:.1f}"]
        reports = case["modes"].get("dsv4", {}).get("reports", [])
        matches = sum(sum(report["matches"].values()) for report in reports)
        misses = sum(report["near_misses"] for report in reports)
        table.add_row(_case(case), *cells, str(matches), str(misses))
    return table


def compile_cost_table(results: dict[str, Any]) -> Table:
    """The cost of depth: what comes after Dynamo should hardly grow from 8 layers to 40."""
    table = _table("V4.1's miniature, compiling from nothing, seconds", "mode", "layers", "case", "after Dynamo",
                   "capture", "rewrite", "Inductor", "Dynamo, first run", "kinds", "of layers",
                   left=3)  # fmt: skip
    for row in results["compile_cost"]:
        case = row["name"].removesuffix(", batch 1")
        if "error" in row:
            table.add_row(row["mode"], str(row["layers"]), case, _short(row["error"]))
            continue
        parts = [sum(report[f"{part}_seconds"] for report in row["reports"])
                 for part in ("capture", "rewrite", "compile")]  # fmt: skip
        kinds = [str(sum(report[name] for report in row["reports"])) for name in ("regions", "region_calls")]
        shown = [f"{part:.1f}" for part in parts] if row["reports"] else ["-"] * 3
        rest = row["first_call_seconds"] - row["backend_seconds"]
        numbers = [f"{row['backend_seconds']:.1f}", *shown, f"{rest:.1f}", *(kinds if row["reports"] else ["-", "-"])]
        table.add_row(row["mode"], str(row["layers"]), case, *numbers)
    return table
