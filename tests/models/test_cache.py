"""Cache sizes: 890 bytes a token for the release, packed rows, scratch apart."""

import pytest
import torch

from dscompile.models.deepseek_v41 import DeepseekV41Cache, DeepseekV41Config


def test_released_bytes() -> None:
    report = DeepseekV41Cache.empty(DeepseekV41Config(), 1, 7).byte_report()
    parts = {part.name: part for part in report.parts}
    assert report.global_bytes_per_token == 890
    assert parts["compressed KV"].bytes_per_token == 720 and parts["compressed KV"].row_bytes == 288
    assert parts["index keys"].bytes_per_token == 170 and parts["index keys"].row_bytes == 68
    assert parts["window"].row_bytes == 528 and parts["window"].bytes_per_sequence == 40 * 128 * 528
    assert parts["window"].bytes_per_token == 0
    assert parts["open groups"].bytes_per_sequence == 3 * 2 * 512 * 4
    assert "890 bytes per token" in str(report)


def test_report_counts_every_byte() -> None:
    config = DeepseekV41Config.miniature(engram_layer_ids=(1,))
    cache = DeepseekV41Cache.empty(config, 3, 11)
    pools = [pool for part in cache[:4] for pool in part.values()]
    assert cache.tokens is not None
    held = sum(pool.numel() * pool.element_size() for pool in [*pools, cache.tokens])
    report = cache.byte_report()
    assert report.total_bytes == held
    scratch = sum(pool.shape[1] * pool.element_size() for pool in [*pools, cache.tokens])
    assert sum(part.scratch_bytes for part in report.parts) == scratch
    assert cache.compressed[1].shape == (3 * 5 + 1, 36) and cache.compressed[4].shape == (3 * 11 + 1, 36)
    assert cache.window[0].dtype == cache.compressed[1].dtype == cache.index_keys[4].dtype == torch.uint8
    assert set(cache.open_groups) == {1, 3}


@pytest.mark.parametrize(
    ("batch", "tokens", "key"),
    [
        (0, 5, "batch_size: 0"),
        (1, 0, "max_tokens: 0"),
        (1, "a", "max_tokens: 'a'"),
        (2.5, 4, "batch_size: 2.5"),
        (1, 5000, "max_position_embeddings"),
    ],
)
def test_sizes_that_make_no_sense(batch: int, tokens: int, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        DeepseekV41Cache.empty(DeepseekV41Config.miniature(), batch, tokens)
