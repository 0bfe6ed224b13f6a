"""The command line: `dscompile --help`. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dscompile import __version__, compat, kernel_commands, plan_commands
from dscompile.command_errors import errors_in_one_line, failures_of_the_model
from dscompile.targets import TARGETS, UnsupportedTargetError, detect_target

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A torch.compile backend for DeepSeek-V4 and V4.1.",
)
out = Console()
err = Console(stderr=True)


class Form(StrEnum):
    """How a report is printed."""

    text = "text"
    json = "json"
    html = "html"


@app.command()
def explain(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="`v41` or `v4` for a built-in miniature, or `path/file.py:function`, where function() returns "
            "(callable, args) or (callable, args, kwargs).",
        ),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Prompt length of a built-in miniature.")] = 40,
    target: Annotated[str | None, typer.Option(help=f"{', '.join(TARGETS)}; default: the model's device.")] = None,
    disable: Annotated[list[str] | None, typer.Option(help="A pass to skip; may be repeated.")] = None,
    strict: Annotated[bool, typer.Option(help="Fail if something was not recognised.")] = False,
    inductor: Annotated[bool, typer.Option(help="Compile with Inductor too, instead of only rewriting.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare the rewritten graph with the original.")] = False,
    schedule: Annotated[
        bool,
        typer.Option(help="Spread the experts over ranks that need not exist; draw what runs while tokens travel."),
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks, for --schedule.")] = 8,
    micro_batches: Annotated[
        int, typer.Option(min=1, max=2, help="2 runs the batch in halves, for --schedule; the model marks its batch.")
    ] = 1,
    dump_dir: Annotated[Path | None, typer.Option(help="Folder for the graph before and after every pass.")] = None,
    form: Annotated[Form, typer.Option("--format", help="What to print.")] = Form.text,
    output: Annotated[Path | None, typer.Option(help="A file to write instead of printing.")] = None,
) -> None:
    """Compile a model once and report what was recognised, what was not, and why."""
    from dscompile.explaining import explain as explain_call
    from dscompile.options import Options
    from dscompile.subjects import load_call
    from dscompile.timelines import as_text, draw, spread_over

    options: dict[str, Any] = {
        "target": target,
        "disable": tuple(disable or ()),
        "strict": strict,
        "inductor": inductor,
        "verify": verify,
        "dump_dir": dump_dir,
    }
    with errors_in_one_line():
        Options.from_user(options if schedule else {**options, "micro_batches": micro_batches})
        with err.status(f"building {subject}"):
            function, args, kwargs = load_call(subject, tokens)
        over: Any = spread_over(ranks, micro_batches) if schedule else contextlib.nullcontext({})
        with err.status(f"compiling {subject}"), failures_of_the_model(subject), over as spread:
            collected = explain_call(function, *args, options={**options, **spread}, **kwargs)
    if form is Form.text and output is None:
        out.print(draw(collected) if schedule else collected.render())
    else:
        plain = functools.partial(as_text, draw(collected)) if schedule else collected.__str__
        text = {Form.text: plain, Form.json: collected.to_json, Form.html: collected.to_html}[form]()
        _deliver(text, output)
    if not collected.graphs:
        raise typer.Exit(1)


@app.command()
def formats(
    dim: Annotated[list[int] | None, typer.Option(help="Row widths to size; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the KV row formats with their bytes."""
    from dscompile.formats import FORMATS

    dims = dim or [128, 512]
    rows: list[dict[str, Any]] = [
        {
            "format": fmt.name,
            "payload": fmt.payload,
            "group": fmt.group,
            "scale": fmt.scale,
            "page_order": fmt.page.order,
            "page_rows": fmt.page.rows,
            "row_bytes": {str(width): _row_bytes(fmt, width) for width in dims},
        }
        for fmt in FORMATS.values()
    ]
    if as_json:
        _deliver(json.dumps(rows, indent=1), None)
        return
    table = Table(title="KV row formats: bytes of a row by its number of values")
    table.add_column("format", no_wrap=True)
    for heading in ("values", "group", "scale", "page"):
        table.add_column(heading)
    for width in dims:
        table.add_column(str(width), justify="right")
    for row in rows:
        group = str(row["group"] or "-")
        page = f"{row['page_order']}" + (f" x{row['page_rows']}" if row["page_rows"] else "")
        sizes = ("-" if size is None else str(size) for size in row["row_bytes"].values())
        table.add_row(row["format"], row["payload"], group, row["scale"], page, *sizes)
    out.print(table)
    out.print("page: rows one after the other, or the values of all rows first (segregated); xN rows a page if fixed")


def _row_bytes(fmt: Any, width: int) -> int | None:
    """Bytes of one row, or None if the format does not divide a row of that width."""
    try:
        return int(fmt.row_bytes(width))
    except ValueError:
        return None


@app.command()
def targets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the hardware targets with their constants and where those come from."""
    everything = {name: target.constants() for name, target in TARGETS.items()}
    if as_json:
        plain = {name: {key: vars(c) for key, c in constants.items()} for name, constants in everything.items()}
        _deliver(json.dumps(plain, indent=1), None)
        return
    table = Table(title="Targets")
    table.add_column("constant", no_wrap=True)
    for target in TARGETS.values():
        table.add_column(f"{target.name}\n{target.product}", justify="right")
    for key in dict.fromkeys(key for constants in everything.values() for key in constants):
        table.add_row(key, *(_constant(constants.get(key)) for constants in everything.values()))
    out.print(table)
    out.print("~ unconfirmed: from memory, not read in a data sheet; ? differs between machines; - does not exist")


def _constant(constant: Any) -> str:
    if constant is None or constant.value == 0:
        return "-"
    if constant.value is None:
        return "?"
    small = constant.value < 10**6
    return (f"{constant.value:,}" if small else f"{constant.value:.3g}") + "~" * (constant.status == "unconfirmed")


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, release-dependent features and the detected target; paste this into a bug report."""
    try:
        target = detect_target().name
    except UnsupportedTargetError as error:
        target = f"none: {error}"
    distributions = (
        "torch",
        "triton",
        "transformers",
        "nvidia-cutlass-dsl",
        "sympy",
        "networkx",
        "safetensors",
        "numpy",
    )
    facts = {
        "dscompile": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "C++ compiler": shutil.which(os.environ.get("CXX", "g++")) or "none found",
        "target": target,
        **{name: compat.version_text(name) or "not installed" for name in distributions},
    }
    features = {name: compat.has(name) for name in compat.FEATURES}
    if as_json:
        _deliver(json.dumps({**facts, "features": features}, indent=1), None)
        return
    table = Table(title="Environment", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    out.print(table)
    table = Table("feature", "here", "what it is", title="What these releases offer")
    table.columns[0].no_wrap = True
    for name, there in features.items():
        table.add_row(name, "yes" if there else "no", compat.FEATURES[name].note)
    out.print(table)


@app.command()
@functools.wraps(kernel_commands.build)
def build(*args: Any, **kwargs: Any) -> None:
    with errors_in_one_line():
        kernel_commands.build(*args, **kwargs)


@app.command()
@functools.wraps(kernel_commands.inspect)
def inspect(*args: Any, **kwargs: Any) -> None:
    with errors_in_one_line():
        kernel_commands.inspect(*args, **kwargs)


@app.command()
@functools.wraps(kernel_commands.tune)
def tune(*args: Any, **kwargs: Any) -> None:
    with errors_in_one_line():
        kernel_commands.tune(*args, **kwargs)


@app.command()
@functools.wraps(plan_commands.plan)
def plan(*args: Any, **kwargs: Any) -> None:
    with errors_in_one_line():
        plan_commands.plan(*args, **kwargs)


def _deliver(text: str, output: Path | None) -> None:
    """Writes to the file, or to standard output exactly as it is (no wrapping, no colours)."""
    if output is None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    err.print(f"wrote {output}")


if __name__ == "__main__":
    app()
