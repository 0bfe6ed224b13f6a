"""The Dynamo backend: `torch.compile(model, backend="dsv4")`.

Dynamo's graph -> functional ATen graph -> passes (recognise, share) -> lowering for the target -> Inductor.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dscompile import capture, report
from dscompile.halves import halved, marked_inputs
from dscompile.options import Options
from dscompile.parallel import with_state
from dscompile.passes.decoding import Obstacle
from dscompile.passes.halving import Unsplittable, check_writes
from dscompile.passes.schedule import KEEP_ORDER
from dscompile.rewriting import Snapshots, rewrite
from dscompile.verify import checked, copy_graph
from dscompile.whole_step import outside_of_graph


class DscompileWarning(UserWarning):
    """Something the user asked for did not happen as asked: the message says what and why."""


def dsv4(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph; the entry point `dsv4` of the group `torch_dynamo_backends`.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs (fake tensors, tensors or symbolic sizes).
        options: fields of `dscompile.options.Options`, as given to `torch.compile(options=...)`.
        mode: `torch.compile`'s mode; None and "default" are accepted.

    Raises:
        ValueError: an unknown option or a value that is not allowed.
        dscompile.rewriting.StrictError: with `strict=True`, when something that resembles DeepSeek mathematics was
            not recognised, or a decoding step cannot be captured.
    """
    settings = Options.from_user(options, mode)
    entry = report.GraphReport(name=_graph_name(), inputs=_describe_inputs(gm, example_inputs))
    _warn_before_recompile_limit(entry)
    entry.nodes_before = len(gm.graph.nodes)
    if capture.needs_gradients(example_inputs):
        return _leave_unchanged(gm, example_inputs, settings, entry)
    outside = outside_of_graph(gm) if settings.role == "decode" else ()
    capture.specialise_module_floats(gm)
    if settings.micro_batches == 2:
        try:
            return _compile_graph(halved(gm), example_inputs, settings, entry, outside, marked_inputs(gm))
        except Unsplittable as reason:
            entry = report.GraphReport(entry.name, entry.inputs, entry.nodes_before)
            entry.notes.append(f"the batch is not split: {reason}")
    return _compile_graph(gm, example_inputs, settings, entry, outside)


def _compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options, entry: report.GraphReport,
    outside: Sequence[Obstacle] = (), marked: Sequence[bool] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """outside: see `rewrite`. marked: which inputs are cut in a graph of a batch's halves; None for any other graph."""
    names, values = capture.placeholder_names(gm), capture.placeholder_values(gm)
    started = time.perf_counter()

    def inner(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        entry.capture_seconds = time.perf_counter() - started
        began = time.perf_counter()
        original = copy_graph(graph) if settings.verify else None
        snapshots = Snapshots(keep=settings.verify)
        if marked is not None:
            check_writes(graph, names, marked)
        halves = 1 if marked is None else 2
        state = rewrite(graph, names, settings, entry, snapshots, values, halves, outside)
        _warn_of_gaps(entry)
        entry.rewrite_seconds = time.perf_counter() - began
        more = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")[len(inputs) :]]
        run = with_state(_compile(graph, [*inputs, *more], settings, entry), state)
        if original is not None:
            run = checked(original, snapshots.graphs, run, entry)
        _publish(entry, settings)
        return run

    return capture.functionalise(gm, example_inputs, inner)


def _compile(
    graph: fx.GraphModule, inputs: list[Any], settings: Options, entry: report.GraphReport
) -> Callable[..., Any]:
    if not settings.inductor:
        return graph.forward
    from torch._inductor.compile_fx import compile_fx

    began = time.perf_counter()
    keep = KEEP_ORDER if entry.schedule else {}
    compiled = compile_fx(graph, inputs, config_patches={**keep, **settings.inductor_options} or None)
    entry.compile_seconds = time.perf_counter() - began
    return compiled  # type: ignore[return-value]


def _leave_unchanged(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options, entry: report.GraphReport
) -> Callable[..., Any]:
    message = (
        "inputs require gradients: dsv4 rewrites inference graphs only, so this graph went to Inductor unchanged; "
        "call the model under torch.no_grad()"
    )
    warnings.warn(message, DscompileWarning, stacklevel=2)
    entry.notes.append(message)
    entry.nodes_after = entry.nodes_before
    _publish(entry, settings)
    if not settings.inductor:
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(example_inputs))  # type: ignore[return-value]


def _warn_of_gaps(entry: report.GraphReport) -> None:
    if entry.gaps:
        more = f" (and {len(entry.gaps) - 1} more layers)" if len(entry.gaps) > 1 else ""
        message = f"{entry.gaps[0]}{more}; print(dscompile.last_report()) says why"
        warnings.warn(message, DscompileWarning, stacklevel=3)


def _publish(entry: report.GraphReport, settings: Options) -> None:
    report.publish(entry)
    if settings.report:
        report.last_report().write(settings.report)


def _graph_name() -> str:
    compile_id = torch._guards.CompileContext.current_compile_id()
    return f"graph {compile_id}" if compile_id is not None else "graph"


def _warn_before_recompile_limit(entry: report.GraphReport) -> None:
    """Dynamo runs a function eagerly, with a log line only, once it was recompiled too often: say so before."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    recompiles = getattr(compile_id, "frame_compile_id", None)
    limit = torch._dynamo.config.recompile_limit
    if recompiles is not None and recompiles + 2 >= limit:
        message = (
            f"this function has been compiled {recompiles + 1} times; at {limit} "
            "(torch._dynamo.config.recompile_limit) Dynamo stops compiling it and runs it eagerly. Use a static cache "
            "(for transformers: dscompile.integrations.transformers.StaticV4Cache) or mark changing sizes with "
            "torch._dynamo.mark_dynamic"
        )
        warnings.warn(message, DscompileWarning, stacklevel=3)
        entry.notes.append(message)


def _describe_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """The inputs of the call, shortly: name, dtype and shape of the first few tensors."""
    names, shown = capture.placeholder_names(gm), []
    for position in capture.argument_positions(gm):
        value = example_inputs[position]
        if isinstance(value, torch.Tensor):
            shape = "x".join(str(size) for size in value.shape)
            name = names[position].rsplit(".", 1)[-1]
            shown.append(f"{name}: {str(value.dtype).removeprefix('torch.')} {shape or 'scalar'}")
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")
