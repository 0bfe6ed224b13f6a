"""The static cache's layers against transformers' growing ones, fed with the same random tokens in the same pieces."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from dscompile.integrations.transformers import StaticV4Cache
from dscompile.integrations.v4_cache import ROWS_MASKED, StaticCSALayer, StaticHCALayer
from support.v4 import tiny_config

MASKED = {"kwargs": {ROWS_MASKED: True}}
DIM = 5

splits = st.lists(st.integers(1, 19), min_size=1, max_size=9)


def layers(kind, batch=2, max_tokens=64, window=8, ratio=4):
    """(ours, transformers') for one layer, which is also the first: it moves the counters."""
    config = tiny_config(
        num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], sliding_window=window, head_dim=DIM,
        compress_rates=dict.fromkeys(("heavily_compressed_attention", "compressed_sparse_attention"), ratio),
        index_head_dim=DIM,
    )  # fmt: skip
    cache = StaticV4Cache(config, batch, max_tokens, torch.float32)
    theirs = DeepseekV4CSACache if kind.startswith("compressed") else DeepseekV4HCACache
    return cache.layers[0], theirs(config)


def pieces(split, batch, features):
    return [torch.randn(batch, tokens, features) for tokens in split]


@given(split=splits, window=st.integers(1, 9), batch=st.integers(1, 3))
def test_window_rows_are_those_of_the_growing_layer(split, window, batch):
    ours, theirs = layers("heavily_compressed_attention", batch, sum(split), window)
    seen = 0
    for rows in pieces(split, batch, DIM):
        rows = rows.unsqueeze(1)
        tokens = rows.shape[2]
        length, offset = ours.get_mask_sizes(tokens)
        got, want = ours.update(rows, rows, **MASKED)[0], theirs.update(rows.clone(), rows)[0]
        assert got.shape == (batch, 1, length, DIM) and length == window - 1 + tokens
        seen += tokens
        held = seen - int(offset)  # rows that hold a token; the others lie in the future and are masked by position
        assert int(offset) == max(seen - tokens - (window - 1), 0)
        assert torch.equal(got[:, :, :held], want[:, :, -held:])
        assert torch.isfinite(got).all()
        assert int(ours.get_seq_length()) == theirs.get_seq_length() == seen


@given(split=splits, ratio=st.integers(1, 9), batch=st.integers(1, 2))
def test_groups_close_as_in_the_growing_layer(split, ratio, batch):
    ours, theirs = layers("heavily_compressed_attention", batch, sum(split), 8, ratio)
    seen = 0
    for rows in pieces(split, batch, 2 * DIM):
        kv, gate = rows.chunk(2, dim=-1)
        ours.update(kv.unsqueeze(1), kv.unsqueeze(1), **MASKED)
        got = ours.store_compression_weights("compressor", kv, gate)
        want = theirs.store_compression_weights("compressor", kv, gate)
        assert int(got[2]) == want[2]
        closed = want[0].shape[1]
        assert got[0].shape[1] == -(-kv.shape[1] // ratio) * ratio >= closed
        assert torch.equal(got[0][:, :closed], want[0]) and torch.equal(got[1][:, :closed], want[1])
        emitted = got[0].unflatten(1, (-1, ratio)).sum(2)  # stands for the model's compressor; open groups included
        pool = ours.update_compressor_states("compressor", emitted)
        grown = theirs.update_compressor_states("compressor", emitted[:, : closed // ratio])
        seen += kv.shape[1]
        assert pool.shape[1] == ours.capacity == -(-ours.max_tokens // ratio)
        assert torch.equal(pool[:, : seen // ratio], grown)
        assert torch.isfinite(pool).all()


@given(split=splits, ratio=st.integers(1, 6))
def test_overlap_is_the_group_before(split, ratio):
    ours, theirs = layers("compressed_sparse_attention", 2, sum(split), 8, ratio)
    names = ("compressor", "indexer")
    for rows in pieces(split, 2, 4 * DIM):
        kv, gate = rows.chunk(2, dim=-1)
        ours.update(kv.unsqueeze(1)[..., :DIM], kv.unsqueeze(1)[..., :DIM])
        for name in names:
            got_kv, got_gate, _ = ours.store_compression_weights(name, kv, gate)
            want_kv, want_gate, _ = theirs.store_compression_weights(name, kv, gate)
            got = ours.update_overlap_state(
                name, got_kv.unflatten(1, (-1, ratio)), got_gate.unflatten(1, (-1, ratio)), DIM
            )
            if want_kv.shape[1] == 0:
                continue  # the model does not ask: no group closed, so what ours returned is not used
            want = theirs.update_overlap_state(
                name, want_kv.unflatten(1, (-1, ratio)), want_gate.unflatten(1, (-1, ratio)), DIM
            )
            if want[0] is None:  # before the first group: nothing, with a gate that gives it weight 0
                assert not got[0].any() and torch.isneginf(got[1]).all()
            else:
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("kind", ["heavily_compressed_attention", "compressed_sparse_attention"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_past_the_end_is_an_error_not_another_sequences_row(kind, batch):
    layer, _ = layers(kind, batch, max_tokens=8, ratio=4)
    layer.start.fill_(8)
    before = layer.pool["compressor"].clone()
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        layer.update_compressor_states("compressor", torch.ones(batch, 1, DIM))
    assert torch.equal(layer.pool["compressor"], before)


def test_reset_restores_every_tensor():
    layer, _ = layers("compressed_sparse_attention")
    fresh = [t.clone() for t in layer.state()]
    pointers = [t.data_ptr() for t in layer.state()]
    for tensor in layer.state():
        tensor.fill_(3.0)
    layer.length.fill_(9)
    layer.reset()
    assert int(layer.get_seq_length()) == 0
    assert [t.data_ptr() for t in layer.state()] == pointers
    assert all(torch.equal(a, b) for a, b in zip(fresh, layer.state(), strict=True))


def test_reorder_moves_whole_sequences():
    layer, _ = layers("compressed_sparse_attention", batch=3)
    for tensor in layer.state():
        tensor.copy_(torch.randn_like(tensor))
    before = [t.clone().view(3, -1) for t in layer.state()]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    for old, new in zip(before, layer.state(), strict=True):
        assert torch.equal(new.view(3, -1), old[[2, 0, 0]])


def test_what_a_fixed_cache_cannot_do_is_refused():
    layer, _ = layers("heavily_compressed_attention")
    with pytest.raises(NotImplementedError, match="cannot remove 3 tokens"):
        layer.crop(-3)
    with pytest.raises(NotImplementedError, match="fixed batch of 2"):
        layer.batch_repeat_interleave(2)
    with pytest.raises(NotImplementedError, match="fixed batch of 2"):
        layer.batch_select_indices(torch.tensor([0]))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 1, 2, DIM), torch.float32, "batch 2, 1 head of 5; got batch 3"),
        ((2, 1, 2, 7), torch.float32, "1 heads of 7"),
        ((2, 1, 2, DIM), torch.bfloat16, "built for torch.float32; the model gives torch.bfloat16"),
    ],
)
def test_unlike_rows_are_refused_before_anything_changes(shape, dtype, message):
    layer, _ = layers("heavily_compressed_attention")
    rows = torch.ones(shape, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        layer.update(rows, rows, **MASKED)
    assert int(layer.get_seq_length()) == 0 and not layer.window_rows.any()


def test_cache_arguments_and_size():
    config = tiny_config()
    with pytest.raises(ValueError, match="max_tokens: 0, allowed: an int >= 1"):
        StaticV4Cache(config, 1, 0, torch.float32)
    with pytest.raises(ValueError, match="deepseek_v4"):
        StaticV4Cache(type("C", (), {"model_type": "llama"})(), 1, 8, torch.float32)
    cache = StaticV4Cache(config, 2, 41, torch.bfloat16)
    assert [type(layer) for layer in cache.layers[1:]] == [StaticCSALayer, StaticHCALayer]
    window = 3 * 2 * 8 * 32 * 2
    csa = 2 * 2 * 4 * 2 * (32 + 16) * 2 + 2 * 11 * (32 + 16) * 2 + 2 * 2 * 4 * (32 + 16) * (2 + 4)
    hca = 2 * 2 * 8 * 32 * 2 + 2 * 6 * 32 * 2
    assert cache.nbytes == window + csa + hca + 2 * 8
    assert cache.batch_size == 2 and cache.get_max_length() == 41 and not cache.is_compileable
