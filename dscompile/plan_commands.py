"""The command that plans a job on a cluster without one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from dscompile.distributed.plan import ExpertNumbers

RANKS = (2, 4, 8, 16, 32, 64, 72)
BATCHES = "8,64,256"
PANEL = "With --roles"
out = Console()


class PlanError(ValueError):
    """Options that do not go together."""


def plan(
    cluster: Annotated[str, typer.Option(help="`gb300-nvl72`, `hgx-h200`, or a YAML file.")] = "gb300-nvl72",
    model: Annotated[str, typer.Option(help="`v41`, `v4-flash`, or a config.json or its folder.")] = "v41",
    ranks: Annotated[
        str | None,
        typer.Option(help="Numbers of ranks that share the experts; default: 2 to 72, up to the GPUs."),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Tokens of every rank in a step, separated by commas; default: 8,64,256. With --roles one number, of "
            "requests of every decode GPU; default: 256."
        ),
    ] = None,
    roles: Annotated[
        bool, typer.Option("--roles", help="Prefill and decode instances for a workload, and how many of each.")
    ] = False,
    input_tokens: Annotated[
        str | None, typer.Option("--input", help="Tokens of a request; default: 8k.", rich_help_panel=PANEL)
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option("--output", help="Tokens of a request; default: 1k.", rich_help_panel=PANEL)
    ] = None,
    hit: Annotated[
        float | None,
        typer.Option(help="Share of the input that is found in a cache; default: 0.", rich_help_panel=PANEL),
    ] = None,
    per_user: Annotated[
        float | None,
        typer.Option(help="Tokens per second of every request, in place of --batch.", rich_help_panel=PANEL),
    ] = None,
    chunk: Annotated[
        str | None,
        typer.Option(help="Tokens of every prefill GPU in a step; default: 8k.", rich_help_panel=PANEL),
    ] = None,
    elide: Annotated[
        str | None,
        typer.Option(help="What a prefill leaves out: exact, bounded (default) or none.", rich_help_panel=PANEL),
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option(help="The exchange runs beside everything else (default), or after it.", rich_help_panel=PANEL),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="Ranks of prefill instances; default: 2 to 8, up to the GPUs.", rich_help_panel=PANEL),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(help="Ranks of decode instances; default: 8 to 64, up to the GPUs.", rich_help_panel=PANEL),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what wide expert parallelism would move and take on a cluster, or what each role would do: modelled."""
    workload: dict[str, Any] = {
        "input_tokens": input_tokens, "output_tokens": output_tokens, "hit": hit, "per_user": per_user, "chunk": chunk,
        "elide": elide, "overlap": overlap, "prefill": prefill, "decode": decode,
    }  # fmt: skip
    given = {name: value for name, value in workload.items() if value is not None}
    if roles:
        from dscompile.plan_roles import plan_roles

        _only_with(roles, {} if ranks is None else {"ranks": ranks})
        plan_roles(cluster, model, batch, as_json, **given)
        return
    _only_with(roles, given)
    from dscompile.distributed.cluster import read_cluster
    from dscompile.distributed.plan import FORMULAS, exchange_plans
    from dscompile.kernel_options import sizes

    machine, numbers = read_cluster(cluster), _numbers(model)
    counts = [count for count in RANKS if count <= machine.gpus] if ranks is None else sizes(ranks)
    plans = list(exchange_plans(numbers, machine, counts, sizes(batch or BATCHES)))
    if as_json:
        rows = [{**asdict(each), "layer_us": each.layer_us} for each in plans]
        content = {"status": "modelled", "cluster": machine.name, "model": asdict(numbers), "formulas": dict(FORMULAS),
                   "plans": rows}  # fmt: skip
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return
    over = ", ".join(dict.fromkeys(p.limit for p in plans))
    table = Table(
        title=f"{model} on {machine.name} ({machine.target.product}): modelled, per GPU and layer, over the {over}",
        box=None, padding=(0, 0, 0, 1), pad_edge=False,
    )  # fmt: skip
    for name in ("ranks", "batch", "weights\nGB", "distinct\nranks", "dispatch\nKB", "combine\nKB",
                 "dispatch\nus", "experts\nus", "combine\nus", "layer\nus"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for p in plans:
        weights = f"{p.weight_bytes / 1e9:.1f}" + ("" if p.fits in (True, None) else " !")
        table.add_row(
            str(p.ranks), str(p.batch), weights, f"{p.distinct_ranks:.2f}",
            f"{p.dispatch_bytes / 1e3:.0f}", f"{p.combine_bytes / 1e3:.0f}", f"{p.dispatch_us:.1f}",
            f"{p.experts_us:.1f}", f"{p.combine_us:.1f}", f"{p.layer_us:.1f}",
        )  # fmt: skip
    print_whole(table)
    if any(p.fits is False for p in plans):
        out.print("!: more than the GPU's memory")
    for name, formula in FORMULAS.items():
        out.print(f"{name} = {formula}", style="dim", markup=False, highlight=False)
    out.print("rates: data sheets (see `dscompile targets`)", style="dim", highlight=False)


def print_whole(table: Table) -> None:
    """The table as wide as it has to be: lines that are too long for a terminal beat numbers without their ends."""
    needed = Measurement.get(out, out.options.update(max_width=10_000), table).maximum
    Console(width=max(needed, out.width)).print(table)


def _only_with(roles: bool, given: dict[str, Any]) -> None:
    """PlanError if options were given that would have no effect."""
    for name, value in given.items():
        option = "--" + name.removesuffix("_tokens").replace("_", "-")
        allowed = "--prefill and --decode" if roles else "only with --roles"
        raise PlanError(f"{option} {value}" + (" with --roles" if roles else "") + f", allowed: {allowed}")


def _numbers(model: str) -> ExpertNumbers:
    from dscompile.distributed.plan import ExpertNumbers
    from dscompile.workload_models import read_config

    config: Any = read_config(model)
    return ExpertNumbers(
        config.n_routed_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size,
        config.num_hidden_layers,
    )  # fmt: skip
