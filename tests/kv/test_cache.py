"""Rows of a paged cache: where they are, what they cost, what is never written."""

from collections.abc import Callable

import pytest
import torch

from dscompile.formats import FORMATS
from dscompile.kv.cache import PagedCache
from dscompile.kv.deepseek_v41 import cache_layout, model_fingerprint, paged_cache
from dscompile.kv.layout import CacheLayout, PoolSpec
from dscompile.kv.pages import OutOfPages
from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from support.paged import fill, row_of, tiny_layout


@pytest.mark.parametrize("length", [1 << 10, 8 << 10, 128 << 10, 1 << 20])
def test_bytes_of_the_release(length: int) -> None:
    """890 bytes a token and the window, from the formats: compressed rows and index keys of one layer of ratio 1 and
    three of ratio 2, and 128 window rows in 40 layers."""
    config = DeepseekV41Config()
    row, key = FORMATS["fp4_g16_e4m3"].row_bytes(512), FORMATS["fp4_g32_ue8m0"].row_bytes(128)
    bytes_ = cache_layout(config).bytes_for(length)
    assert bytes_.growing == (row + key) * (length + 3 * (length // 2)) == 890 * length
    assert bytes_.window == 40 * 128 * FORMATS["fp8_g32_ue8m0"].row_bytes(512) == 2_703_360
    assert bytes_.total == bytes_.growing + bytes_.window + 3 * 8, "and the last three token ids"
    assert cache_layout(config).bytes_for(length + 1).parts["open_groups"] == 3 * 2 * 512 * 4
    whole = -(-length // 64) * 64
    assert bytes_.pages - 890 * whole - bytes_.window == 3 * (1 + 8) * 2 * 512 * 4 + (3 + 8) * 8


def test_report_of_the_release() -> None:
    lines = cache_layout(DeepseekV41Config()).report().splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["1024", "911360", "2703360"],
        ["8192", "7290880", "2703360"],
        ["131072", "116654080", "2703360"],
        ["1048576", "933232640", "2703360"],
    ]


def test_pools_have_the_shapes_of_their_formats(model: DeepseekV41ForCausalLM) -> None:
    cache = paged_cache(model.config, requests=3, tokens=40, page_tokens=8)
    assert cache.pools["window.0"].shape == (3 * 16 + 1, FORMATS["fp8_g32_ue8m0"].row_bytes(64))
    assert cache.pools["compressed.1"].shape == (5 * 4 + 1, FORMATS["fp4_g16_e4m3"].row_bytes(64))
    assert cache.pools["index_keys.4"].shape == (5 * 8 + 1, FORMATS["fp4_g32_ue8m0"].row_bytes(32))
    assert cache.pools["open_groups.3"].dtype == torch.float32 and cache.pools["tokens.0"].dtype == torch.int64
    total = sum(pool[:-1].numel() * pool.element_size() for pool in cache.pools.values())
    assert total == 3 * cache.layout.state_page_bytes + 5 * cache.layout.token_page_bytes


def test_requests_keep_their_rows_apart() -> None:
    cache = PagedCache(tiny_layout(), requests=3, token_pages=12)
    tokens = {cache.open(9): list(range(9)), cache.open(14): list(range(50, 64)), cache.open(1): [7]}
    for number, ids in tokens.items():
        fill(cache, number, ids)
    for number, ids in tokens.items():
        for spec in cache.layout.pools:
            held = spec.held(len(ids))
            ends = [(place + 1) * (spec.ratio if spec.kind == "rows" else 1) for place in held]
            want = [row_of(spec, ids[:end]) for end in ends]
            got = cache.state_bytes(number)[spec.name]
            assert got.equal(torch.stack(want) if want else got.new_empty(0, spec.row_bytes))


def test_a_new_request_does_not_see_what_the_last_one_left() -> None:
    cache = PagedCache(tiny_layout(), requests=1, token_pages=2)
    number = cache.open(8)
    for pool in cache.pools.values():
        pool.fill_(float("nan") if pool.is_floating_point() else 119)
    cache.close(number)
    cache.open(8)
    for spec in cache.layout.pools:
        assert (cache.pools[spec.name][:-1] == spec.blank).all(), spec.name


def test_batch_tensors() -> None:
    cache = PagedCache(tiny_layout(), requests=3, token_pages=12)
    a, b = cache.open(9), cache.open(2)
    batch = cache.batch([b, None, a], columns=4)
    first, second = cache.request(a), cache.request(b)
    assert batch.table.tolist() == [[*second.pages, -1, -1, -1], [-1] * 4, [*first.pages, -1]]
    assert batch.state_page.tolist() == [second.state_page, -1, first.state_page]
    with pytest.raises(ValueError, match="3 token pages, allowed: 2 columns"):
        cache.batch([a], columns=2)
    cache.extend([a], [13])
    assert len(cache.request(a).pages) == 4 and cache.batch([a], 4).table.tolist() == [cache.request(a).pages]
    cache.commit(a, 5)
    cache.shrink(a)
    assert cache.batch([a], 4).table[0, 2:].tolist() == [-1, -1]


def test_nothing_is_left_of_a_thousand_requests() -> None:
    """Neither pages nor what the cache notes about requests."""
    cache, live = PagedCache(tiny_layout(), requests=5, token_pages=30), []
    for turn in range(1000):
        if len(live) == 5:
            cache.close(live.pop(turn % 5))
        number = cache.open(1 + turn % 11 + turn % 3, [turn % 3] * (1 + turn % 11))
        cache.extend([number], [1 + turn % 19])
        cache.commit(number, cache.room(number))
        if turn % 2:
            cache.publish(number, [turn % 3] * (1 + turn % 11))
        else:
            cache.commit(number, max(1, cache.request(number).shared))
            cache.shrink(number)
        live.append(number)
    for number in live:
        cache.close(number)
    assert cache.pages.used_bytes == 0 and not cache.pages.requests and not cache._tables and not cache._published


def test_extending_several_is_all_or_nothing() -> None:
    cache = PagedCache(tiny_layout(), requests=2, token_pages=4)
    a, b = cache.open(4), cache.open(4)
    with pytest.raises(OutOfPages):
        cache.extend([a, b], [8, 12])
    assert len(cache.request(a).pages) == len(cache.request(b).pages) == 1
    cache.extend([a, b], [8, 8])


def test_refusals(prompt: Callable[..., list[int]]) -> None:
    cache = PagedCache(tiny_layout(), requests=2, token_pages=4)
    number = cache.open(8)
    with pytest.raises(ValueError, match="length 9, allowed: 0 to 8"):
        cache.commit(number, 9)
    fill(cache, number, prompt(8))
    cache.publish(number, prompt(8))
    with pytest.raises(ValueError, match="length 7, allowed: 8 to 8"):
        cache.commit(number, 7)
    with pytest.raises(ValueError, match="page_tokens: 3, allowed: a multiple of 2"):
        cache_layout(DeepseekV41Config(), page_tokens=3)
    with pytest.raises(ValueError, match="flashmla_v41.*allowed: formats whose rows follow"):
        PoolSpec("window", 0, "ring", "flashmla_v41", 512, 128, width=128)
    with pytest.raises(ValueError, match=r"compressed.0: 3 rows of 2 tokens, allowed: 4"):
        CacheLayout((PoolSpec("compressed", 0, "rows", "fp4_g16_e4m3", 32, 3, 2),), 4, "m", 1)


def test_fingerprints_tell_models_apart() -> None:
    config = DeepseekV41Config.miniature()
    assert model_fingerprint(config) == model_fingerprint(DeepseekV41Config.miniature())
    assert model_fingerprint(config) != model_fingerprint(config.with_changes(index_topk=4))
    assert model_fingerprint(config) != model_fingerprint(config, "another training")
    small, large = cache_layout(config, 8), cache_layout(config, 32)
    assert small.fingerprint == large.fingerprint, "page sizes are each cache's own"
