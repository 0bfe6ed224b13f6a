"""The code that Inductor generates writes to the caches themselves: nothing of a pool's size is ever allocated."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM

CONFIG = DeepseekV41Config.miniature(
    num_hidden_layers=3,
    compress_ratios=(0, 2, 2),
    kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,),
    candidate_source_layer_id=None,
    hc_sinkhorn_iters=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, False])
def test_no_copy_of_a_pool_in_the_generated_code(regions: bool) -> None:
    """With three layers every kind occurs once and torch inlines it; with twice as many reuse layers it does not."""
    config = CONFIG if not regions else CONFIG.with_changes(num_hidden_layers=4, compress_ratios=(0, 2, 2, 2))
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = DeepseekV41ForCausalLM(config, dtype=torch.bfloat16).eval()
    caches = [model.new_cache(1, 50) for _ in range(2)]
    ids = torch.randint(0, config.vocab_size, (1, 7))
    positions = torch.arange(7)[None]
    with torch.no_grad():
        expected = model(ids, positions, caches[0])
        compiled = torch.compile(model, backend="dsv4", fullgraph=True)
        out, codes = run_and_get_code(compiled, ids, positions, caches[1])
    assert torch.cosine_similarity(out.flatten(), expected.flatten(), 0) > 0.99
    for name in ("window", "compressed", "index_keys"):
        for layer, pool in getattr(caches[0], name).items():
            same = (pool[:-1] == getattr(caches[1], name)[layer][:-1]).float().mean()
            assert same > 0.9, f"{name} of layer {layer}: bf16 sums differ in their last bits, codes in a few places"
    source = "\n".join(codes)
    assert "norm_rope_store" in source
    pools = [pool for name in ("window", "compressed", "index_keys") for pool in getattr(caches[0], name).values()]
    for rows, width in {tuple(pool.shape) for pool in pools}:
        allocated = re.findall(rf"empty_strided\w*\(\({rows}, {width}\),", source)
        assert not allocated, f"a buffer of {rows} x {width} is allocated"
