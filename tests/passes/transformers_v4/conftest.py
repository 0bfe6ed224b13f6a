"""Captured graphs of the miniature transformers V4, rewritten once a session whatever tests look at them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dscompile.passes.default import default_pipeline
from dscompile.passes.engine import PassResult
from dscompile.passes.engine.graphs import find, subgraphs
from dscompile.passes.engine.testing import functional_graph, run_flat
from tests.support.v4 import tiny, token_ids

KINDS = {"w": "sliding_attention", "c": "compressed_sparse_attention", "h": "heavily_compressed_attention"}


@dataclass
class Rewritten:
    """A graph after the pipeline, with what it computed before and after (outputs, then the inputs left behind)."""

    gm: GraphModule
    results: list[PassResult]
    before: list[Tensor]
    after: list[Tensor]
    eager: Tensor

    @property
    def counts(self) -> dict[str, int]:
        """Operations of the vocabulary by name, each as often as one run of the model goes through it."""
        count: Counter[str] = Counter()
        for sub in subgraphs(self.gm):
            for node in sub.gm.graph.nodes:
                if node.op == "call_function" and str(node.target).startswith("dsv4."):
                    count[str(node.target).split(".")[1]] += sub.calls
        return dict(count)

    @property
    def misses(self) -> list[str]:
        return [f"{m.pattern} at {m.node}: {m.reason}" for r in self.results for m in r.near_misses]

    def left(self, *targets: Any) -> list[str]:
        """Names of nodes of these operators that are still there."""
        return [n.name for sub in subgraphs(self.gm) for t in targets for n in find(sub.gm.graph, t)]

    @property
    def difference(self) -> float:
        """Largest difference of anything the graph returns or leaves behind."""
        pairs = [(a, b) for a, b in zip(self.before, self.after, strict=True) if a.numel()]
        return max(float((a.double() - b.double()).abs().nan_to_num(0.0).max()) for a, b in pairs)


def to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """What `from_pretrained(dtype=..)` makes: all but the modules that the model keeps in float32."""
    kept = re.compile("|".join(rf"(^|\.){re.escape(k)}(\.|$)" for k in model._keep_in_fp32_modules_strict))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not kept.search(name) and not name.endswith("inv_freq"):
            tensor.data = tensor.data.to(dtype)
    return model


def build(layers: str = "wch", dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """The miniature with these layers (w window, c ratio 4, h ratio 8)."""
    changes.setdefault("mlp_layer_types", ["hash_moe", *["moe"] * (len(layers) - 1)])
    model = tiny(num_hidden_layers=len(layers), layer_types=[KINDS[k] for k in layers], **changes)
    model.set_experts_implementation(changes.get("experts", "grouped_mm"))
    return to_dtype(model, dtype)


def capture(
    mode: str, tokens: int, batch: int, model: nn.Module, *, regions: bool = False, dynamic: bool | None = False,
    mark: bool = False, seen: int = 20, autocast: bool = False,
) -> tuple[GraphModule, Tensor]:  # fmt: skip
    """The graph of one forward and what eager gives. mode: "plain" (no cache), "prefill", or "decode" after `seen`."""
    from dscompile.integrations.transformers import StaticV4Cache, prepare

    ids = token_ids(seen + tokens, batch)
    prepare(model, regions=regions)
    if mode == "plain":
        ids = ids[:, :tokens].contiguous()
        run: Callable[[Tensor], Tensor] = lambda i: model(i, use_cache=False).logits  # noqa: E731
    else:
        cache = StaticV4Cache(model.config, batch, 53, model.dtype)
        run = lambda i: model(i, cache=cache, use_cache=True).logits  # noqa: E731
        if mode == "decode":
            with torch.no_grad():
                run(ids[:, :seen])
            ids = ids[:, seen:].contiguous()
        else:
            ids = ids[:, :tokens].contiguous()
    if autocast:
        plain = run

        def run(i: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return plain(i)

    if mark:
        torch._dynamo.mark_dynamic(ids, 1)
    gm = functional_graph(run, ids, dynamic=dynamic)
    return gm, gm.meta["outputs"]


@pytest.fixture(scope="session")
def miniature() -> Callable[..., nn.Module]:
    """`build`, for tests that want the model itself."""
    return build


@pytest.fixture(scope="session")
def rewritten() -> Callable[..., Rewritten]:
    """`rewritten(mode, tokens, batch, layers=.., dtype=.., ..)`: see `capture` and `build`; made once a session."""
    made: dict[str, Rewritten] = {}

    def make(
        mode: str, tokens: int, batch: int, layers: str = "wch", dtype: torch.dtype = torch.float32,
        regions: bool = False, dynamic: bool | None = False, mark: bool = False, autocast: bool = False, **changes: Any,
    ) -> Rewritten:  # fmt: skip
        key = repr((mode, tokens, batch, layers, dtype, regions, dynamic, mark, autocast, sorted(changes.items())))
        if key not in made:
            model = build(layers, dtype, **changes)
            gm, eager = capture(mode, tokens, batch, model, regions=regions, dynamic=dynamic, mark=mark,
                                autocast=autocast)  # fmt: skip
            before = run_flat(gm)
            results = default_pipeline().run(gm)
            made[key] = Rewritten(gm, results, before, run_flat(gm), eager)
        return made[key]

    return make
