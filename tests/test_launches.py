"""How many kernels a decoding step starts, layer by layer."""

import pytest
import torch

import dscompile
from dscompile.launches import layer_launches
from dscompile.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM


@pytest.fixture(scope="module")
def launches() -> dict[str, list[str]]:
    """Of the miniature, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = DeepseekV41ForCausalLM(DeepseekV41Config.miniature(), dtype=torch.bfloat16).eval()
        dscompile.mark_regions(model)
        ids = torch.zeros(2, 1, dtype=torch.int64)
        return layer_launches("sm_103a", model, ids, ids.clone(), model.new_cache(2, 64))


def test_a_reuse_layer(launches: dict[str, list[str]]) -> None:
    """Layers 5 and 7 own nothing but their window. The list is the one of docs/kernels.md; fewer would be better."""
    for layer in ("layers.5", "layers.7"):
        kernels = launches[layer]
        assert kernels.count("sparse_attention_kernel") == 1 and kernels.count("make_rows_kernel") == 1
        assert kernels.count("expert_up_kernel") == kernels.count("expert_down_kernel") == 1
        assert kernels.count("hc_post_kernel") == 2 and kernels.count("matrix product") == 6
        assert not [kernel for kernel in kernels if kernel.startswith(("index", "compress"))]
        assert len(kernels) <= 28


def test_layers_with_an_index_start_more(launches: dict[str, list[str]]) -> None:
    assert "index_scores_kernel" in launches["layers.6"]
    assert len(launches["layers.6"]) > len(launches["layers.7"])
    full = launches["layers.4"]
    assert full.count("make_rows_kernel") == 3 and "index_candidates_kernel" in full
