"""A V4.1 model small enough to be compiled several times in a test, with layers behind its last KV source."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dscompile
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.cache import DeepseekV41Cache
from dscompile.models.deepseek_v41.plan import clean_positions, plan_window_rows
from dscompile.passes.elision import Elision

WINDOW = 8

#: Layer 0 window only; 1 and 2 Full, the last KV source; 3 and 5 Reuse; 4 Reindex.
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "n_routed_experts": 8,
    "compress_ratios": (0, 2, 1, 1, 1, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2, 4),
    "candidate_source_layer_id": 2,
    "hc_sinkhorn_iters": 2,
}


def small_model(**changes: Any) -> DeepseekV41ForCausalLM:
    """fp32, random weights, the same on every call."""
    return v41_model(torch.float32, **{**SMALL, **changes})


def cache_rows(cache: DeepseekV41Cache) -> dict[str, Tensor]:
    """Every row that a later call can read, by part and layer: all pools without their scratch row."""
    parts = ("window", "compressed", "index_keys", "open_groups")
    return {f"{part} {layer}": pool[:-1] for part in parts for layer, pool in getattr(cache, part).items()}


class TwoLayers(torch.nn.Module):
    """Two layers of attention to a window whose rows a ring keeps, as little as elision takes: compiled in a second.

    clean: what the positions go through first.
    """

    def __init__(self, clean: Callable[[Tensor, int], Tensor] = clean_positions, vocabulary: int = 96) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.head = (
            torch.nn.Parameter(torch.randn(*sizes, generator=generator) / 8, requires_grad=False)
            for sizes in ((96, 64), (64, vocabulary))
        )
        self.clean = clean

    def new_cache(self, batch: int = 1) -> list[Tensor]:
        return [torch.zeros(batch * WINDOW + 1, 64) for _ in range(2)]

    def hidden(self, ids: Tensor, positions: Tensor, cache: list[Tensor]) -> Tensor:
        positions = self.clean(positions, 128)
        window = plan_window_rows(positions, WINDOW)
        x = self.embed[ids]
        for ring in cache:
            rows = torch.cat((ring[window.read], x), 1)
            first = positions[:, 0] - WINDOW
            seen = torch.ops.dsv4.sparse_attention(
                x.unsqueeze(2), rows, positions, first, WINDOW, None, None, None, None, 1.0, None, None, False, "none",
                "none",
            )  # fmt: skip
            ring.index_put_((window.write,), x.flatten(0, 1))
            x = x + torch.tanh(seen.squeeze(2))
        return x

    def forward(self, ids: Tensor, positions: Tensor, cache: list[Tensor]) -> Tensor:
        return self.hidden(ids, positions, cache) @ self.head


class Ran(NamedTuple):
    """What a compiled prefill gave beside the same function as it is."""

    got: Any
    want: Any
    rows: list[tuple[Tensor, Tensor]]  # of each ring those that a later call can read
    elision: Elision

    def same_rows(self) -> bool:
        return all(torch.allclose(got, want, atol=1e-5) for got, want in self.rows)


def ran(model: TwoLayers, function: Callable[..., Any], positions: Tensor | None = None, tokens: int = 64,
        **options: Any) -> Ran:  # fmt: skip
    """One call of `function(ids, positions, cache)`, compiled with the exact form unless `options` say otherwise."""
    positions = torch.arange(tokens)[None] if positions is None else positions
    ids = torch.randint(96, tuple(positions.shape), generator=torch.Generator().manual_seed(1))
    caches = [model.new_cache(positions.shape[0]) for _ in range(2)]
    torch._dynamo.reset()
    settings = {"inductor": False, "lower": False, "role": "prefill", "elide": "exact", **options}
    with torch.no_grad(), dscompile.collect() as report:
        got = torch.compile(function, backend="dsv4", options=settings, fullgraph=True)(ids, positions, caches[0])
        want = function(ids, positions, caches[1])
    elision = report.graphs[-1].elision
    assert elision is not None
    return Ran(got, want, [(a[:-1], b[:-1]) for a, b in zip(*caches, strict=True)], elision)
