"""The backend's part in expert parallelism: from options to the pass, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx

from dscompile import __version__, compat
from dscompile.distributed.layers import layer_of
from dscompile.expert_options import expert_ranks, form_of
from dscompile.options import Options
from dscompile.passes.engine import PassContext
from dscompile.passes.expert_parallel import ExpertParallel, ExpertParallelError, Form, StateInput, refuse_copies
from dscompile.report import GraphReport
from dscompile.targets import Target

_OWN = ("mesh", "dump_dir", "report")  # may differ between ranks


def spread_experts(
    graph: fx.GraphModule, names: Sequence[str], values: Sequence[Any], options: Options, target: Target | None,
    entry: GraphReport, halves: int = 1,
) -> list[StateInput]:  # fmt: skip
    """Runs the pass if the option `mesh` asks for it; returns what the graph then takes behind its inputs.

    halves: into how many parts the batch of this graph is split.

    Raises:
        ExpertParallelError: as the pass; or the model holds only this rank's experts and the option is not there.
    """
    if options.mesh is None:
        _refuse_parts(names, values)
        refuse_copies(graph)
        return []
    form = Form(
        (options.expert_capacity or 0) if form_of(options) == "padded" else 0, options.expert_overflow,
        options.expert_payload, options.expert_transport, options.expert_load,
        _facts(options, target), empty_half=halves < options.micro_batches,
    )  # fmt: skip
    state: list[StateInput] = []
    result = ExpertParallel(expert_ranks(options), values, names, state, form).run(graph, PassContext(options))
    entry.exchanges = list(result.notes)
    if not result.notes:
        entry.notes.append(
            "option 'mesh': no experts were recognised in this graph, so every rank runs all of it alone"
        )
    return state


def with_state(run: Callable[..., Any], state: Sequence[StateInput]) -> Callable[..., Any]:
    """`run` with the state of its experts behind its arguments."""

    def call(*inputs: Any) -> Any:
        return run(*inputs, *(each.of(inputs) for each in state))

    return call if state else run


def _refuse_parts(names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values):
        layer = layer_of(value)
        if layer is not None and not layer.whole:
            raise ExpertParallelError(
                f"{name}: this rank holds {layer.placement.slots_per_rank} slots of {layer.placement.experts} experts, "
                "option 'mesh' is None; allowed: the mesh that was given to shard_experts"
            )


def _facts(options: Options, target: Target | None) -> dict[str, Any]:
    """What has to be the same on every rank, so that all start the same exchanges with the same bytes."""
    facts = {f"option {each.name!r}": getattr(options, each.name) for each in fields(options) if each.name not in _OWN}
    facts |= {"target": target.name if target else None, "dscompile": __version__, "torch": torch.__version__}
    if target is not None and target.device_type != "cpu":
        from dscompile.tuning.selection import records_fingerprint

        facts |= {"triton": compat.version_text("triton"), "tuning records": records_fingerprint(target)}
    return facts
