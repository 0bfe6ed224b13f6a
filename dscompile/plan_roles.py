"""What `dscompile plan --roles` prints: instances of each role, their balance on a cluster, published figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from dscompile.distributed import costs, rack
from dscompile.distributed.cluster import Cluster, read_cluster
from dscompile.distributed.costs import RoleError
from dscompile.distributed.rack import Balance, Implied
from dscompile.distributed.roles import Instance, instances
from dscompile.distributed.steps import Workload, replayed, tail
from dscompile.kernel_options import sizes
from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.plan_commands import print_whole
from dscompile.workload_models import read_config

PREFILL_RANKS = (2, 4, 8)
DECODE_RANKS = (8, 16, 32, 64)
ASSUMPTIONS = (
    "all at data-sheet rates: a floor of the time, no launch, no latency of an exchange, no imbalance of experts",
    "one token a step for every request: no drafts; Engram's tables in the host's memory; 0.9 of HBM in use",
    "window rows are not kept with what a cache finds: tokens in front of the new ones run again (replayed)",
    "a tail runs once for a request, with its last chunk",
    "published prefill figures are new input tokens per second of a GPU; their lengths are unknown",
    "whether 954K per rack counts input tokens is unknown: both readings are shown",
)
out = Console()


def plan_roles(
    cluster: str, model: str, batch: str | None, as_json: bool, *, input_tokens: str = "8k", output_tokens: str = "1k",
    hit: float = 0.0, per_user: float | None = None, chunk: str = "8k", elide: str = "bounded", overlap: bool = True,
    prefill: str | None = None, decode: str | None = None,
) -> None:  # fmt: skip
    """Print it all, as tables or JSON; the arguments are those of the command.

    Raises:
        RoleError: a model that is no V4.1, a workload or target that cannot be planned.
        ClusterError, SizeError, ModelError: what the options say does not exist or fit.
    """
    machine, config = read_cluster(cluster), read_config(model)
    if not isinstance(config, DeepseekV41Config):
        raise RoleError(f"model {model!r} with --roles, allowed: a DeepSeek-V4.1 (v41, or its config.json)")
    requests = None if per_user is not None and batch is None else _one("batch", batch or "256")
    work = Workload(
        _one("input", input_tokens), _one("output", output_tokens), hit, requests, per_user, _one("chunk", chunk),
        elide, overlap,
    )  # fmt: skip
    narrow, wide = (
        [ranks for ranks in default if ranks <= machine.gpus] if given is None else sizes(given)
        for given, default in ((prefill, PREFILL_RANKS), (decode, DECODE_RANKS))
    )
    found = list(instances(config, machine, work, narrow, wide))
    pairs = rack.balances(config, machine, work, found)
    figures = list(rack.implied(machine, work, found, pairs)) if config == DeepseekV41Config.released() else []
    if as_json:
        sys.stdout.write(json.dumps(_data(config, machine, work, found, pairs, figures), indent=1) + "\n")
        return
    again, kept = replayed(config, work), tail(config, work.elide)
    out.print(
        f"input {work.input} ({work.new} new, {again} replayed), output {work.output}; layers behind the last KV "
        f"source prefill {kept or 'all'} tokens", highlight=False,
    )  # fmt: skip
    print_whole(_instances(machine, found))
    for each in found:
        if each.problem:
            out.print(f"! {each.role} DEP{each.ranks}: {each.problem}", markup=False, highlight=False)
    if pairs:
        print_whole(_balances(machine, pairs))
    else:
        out.print(f"no pair of instances fits on {machine.name} ({machine.gpus} GPUs): try --prefill, --decode")
    if figures:
        print_whole(_figures(figures))
    for text in ASSUMPTIONS:
        out.print(f"assumed: {text}", style="dim", markup=False, highlight=False)
    for name, formula in {**costs.FORMULAS, **rack.FORMULAS}.items():
        out.print(f"{name} = {formula}", style="dim", markup=False, highlight=False)


def _one(name: str, text: str) -> int:
    """The one size that `text` is."""
    found = sizes(text)
    if len(found) != 1:
        raise RoleError(f"{name}: {text!r} with --roles, allowed: one size")
    return found[0]


def _table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.{1 if share > 0.01 else 2}f}%"


def _instances(machine: Cluster, found: Sequence[Instance]) -> Table:
    table = _table(
        f"Instances on {machine.name} ({machine.target.product}): modelled, per GPU",
        ("", "ranks", "batch", "GF a\ntoken", "waits, ms:\narithmetic", "\nHBM", "\nexchange", "step\nms", "waits for",
         "tokens/s", "not over-\nlapped", "tokens/s\na user", "weights\nGB", "room,\nrequests"),
    )  # fmt: skip
    for each in found:
        took = each.times
        milliseconds = (took.arithmetic_us, took.hbm_us, took.exchange_us, each.step_us)
        table.add_row(
            each.role, f"DEP{each.ranks}", str(each.batch), f"{each.step.flops / each.step.tokens / 1e9:.1f}",
            *(f"{us / 1e3:.2f}" for us in milliseconds), each.limit, f"{each.tokens_per_s:,.0f}",
            f"{each.serial_tokens_per_s:,.0f}", f"{each.per_user:.0f}" if each.per_user else "-",
            f"{each.weight_bytes / 1e9:.1f}", f"{each.capacity:,}" + " !" * bool(each.problem),
        )  # fmt: skip
    return table


def _balances(machine: Cluster, pairs: Sequence[Balance]) -> Table:
    first = pairs[0]
    table = _table(
        f"Instances together on {machine.gpus} GPUs: modelled. A hand-over: {first.handover_bytes / 1e6:.2f} MB over "
        f"the {first.over}",
        ("prefill", "decode", "idle\nGPUs", "busy", "requests/s", "output\ntokens/s", "computed\ntokens/s",
         "in and out\ntokens/s", "hand-over\nGB/s", "of link,\nsender", "of link,\nreceiver"),
        left=2,
    )  # fmt: skip
    for each in pairs:
        table.add_row(
            f"{each.prefill_count} x DEP{each.prefill.ranks}", f"{each.decode_count} x DEP{each.decode.ranks}",
            str(each.idle_gpus), f"{100 * each.prefill_busy:.0f}/{100 * each.decode_busy:.0f}%",
            f"{each.requests_per_s:,.1f}", f"{each.output_per_s:,.0f}", f"{each.computed_per_s:,.0f}",
            f"{each.total_per_s:,.0f}", f"{each.handover_bytes_per_s / 1e9:.2f}", _percent(each.out_share),
            _percent(each.in_share),
        )  # fmt: skip
    return table


def _figures(figures: Sequence[Implied]) -> Table:
    table = _table(
        "Published figures: shares of peak rates that they imply, modelled",
        ("figure", "read as", "tokens/s\na GPU", "FP8\npeak", "arith-\nmetic", "HBM", "link", "of the\nmodel",
         "prefill\nGPUs"),
        left=2,
    )  # fmt: skip
    for each in figures:
        table.add_row(
            f"{each.figure.name}: {each.figure.tokens_per_s / 1e3:,.1f}K", each.reading, f"{each.tokens_per_s:,.0f}",
            *map(_percent, (each.fp8, each.arithmetic, each.hbm, each.link, each.of_model)),
            "-" if each.prefill_gpus is None else f"{each.prefill_gpus:.1f}",
        )  # fmt: skip
    return table


def _data(
    config: DeepseekV41Config, machine: Cluster, work: Workload, found: Sequence[Instance], pairs: Sequence[Balance],
    figures: Sequence[Implied],
) -> dict[str, Any]:  # fmt: skip
    def instance(each: Instance) -> dict[str, Any]:
        """All but the lines of the step, which are added up by part."""
        plain = {name: value for name, value in vars(each).items() if name != "step"}
        parts: dict[str, dict[str, float]] = {}
        for line in each.step.lines:
            part = parts.setdefault(f"{line.kind}: {line.part}", {"flops": 0.0, "hbm_bytes": 0.0})
            part["flops"] += line.flops
            part["hbm_bytes"] += line.hbm_bytes
        step = {"tokens": each.step.tokens, "flops": each.step.flops, "hbm_bytes": each.step.hbm_bytes,
                "dispatch_bytes": each.step.dispatch_bytes, "combine_bytes": each.step.combine_bytes}  # fmt: skip
        return {**plain, "times": asdict(each.times), "step": step, "parts": parts}

    def balance(each: Balance) -> dict[str, Any]:
        return {**vars(each), "prefill": each.prefill.ranks, "decode": each.decode.ranks}

    return {
        "status": "modelled", "cluster": machine.name, "workload": asdict(work), "new_tokens": work.new,
        "replayed_tokens": replayed(config, work), "tail": tail(config, work.elide), "assumptions": ASSUMPTIONS,
        "formulas": {**costs.FORMULAS, **rack.FORMULAS}, "instances": [instance(each) for each in found],
        "balances": [balance(each) for each in pairs], "published": [asdict(each) for each in figures],
    }  # fmt: skip
