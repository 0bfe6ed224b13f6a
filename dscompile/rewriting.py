"""One functional graph through the whole rewriting: recognise, share, lower; and into the report."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dscompile.completeness import gaps
from dscompile.decoding import decoding
from dscompile.options import Options
from dscompile.parallel import spread_experts
from dscompile.passes.decoding import Obstacle
from dscompile.passes.default import default_pipeline, pass_names
from dscompile.passes.elide import elide
from dscompile.passes.engine import PassContext, PassResult
from dscompile.passes.engine.fxutil import layer_name
from dscompile.passes.engine.graphs import subgraphs
from dscompile.passes.fusing import fusing_pipeline
from dscompile.passes.interleave import interleave
from dscompile.passes.regions import functionalise_writes, region_calls, region_module, restore_region_mutation
from dscompile.passes.schedule import schedule, timeline
from dscompile.passes.share import hoist_shared
from dscompile.passes.shared_rows import DecodeInFront
from dscompile.passes.stages import layer_of_stage
from dscompile.report import GraphReport, Lowering, Match, Miss, PassTiming
from dscompile.targets import Target, UnsupportedTargetError, detect_target, get_target
from dscompile.verify import copy_graph

#: Rewriting steps that are not passes over patterns but can be switched off like them.
STEPS = ("fuse", "share", "schedule")


class StrictError(RuntimeError):
    """`strict=True` and something that resembles DeepSeek mathematics, or that a layer must have, was not recognised;
    or, in the role "decode", one CUDA graph cannot record a step. The message lists it.
    """


@dataclass
class Snapshots:
    """Copies of the graph after each step, for bisection; empty unless asked for."""

    keep: bool = False
    graphs: list[tuple[str, fx.GraphModule]] = field(default_factory=list)

    def take(self, name: str, graph: fx.GraphModule) -> None:
        if self.keep:
            self.graphs.append((name, copy_graph(graph)))


def rewrite(
    graph: fx.GraphModule, input_names: Sequence[str], options: Options, entry: GraphReport, snapshots: Snapshots,
    input_values: Sequence[Any] = (), halves: int = 1, outside: Sequence[Obstacle] = (),
) -> list[Any]:  # fmt: skip
    """Rewrites `graph` in place and fills `entry`; returns what the graph takes behind its inputs (`with_state`).

    Args:
        graph: a functional ATen graph, regions included.
        input_names: the user's name of every placeholder, see `capture.placeholder_names`.
        input_values: the user's parameters and buffers among them, see `capture.placeholder_values`; for experts that
            are spread over ranks.
        halves: 2 for a graph of `halves.halved`.
        outside: what of a decoding step is not in the graph, see `whole_step.outside_of_graph`.

    Raises:
        Unsplittable: the halves of such a graph cannot be interleaved.
        StrictError, ExpertParallelError: see there.
    """
    options.check_passes((*pass_names(), *STEPS))
    entry.nodes_before = count_nodes(graph)
    labels = {region: list(dict.fromkeys(names)) for region, names in layer_labels(graph, input_names).items()}
    entry.regions = len({region_module(graph, call) for call in region_calls(graph)})
    entry.region_calls = len(region_calls(graph))
    dump = _Dump(options.dump_dir, entry.name, graph)

    def after(name: str, rewritten: fx.GraphModule, result: PassResult) -> None:
        entry.passes.append(PassTiming(name, len(result.matches), len(result.near_misses), result.seconds))
        dump.write(name, rewritten)
        snapshots.take(name, rewritten)

    off = [name for name in options.disable if name not in STEPS]
    results = default_pipeline(off).run(graph, PassContext(options), hook=after)
    target = target_of(graph, options, entry)
    _record(results, labels, entry)
    entry.gaps = gaps(entry.matches, off)
    if options.strict and (entry.misses or entry.gaps):
        raise StrictError(_strict_message(entry))
    if options.elide is not None:
        entry.elision = elide(graph, options.elide, options.elide_tail, _labeller(graph, input_names))
        dump.write("elide", graph)
        snapshots.take("elide", graph)
    state = spread_experts(graph, input_names, input_values, options, target, entry, halves)
    snapshots.take("expert_parallel", graph)
    if target is not None and target.device_type != "cpu" and "fuse" not in options.disable:
        fusing_pipeline().run(graph, PassContext(options), hook=after)
    for region in {region_module(graph, call) for call in region_calls(graph)}:
        functionalise_writes(region)
    restore_region_mutation(graph)
    snapshots.take("regions", graph)
    if options.share and "share" not in options.disable:
        if target is not None and target.device_type == "cpu":
            DecodeInFront().run(graph, PassContext(options))
        entry.shared = [str(shared) for shared in hoist_shared(graph)]
        dump.write("share", graph)
        snapshots.take("share", graph)
    if options.lower and target is not None:
        _lower(graph, target, layer_labels(graph, input_names), entry)
        dump.write("lower", graph)
        snapshots.take("lower", graph)
    if entry.exchanges:
        label = _labeller(graph, input_names)
        if halves == 2:
            interleave(graph, label)
        if "schedule" not in options.disable:
            schedule(graph)
            dump.write("schedule", graph)
            snapshots.take("schedule", graph)
        entry.schedule = timeline(graph, lambda node: layer_of_stage(node) or label(node))
    if options.role == "decode":
        places = layer_labels(graph, input_names)
        label = _labeller(graph, input_names)
        entry.decoding = decoding(graph, options, entry, label, places, input_names, outside)
        if options.strict and not entry.decoding.captured:
            raise StrictError("strict: " + "\n  ".join(entry.decoding.lines()[1:]))
    entry.nodes_after = count_nodes(graph)
    return state


def count_nodes(graph: fx.GraphModule) -> int:
    """Operations of a graph and of every region in it, each region once."""
    return sum(node.op == "call_function" for sub in subgraphs(graph) for node in sub.gm.graph.nodes)


def layer_labels(graph: fx.GraphModule, input_names: Sequence[str]) -> dict[str, list[str]]:
    """Region name -> the layer that each of its calls stands for, such as "layers.3".

    A call's layer is the numbered module whose parameters it takes most of.
    """
    names = dict(zip(graph.graph.find_nodes(op="placeholder"), input_names, strict=False))
    paths = {id(sub.gm): sub.path for sub in subgraphs(graph)}
    labels: dict[str, list[str]] = {}
    for position, call in enumerate(region_calls(graph)):
        counts = Counter(
            found[1]
            for source in call.all_input_nodes
            if (found := re.match(r"(.*?\w+\.\d+)\.", names.get(source, "")))
        )
        label = _short(counts.most_common(1)[0][0]) if counts else f"call {position}"
        labels.setdefault(paths[id(region_module(graph, call))], []).append(label)
    return labels


def _labeller(graph: fx.GraphModule, input_names: Sequence[str]) -> Callable[[fx.Node], str]:
    """The layer of a region call or of another operation of the outermost graph; "" outside layers."""
    labels = {region: iter(names) for region, names in layer_labels(graph, input_names).items()}
    paths = {id(sub.gm): sub.path for sub in subgraphs(graph)}
    calls = {call: next(labels[paths[id(region_module(graph, call))]]) for call in region_calls(graph)}

    def label(node: fx.Node) -> str:
        if node in calls:
            return calls[node]
        name = _short(layer_name(node))
        return name if re.search(r"\.\d+$", name) else ""

    return label


def _record(results: Sequence[PassResult], labels: dict[str, list[str]], entry: GraphReport) -> None:
    for result in results:
        for match in result.matches:
            for layer in labels.get(match.graph) or [_short(match.layer)]:
                entry.matches.append(Match(layer, match.family, match.pattern, match.source))
        for miss in result.near_misses:
            for layer in labels.get(miss.graph) or [_short(miss.layer)]:
                entry.misses.append(Miss(layer, miss.family, miss.pattern, miss.node, miss.source, miss.reason))


def _short(layer: str) -> str:
    found = re.search(r"\w+\.\d+$", layer)
    return found[0] if found else layer


def target_of(graph: fx.GraphModule, options: Options, entry: GraphReport) -> Target | None:
    """What to generate code for: the option, or the device of the graph's inputs (the CPU if it has no tensors).

    None, with a note in the report, for a device that no target describes.
    """
    if options.target is not None:
        return get_target(options.target)
    values = (node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder"))
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    try:
        return detect_target(next((device for device in devices if device.type != "cpu"), "cpu"))
    except UnsupportedTargetError as error:
        entry.notes.append(f"operations run their plain references: {error}")
        return None


def _lower(graph: fx.GraphModule, target: Target, labels: dict[str, list[str]], entry: GraphReport) -> None:
    from dscompile.lowering import lower_graph
    from dscompile.lowering.calls import cost_of

    for sub in subgraphs(graph):
        places = {node.name: layer_name(node) for node in sub.gm.graph.nodes}
        costs = {node.name: cost for node in sub.gm.graph.nodes if (cost := cost_of(node)) is not None}
        for record in lower_graph(sub.gm, target, nested=False):
            cost = costs.get(record.node)
            parts = ("", "", "") if cost is None else (str(cost.read_bytes), str(cost.write_bytes), str(cost.flops))
            for layer in labels.get(sub.path) or [_short(places[record.node])] * sub.calls:
                entry.lowerings.append(Lowering(layer, record.op, record.template, record.reason, *parts))


def _strict_message(entry: GraphReport) -> str:
    places = len(entry.misses) + len(entry.gaps)
    lines = [f"strict: {places} places resemble DeepSeek mathematics or must hold some, and were not recognised"]
    lines += [f"  {line}" for line in entry.gaps]
    for miss in entry.misses[:20]:
        where = f"{miss.layer or 'outside layers'}, {miss.node}, {miss.source}"
        lines.append(f"  {miss.family}/{miss.pattern} at {where}: {miss.reason}")
    return "\n".join(lines)


class _Dump:
    """Writes every graph and its difference to the one before, if a folder was given."""

    def __init__(self, folder: str | None, name: str, graph: fx.GraphModule) -> None:
        self._folder = Path(folder) / re.sub(r"\W+", "_", name) if folder else None
        self._count = 0
        self._before = ""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.write("captured", graph)

    def write(self, step: str, graph: fx.GraphModule) -> None:
        if self._folder is None:
            return
        text = _text(graph)
        stem = f"{self._count:02d}_{step}"
        (self._folder / f"{stem}.txt").write_text(text, encoding="utf-8")
        if self._count:
            lines = difflib.unified_diff(self._before.splitlines(), text.splitlines(), "before", step, lineterm="")
            (self._folder / f"{stem}.diff").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._before = text
        self._count += 1


def _text(graph: Any) -> str:
    return str(graph.print_readable(print_output=False))
