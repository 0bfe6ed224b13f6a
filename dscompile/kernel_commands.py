"""Commands about kernels: compile those of a model without a GPU, and look at what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dscompile.kernel_options import (
    BatchOption,
    ContextOption,
    JobsOption,
    ModelOption,
    RoleOption,
    Roles,
    TargetOption,
    TokensOption,
    Weights,
    WeightsOption,
    progress_on,
    workload,
)  # fmt: skip
from dscompile.targets import Target, get_target

if TYPE_CHECKING:
    from dscompile.tuning.bundle import Bundle, Entry

out = Console()
err = Console(stderr=True)


def build(
    model: ModelOption,
    target: TargetOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the bundle.")],
    batch: BatchOption = "8",
    context: ContextOption = "8k",
    role: RoleOption = Roles.decode,
    tokens: TokensOption = "4k",
    weights: WeightsOption = Weights.plain,
    jobs: JobsOption = None,
    every_config: Annotated[bool, typer.Option(help="All configs of every template, for tuning later.")] = False,
    cute: Annotated[bool, typer.Option(help="Also the kernels in CuTe DSL that fit; nothing starts them yet.")] = False,
) -> None:
    """Compile every Triton kernel that a model needs, without a GPU, into a bundle."""
    from dscompile import compat
    from dscompile.tuning.build import Failure, compile_jobs, first_only, plan
    from dscompile.tuning.bundle import Bundle

    if cute:
        compat.require_extra("gpu")
    from dscompile.tuning.cute_build import compile_cute, plan_cute

    wanted = workload(model, target, batch, context, role, tokens, jobs, weights)
    machine = wanted.target
    about = {**wanted.as_data(), "every_config": every_config}
    bundle = Bundle(output, machine.name, about, compat.version_text("triton") or "none")
    bundle.claim()
    with progress_on(err) as progress:
        select = (lambda call, template, space: space) if every_config else first_only
        calls = wanted.calls(progress)
        work, failures = plan(calls, machine, select)
        written, refused = plan_cute(calls, machine, every_config) if cute else ([], {})
        for failure in failures:
            bundle.fail(failure)
        compiling = progress.add_task("compiling", total=len(work))
        results = {}
        for job, result in compile_jobs(work, machine, wanted.jobs):
            progress.update(compiling, advance=1, description=f"compiling {job.template}")
            results[job] = result
        for job in work:  # not as they came, so that equal requests make equal bundles
            result = results[job]
            if isinstance(result, Failure):
                bundle.fail(result)
            else:
                bundle.add(result)
        for written_result in progress.track(compile_cute(written, machine), len(written), description="CuTe DSL"):
            if isinstance(written_result, Failure):
                bundle.fail(written_result)
            else:
                bundle.add_cute(written_result)
        bundle.save()
    for name, reason in refused.items():
        err.print(f"no CuTe kernel of {name} fits: {reason}", style="yellow", markup=False, highlight=False)
    out.print(f"{len(bundle.kernels)} kernels for {machine.name} in {output}", highlight=False)
    for failed in bundle.failures:
        err.print(f"no kernel: {failed['call']}: {failed['reason']}", style="yellow", markup=False, highlight=False)
    if not bundle.kernels:
        raise typer.Exit(1)


def inspect(
    bundle: Annotated[Path, typer.Argument(help="A folder that `dscompile build` made.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the kernels as a table for a document.")] = False,
) -> None:
    """Show what the machine code of a bundle's kernels says: registers, tensor cores, memory, floors."""
    from dscompile.tuning.bundle import Bundle

    loaded = Bundle.load(bundle)
    rows = [row for entry in loaded.kernels.values() for row in describe(loaded, entry)]
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    if markdown:
        sys.stdout.write(markdown_table(rows))
        return
    table = Table(title=f"{loaded.target}, Triton {loaded.triton}: compiled only, never run by this command")
    for name in COLUMNS:
        table.add_column(name, no_wrap=name == "kernel", justify="left" if name in _TEXT else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in COLUMNS))
    out.print(table)
    out.print(
        "floor: the call's least traffic and arithmetic at the data sheet's rates (modelled); one call, all kernels"
    )
    if any(entry.compiler == "cute" for entry in loaded.kernels.values()):
        out.print("CuTe: compiled only; `install` leaves them out, and the lowering does not choose them")
    for failed in loaded.failures:
        out.print(f"no kernel: {failed['call']}: {failed['reason']}", style="yellow", markup=False, highlight=False)


COLUMNS = ("kernel", "op", "config", "grid", "regs", "spills", "shared", "tmem", "blocks/SM", "limit", "tensor core",
           "loads", "stores", "TMA", "read MB", "write MB", "GFLOP", "floor us", "bound by", "count")  # fmt: skip
_TEXT = ("kernel", "op", "config", "limit", "tensor core", "bound by")


_IN_DOCUMENTS = ("kernel", "op", "config", "regs", "spills", "shared", "tmem", "blocks/SM", "limit", "tensor core",
                 "loads", "stores")  # fmt: skip


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """What does not depend on the launch, one line for each kernel, as Markdown."""
    lines = dict.fromkeys("| " + " | ".join(_cell(row[name]) for name in _IN_DOCUMENTS) + " |" for row in rows)
    head = ["| " + " | ".join(_IN_DOCUMENTS) + " |", "|" + "---|" * len(_IN_DOCUMENTS)]
    return "\n".join([*head, *sorted(lines)]) + "\n"


def describe(bundle: Bundle, entry: Entry) -> Iterator[dict[str, Any]]:
    """Rows of `COLUMNS`, one for each use of a kernel."""
    from dscompile.tuning.occupancy import occupancy

    target, facts = get_target(bundle.target), entry.facts
    fits = occupancy(target, entry.warps, facts.registers, entry.shared_bytes, entry.tensor_memory_columns)
    operand = "fp8" if {"UTCQMMA", "QGMMA", "QMMA"} & set(facts.tensor_core) else "bf16"
    for use in entry.uses:
        traffic = target.floor_us(use.read_bytes + use.write_bytes)
        arithmetic = target.floor_us(0, use.flops, operand)
        floor = target.floor_us(use.read_bytes + use.write_bytes, use.flops, operand)
        yield {
            "kernel": entry.name + (" (CuTe)" if entry.compiler == "cute" else ""),
            "op": use.call.split("(")[0].removeprefix("dsv4::"), "config": use.config,
            "grid": "x".join(map(str, use.grid)) or "-", "regs": facts.registers, "spills": facts.spills,
            "shared": entry.shared_bytes, "tmem": entry.tensor_memory_columns, "blocks/SM": fits.blocks,
            "limit": fits.limit, "tensor core": facts.describe_tensor_core().split(" (")[0],
            "loads": _widths(facts.loads), "stores": _widths(facts.stores), "TMA": facts.tma,
            "read MB": use.read_bytes / 1e6, "write MB": use.write_bytes / 1e6, "GFLOP": use.flops / 1e9,
            "floor us": floor, "bound by": "memory" if (traffic or 0) >= (arithmetic or 0) else "arithmetic",
            "count": use.count,
        }  # fmt: skip


def _widths(counts: dict[int, int]) -> str:
    """`16Bx4 4Bx1`: accesses by width in bytes."""
    return " ".join(f"{width}Bx{count}" for width, count in sorted(counts.items(), reverse=True)) or "-"


def _cell(value: Any) -> str:
    if value is None:
        return "?"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def tune(
    model: ModelOption,
    target: TargetOption,
    batch: BatchOption = "8",
    context: ContextOption = "8k",
    role: RoleOption = Roles.decode,
    tokens: TokensOption = "4k",
    weights: WeightsOption = Weights.plain,
    jobs: JobsOption = None,
    database: Annotated[Path | None, typer.Option(help="Default: this user's (or DSCOMPILE_TUNING).")] = None,
    again: Annotated[bool, typer.Option(help="Also what has a record already.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write all records to this file of JSON lines.")] = None,
    best: Annotated[bool, typer.Option(help="With --export: only the best config of everything.")] = False,
    load: Annotated[list[Path] | None, typer.Option(help="First add the records of such a file.")] = None,
) -> None:
    """Find the best config of every kernel: measured on this machine's GPU, else modelled from the compiled code."""
    from dscompile.tuning.database import Database, DatabaseError, user_path
    from dscompile.tuning.tune import open_jobs, tune_measured, tune_modelled

    if export is not None and not export.resolve().parent.is_dir():
        raise DatabaseError(f"cannot write {export}: there is no folder {export.resolve().parent}")
    wanted = workload(model, target, batch, context, role, tokens, jobs, weights)
    machine = wanted.target
    known = Database(database or user_path())
    for path in load or []:
        out.print(f"{known.load(path)} records from {path}", highlight=False)
    measurer = _measurer(machine)
    kind = "modelled" if measurer is None else "measured"
    done, problems = 0, []
    with progress_on(err) as progress:
        calls = wanted.calls(progress)
        driver = measurer[1] if measurer else ""
        work, failures = open_jobs(calls, machine, known, kind, driver, again)
        task = progress.add_task(kind, total=len(work))
        if measurer is None:
            outcomes = tune_modelled(work, machine, known, wanted.jobs)
        else:
            outcomes = tune_measured(work, machine, known, driver, measurer[2], measurer[0])
        for outcome in outcomes:
            progress.update(task, advance=1, description=f"{kind} {outcome.job.template}")
            done += outcome.record is not None
            if outcome.record is None:
                problems.append(f"{outcome.job.template} ({outcome.job.config}): {outcome.reason}")
    out.print(f"{done} configs {kind} for {machine.name}, {known.path or 'in memory'}", highlight=False)
    for failure in failures:
        err.print(f"no kernel: {failure.call}: {failure.reason}", style="yellow", markup=False, highlight=False)
    for problem in problems:
        err.print(problem, style="yellow", markup=False, highlight=False)
    if export is not None:
        out.print(f"{known.export(export, best)} records in {export}", highlight=False)


def _measurer(target: Target) -> tuple[Any, str, str] | None:
    """(measurer, driver, device name) if this machine has a GPU that is `target`, else None."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != target.capability:
        return None
    from dscompile.tuning.measure import Measurer, driver_version

    return Measurer(target, torch.device("cuda")), driver_version(), torch.cuda.get_device_name()
