"""The options that commands about kernels share, and what they mean: the calls that a workload needs kernels for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dscompile.targets import TARGETS, Target, get_target

if TYPE_CHECKING:
    from dscompile.tuning.calls import Call
    from dscompile.workload_models import Config

ModelOption = Annotated[
    str,
    typer.Option(help="`v41` or `v4-flash` (the releases), `v41-miniature`, `v4-miniature`, or a config.json."),
]
TargetOption = Annotated[str, typer.Option(help="sm_90a, sm_100a or sm_103a.")]
BatchOption = Annotated[str, typer.Option(help="Sequences per step, separated by commas.")]
ContextOption = Annotated[str, typer.Option(help="Tokens that the caches have room for: 8k,128k.")]
TokensOption = Annotated[str, typer.Option(help="New tokens a sequence when prefilling.")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes that compile; default: the cores.")]


class SizeError(ValueError):
    """A size or a target on the command line that cannot be used."""


class Roles(StrEnum):
    """What a machine does."""

    prefill = "prefill"
    decode = "decode"


class Weights(StrEnum):
    """How the model's weights lie in memory."""

    plain = "plain"
    stored = "stored"


WeightsOption = Annotated[
    Weights, typer.Option(help="`stored`: FP8 and FP4 as in V4.1's checkpoint, activations rounded to FP8.")
]
RoleOption = Annotated[Roles, typer.Option(help="One token a sequence, or many.")]


def sizes(text: str) -> list[int]:
    """`8,16` or `8k,128k,1m` to numbers (k = 1024); SizeError names the part that is none."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", part)
        if match is None or int(match[1]) == 0:
            raise SizeError(f"size {part!r} in {text!r}, allowed: positive whole numbers, with k or m for 1024, 1024^2")
        found.append(int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()])
    return found


def gpu(name: str) -> Target:
    """The GPU target of that name."""
    target = get_target(name)
    if target.capability is None:
        gpus = ", ".join(target.name for target in TARGETS.values() if target.capability)
        raise SizeError(f"target {name!r} has no kernels to build; allowed: {gpus}")
    return target


@dataclass(frozen=True)
class Workload:
    """Steps of a model: every batch size with every context. tokens: new ones a sequence, when prefilling."""

    model: str
    config: Config
    target: Target
    role: Roles
    batches: list[int]
    contexts: list[int]
    tokens: int
    jobs: int
    weights: Weights

    def as_data(self) -> dict[str, Any]:
        return {
            "model": self.model, "role": str(self.role), "batch": self.batches, "context": self.contexts,
            "tokens": self.tokens, "weights": str(self.weights),
        }  # fmt: skip

    def calls(self, progress: Progress) -> list[Call]:
        """Of all steps, equal ones joined; a line of `progress` shows how far it is."""
        from dscompile.tuning.calls import merged
        from dscompile.workload_models import workload_calls

        shapes = [(batch, context) for batch in self.batches for context in self.contexts]
        finding = progress.add_task("finding calls", total=len(shapes))
        calls: list[Call] = []
        stored = self.weights is Weights.stored
        steps = workload_calls(self.config, self.target.name, self.role.value, shapes, self.tokens, self.jobs, stored)
        for found in steps:
            calls += found
            progress.advance(finding)
        return merged(calls)


def workload(
    model: str, target: str, batch: str, context: str, role: Roles, tokens: str, jobs: int | None,
    weights: Weights = Weights.plain,
) -> Workload:  # fmt: skip
    """What the options of a command say; an error of one line for what cannot be used."""
    from dscompile.workload_models import read_config

    machine, config = gpu(target), read_config(model)
    counts = sizes(batch), sizes(context), sizes(tokens)[0]
    return Workload(model, config, machine, role, *counts, jobs or os.cpu_count() or 1, weights)


def progress_on(console: Console) -> Progress:
    """A line for each part of the work, gone afterwards on a terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=console.is_terminal)
