"""Which operations a step of a model calls, with which sizes: found by capturing the model, without its weights.

Models are built and run on fake tensors, so the released V4.1 with its 763 billion parameters takes no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from dscompile import capture
from dscompile.options import Options
from dscompile.passes.engine.fxutil import layer_name
from dscompile.passes.engine.graphs import subgraphs
from dscompile.report import GraphReport
from dscompile.rewriting import Snapshots, layer_labels, rewrite
from dscompile.tuning.calls import Call, TensorSpec, merged

if TYPE_CHECKING:
    from dscompile.models.deepseek_v41 import DeepseekV41Config

Role = Literal["prefill", "decode"]


class WorkloadError(RuntimeError):
    """The calls of a model could not be found; the message says what stood in the way."""


def capture_calls(target: str, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Call]]:
    """(layer, call) of every vocabulary operation in one call of `model`, in the order of its graphs.

    target: a name in `TARGETS`; what is shared between layers, and how, depends on it. The model is rewritten, not
    lowered, and runs once; give it fake tensors. Sizes must not be symbolic.

    Raises:
        WorkloadError: the model made no graph, or parts of it were not recognised.
    """
    found: list[tuple[str, Call]] = []
    reports: list[GraphReport] = []

    def visit(graph: fx.GraphModule, labels: dict[str, list[str]], entry: GraphReport) -> None:
        reports.append(entry)
        for sub in subgraphs(graph):
            for node in sub.gm.graph.nodes:
                call = _call_of(node)
                if call is not None:
                    found.extend((layer, call) for layer in labels.get(sub.path) or [layer_name(node)] * sub.calls)

    visit_graphs(Options(lower=False, target=target), visit, model, *args, **kwargs)
    missing = [f"{miss.layer}: {miss.family}/{miss.pattern}: {miss.reason}" for r in reports for miss in r.misses]
    missing += [gap for report in reports for gap in report.gaps]
    if not reports or missing:
        raise WorkloadError("; ".join(missing[:3]) or "the model made no graph")
    yield from found


def visit_graphs(
    options: Options,
    visit: Callable[[fx.GraphModule, dict[str, list[str]], GraphReport], None],
    model: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Capture and run `model` once; `visit` sees every rewritten graph, the layers of its regions and its report."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = capture.placeholder_names(gm)

        def inner(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            entry = GraphReport("capture")
            rewrite(graph, names, options, entry, Snapshots())
            visit(graph, layer_labels(graph, names), entry)
            return graph.forward  # type: ignore[no-any-return]

        return capture.functionalise(gm, inputs, inner)

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend=backend, dynamic=False)(*args, **kwargs)
    finally:
        torch._dynamo.reset()


def _call_of(node: fx.Node) -> Call | None:
    from dscompile.lowering.calls import arguments_of, op_of
    from dscompile.ops import OPS

    found = op_of(node)
    if found is None:
        return None
    given = arguments_of(node, *found)
    values = (given.get(a.name, a.default_value) for a in OPS[found[0]].op._schema.arguments)
    return Call(found[0], tuple(TensorSpec.of(v) if isinstance(v, torch.Tensor) else v for v in values))


def v41_calls(
    config: DeepseekV41Config, target: str, role: Role, batch: int, context: int, tokens: int = 1,
    dtype: torch.dtype = torch.bfloat16, stored: bool = False,
) -> list[Call]:  # fmt: skip
    """The calls of one step of V4.1: `batch` sequences with room for `context` tokens and `tokens` new ones each.

    role: "decode" takes one token a sequence; "prefill" takes `tokens`. stored: weights in FP8 and FP4 as the
    checkpoint holds them, activations rounded to FP8, else all weights in `dtype`. One layer of every kind is captured
    and counted as often as the model has it, which is much quicker than capturing all of them.

    Raises:
        ValueError: sizes that do not go together.
        WorkloadError: see `capture_calls`.
    """
    tokens = checked_tokens(role, batch, context, tokens)
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
    from dscompile.regions import mark_regions

    small, multiplicity = representative(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        kind: dict[str, Any] = {"weights": "packed", "activations": "fp8"} if stored else {}
        model = DeepseekV41ForCausalLM(small, dtype=dtype, **kind).eval()
        mark_regions(model)
        cache = model.new_cache(batch, context)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        positions = torch.zeros(batch, tokens, dtype=torch.int64)
        found = list(capture_calls(target, model, ids, positions, cache))
    return merged(replace(call, count=multiplicity[layer_index(layer)]) for layer, call in found)


def checked_tokens(role: Role, batch: int, context: int, tokens: int) -> int:
    """New tokens a sequence; ValueError for sizes that do not go together."""
    tokens = 1 if role == "decode" else tokens
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name}: {value}, allowed: >= 1")
    if tokens > context:
        raise ValueError(f"tokens: {tokens}, allowed: <= context {context}")
    return tokens


def layer_index(layer: str) -> int:
    """The number of a layer from its name; -1 for what is outside layers."""
    last = layer.rsplit(".", 1)[-1]
    return int(last) if last.isdigit() else -1


def representative(config: DeepseekV41Config) -> tuple[DeepseekV41Config, Counter[int]]:
    """A model with one layer of every kind of `config`, and how often each of its layers stands for; -1: the rest."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for layer in range(config.num_hidden_layers):
        kind = (
            config.kind(layer), config.ratio(layer), layer in config.engram_layer_ids, config.uses_candidates(layer),
            layer == config.candidate_source_layer_id,
        )  # fmt: skip
        kinds.setdefault(kind, []).append(layer)
    kept = sorted(layers[0] for layers in kinds.values())
    place = {layer: position for position, layer in enumerate(kept)}
    source = config.candidate_source_layer_id
    engrams = [i for i, layer in enumerate(config.engram_layer_ids) if layer in place]
    small = replace(
        config,
        num_hidden_layers=len(kept),
        compress_ratios=tuple(config.ratio(layer) for layer in kept),
        kv_source_layer_ids=tuple(place[layer] for layer in config.kv_source_layer_ids if layer in place),
        index_source_layer_ids=tuple(place[layer] for layer in config.index_source_layer_ids if layer in place),
        candidate_source_layer_id=None if source is None else place[source],
        engram_layer_ids=tuple(place[config.engram_layer_ids[i]] for i in engrams),
        engram_num_embeddings=tuple(config.engram_num_embeddings[i] for i in engrams),
    )
    counts = Counter({place[layers[0]]: len(layers) for layers in kinds.values()})
    counts[-1] = 1
    return small, counts
