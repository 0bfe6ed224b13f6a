"""The whole miniature: every part is recognised, in every setting, and the graph computes what it did."""

from __future__ import annotations

import pytest
import torch

from dscompile.passes.engine.graphs import subgraphs
from tests.support.v4 import token_ids

aten = torch.ops.aten


def structure(layers: str, cached: bool) -> dict[str, int]:
    """Operations that a model of these layers (w window, c ratio 4, h ratio 8) is made of.

    Two hyper-connections a layer; a ratio-4 layer has an indexer, which compresses too. Norms that are not part of a
    hyper-connection: q_a, q_b and kv in a layer, one a compressor, the last one. Rotations that are not part of the
    attention: kv, compressed rows, the indexer's query. Stores: windows; open group (kv and gate) and pool of a
    compressor; overlap (kv and gate) of those at ratio 4.
    """
    n, overlapping = len(layers), 2 * layers.count("c")
    compressors = overlapping + layers.count("h")
    counts = {
        "hc_pre": 2 * n, "hc_post": 2 * n, "hc_head": 1, "router": n, "experts": n, "grouped_output": n,
        "sparse_attention": n, "compress": compressors, "index_topk": layers.count("c"),
        "rms_norm": 3 * n + compressors + 1, "rope": n + compressors + layers.count("c"),
        "store_rows": n + 3 * compressors + 2 * overlapping if cached else 0,
    }  # fmt: skip
    return {name: count for name, count in counts.items() if count}


#: mode, tokens, batch, what differs from three layers in float32.
SETTINGS = {
    "prompt": ("plain", 22, 2, {}),
    "symbolic length": ("plain", 22, 1, {"layers": "c", "dynamic": None, "mark": True}),
    "everything symbolic": ("plain", 22, 2, {"dynamic": True}),
    "prefill into a cache": ("prefill", 22, 1, {}),
    "decoding": ("decode", 1, 2, {}),
    "decoding a batch of one": ("decode", 1, 1, {}),
    "bfloat16": ("prefill", 22, 2, {"layers": "ch", "dtype": torch.bfloat16}),
    "float16": ("decode", 1, 2, {"layers": "ch", "dtype": torch.float16}),
    "autocast": ("plain", 22, 2, {"autocast": True, "mlp_layer_types": ["hash_moe"] * 3, "index_topk": 64}),
}
ROUNDED = ("bfloat16", "float16", "autocast")
SLOW = ("everything symbolic", "decoding a batch of one", "float16")


def settings() -> list:
    return [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in SETTINGS]


@pytest.mark.parametrize("setting", settings())
def test_every_part_is_recognised(rewritten, setting: str) -> None:
    """R21: the counts are those of the model's structure whatever the dtype, the batch and the shapes are."""
    mode, tokens, batch, more = SETTINGS[setting]
    found = rewritten(mode, tokens, batch, **more)
    assert found.misses == []
    assert found.counts == structure(more.get("layers", "wch"), mode != "plain")
    assert not found.left(
        aten._softmax.default, aten.topk.default, aten.bmm.default, aten.scatter.value, aten.rsqrt.default
    )


@pytest.mark.parametrize("setting", [s for s in settings() if s.values[0] not in ROUNDED])
def test_the_numbers_stay(rewritten, setting: str) -> None:
    """Logits, and the cache that is left behind, which nothing but rounding may change."""
    mode, tokens, batch, more = SETTINGS[setting]
    found = rewritten(mode, tokens, batch, **more)
    assert found.difference < 1e-5
    assert float((found.after[0] - found.eager).abs().max()) < 1e-4


def test_autocast_is_as_good_as_eager(rewritten, miniature) -> None:
    """No choice of rows or experts can flip here: every expert is forced, every visible row is taken."""
    mode, tokens, batch, more = SETTINGS["autocast"]
    found = rewritten(mode, tokens, batch, **more)
    with torch.no_grad():
        model = miniature(**{k: v for k, v in more.items() if k != "autocast"})
        exact = model(token_ids(tokens, batch), use_cache=False).logits
    before, after = (float((x.float() - exact).abs().max()) for x in (found.before[0], found.after[0]))
    assert after < max(1.5 * before, 0.03 * float(exact.abs().max()))


@pytest.mark.parametrize("setting", ["prompt", "decoding"])
def test_no_head_has_its_own_copy_of_the_keys(rewritten, setting: str) -> None:
    """What is expanded is a table of angles or the streams, never keys to all heads; and nothing is cloned."""
    mode, tokens, batch, more = SETTINGS[setting]
    found = rewritten(mode, tokens, batch, **more)
    expanded = [n for n in found.gm.graph.nodes if n.target is aten.expand.default]
    assert max(n.meta["val"].dim() for n in expanded) <= 4
    keys = [n.args[1].meta["val"] for n in found.gm.graph.nodes if "sparse_attention" in str(n.target)]
    assert len(keys) == 3
    for node in expanded:
        value = node.meta["val"]
        assert value.shape[-1] != keys[0].shape[-1] or value.numel() <= min(k.numel() for k in keys)


def test_stores_leave_no_write_back(rewritten) -> None:
    """The pools are written in place: only the two counters are copied at the end."""
    found = rewritten("decode", 1, 2)
    copies = [n for n in found.gm.graph.nodes if n.target is aten.copy_.default]
    assert [n.args[0].meta["val"].dim() for n in copies] == [0, 0]
    assert not found.left(aten.index_put.default)


def test_layer_regions(rewritten) -> None:
    """A region is rewritten once and counts as often as it is called; its mask comes in as one number."""
    layers = "wcchh"
    found = rewritten("decode", 1, 1, layers, regions=True)
    regions = [s for s in subgraphs(found.gm) if s.path]
    assert sorted(s.calls for s in regions) == [2, 2]
    assert found.misses == []
    assert found.difference < 1e-5
    assert found.counts == structure(layers, cached=True)
    for region in regions:
        inputs = [n.meta["val"] for n in region.gm.graph.find_nodes(op="placeholder")]
        assert not [v for v in inputs if v.dim() == 4 and tuple(v.shape[-2:]) == (1, 8)]  # the window mask [1, 1, 1, 8]
