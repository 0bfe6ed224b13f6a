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
        config = DeepseekV41Config.miniature(hc_sinkhorn_iters=2)  # one kernel, whatever their number
        model = DeepseekV41ForCausalLM(config, dtype=torch.bfloat16).eval()
        dscompile.mark_regions(model)
        ids = torch.zeros(2, 1, dtype=torch.int64)
        return layer_launches("sm_103a", model, ids, ids.clone(), model.new_cache(2, 64))


def test_a_reuse_layer(launches: dict[str, list[str]]) -> None:
    """Layers 5 and 7 own nothing but their window. The list is the one of docs/kernels.md."""
    for layer in ("layers.5", "layers.7"):
        assert launches[layer] == [
            "hc_one_kernel", "linears_kernel", "norm_linear_kernel", "make_rows_kernel", "sparse_attention_kernel",
            "grouped_linear_kernel", "grouped_linear_kernel", "hc_one_kernel", "router_one_kernel", "sort_few_kernel",
            "moe_up_kernel", "moe_down_kernel", "moe_sum_kernel",
        ]  # fmt: skip


def test_layers_with_an_index_start_more(launches: dict[str, list[str]]) -> None:
    assert "index_scores_kernel" in launches["layers.6"] and "index_scores_kernel" not in launches["layers.7"]
    assert len(launches["layers.6"]) > len(launches["layers.7"])
    full = launches["layers.4"]
    assert full.count("make_rows_kernel") == 3 and "index_candidates_kernel" in full
