"""The whole miniature: every part is recognised, in every setting, and the graph computes what it did."""

from __future__ import annotations

import pytest
import torch

from dscompile.passes.engine.graphs import subgraphs
from tests.support.v4 import token_ids

aten = torch.ops.aten

#: One layer of each kind: two hyper-connections a layer, one head; the ratio-4 layer compresses twice (its indexer).
EACH = {
    "hc_pre": 6, "hc_post": 6, "hc_head": 1, "router": 3, "experts": 3, "grouped_output": 3, "sparse_attention": 3,
    "compress": 3, "index_topk": 1,
}  # fmt: skip
#: Norms that are not part of a hyper-connection: q_a, q_b and kv in every layer, one a compressor, the last one.
NORMS = 3 * 3 + 3 + 1
#: kv in every layer, the compressed rows, the indexer's query; those of q and the output are in the attention.
ROPES = 3 + 3 + 1
#: Windows; open group (kv, gate) and pool of three compressors; overlap (kv, gate) of the two at ratio 4.
STORES = 3 + 3 * 3 + 2 * 2

SETTINGS = {
    "prompt": ("plain", 22, 2, {}),
    "prompt of symbolic length": ("plain", 22, 1, {"dynamic": None, "mark": True}),
    "everything symbolic": ("plain", 22, 2, {"dynamic": True}),
    "prefill into a cache": ("prefill", 22, 1, {}),
    "decoding": ("decode", 1, 2, {}),
    "decoding a batch of one": ("decode", 1, 1, {}),
    "bfloat16": ("prefill", 22, 2, {"dtype": torch.bfloat16}),
    "autocast": ("plain", 22, 2, {"autocast": True, "mlp_layer_types": ["hash_moe"] * 3, "index_topk": 64}),
}
ROUNDED = ("bfloat16", "autocast")
SLOW = ("everything symbolic", "decoding a batch of one")


def settings() -> list:
    return [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in SETTINGS]


@pytest.mark.parametrize("setting", settings())
def test_every_part_is_recognised(rewritten, setting: str) -> None:
    """R21: the counts are those of the model's structure whatever the dtype, the batch and the shapes are."""
    mode, tokens, batch, more = SETTINGS[setting]
    found = rewritten(mode, tokens, batch, **more)
    stores = {} if mode == "plain" else {"store_rows": STORES}
    assert found.misses == []
    assert {**EACH, **stores, "rms_norm": NORMS, "rope": ROPES} == found.counts
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
    assert found.counts == {
        "hc_pre": 10, "hc_post": 10, "hc_head": 1, "router": 5, "experts": 5, "grouped_output": 5,
        "sparse_attention": 5, "compress": 6, "index_topk": 2, "rms_norm": 3 * 5 + 6 + 1, "rope": 5 + 6 + 2,
        "store_rows": 5 + 3 * 6 + 2 * 4,
    }  # fmt: skip
    for region in regions:
        inputs = [n.meta["val"] for n in region.gm.graph.find_nodes(op="placeholder")]
        assert not [v for v in inputs if v.dim() == 4 and tuple(v.shape[-2:]) == (1, 8)]  # the window mask [1, 1, 1, 8]
