"""Which calls a step of transformers' V4 makes."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from dscompile.miniatures import v4_config
from dscompile.tuning.calls import merged
from dscompile.workload_models import ModelError, read_config, step_calls
from dscompile.workload_v4 import empty_model, representative_v4, v4_calls, v4_flash_config, with_layers

WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def per_op(calls: list) -> Counter[str]:
    found = Counter[str]()
    for call in calls:
        found[call.op] += call.count
    return found


def test_the_release_has_the_published_numbers() -> None:
    config = v4_flash_config()
    assert Counter(config.layer_types) == {WINDOW: 2, CSA: 21, HCA: 20}
    assert config.layer_types[:4] == [WINDOW, WINDOW, CSA, HCA] and config.layer_types[-1] == CSA
    assert Counter(config.mlp_layer_types) == {"hash_moe": 3, "moe": 40}
    assert (config.hidden_size, config.n_routed_experts, config.moe_intermediate_size) == (4096, 256, 2048)
    assert config.compress_rates == {CSA: 4, HCA: 128} and config.index_n_heads == 64
    assert config.rope_parameters["compress"]["factor"] == 16.0
    small, counts = representative_v4(config)
    assert small.layer_types == [WINDOW, CSA, HCA, CSA] and small.mlp_layer_types == ["hash_moe"] * 2 + ["moe"] * 2
    assert counts == {0: 2, 1: 1, 2: 20, 3: 20, -1: 1}
    assert config.num_hidden_layers == 43  # it was copied


def test_stored_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="weights 'stored' of a DeepSeek-V4, allowed: 'plain'"):
        step_calls(v4_config(), "sm_103a", "decode", 64, 1, 2, stored=True)


def test_weights_have_the_dtypes_of_a_loaded_model() -> None:
    """Of `from_pretrained(..., dtype=bfloat16)`: the names that the model lists stay fp32, the rest is bf16."""
    model = empty_model(v4_config(), torch.bfloat16)
    strict = set(model._keep_in_fp32_modules_strict)
    for name, parameter in model.named_parameters():
        kept = bool(strict & set(name.split(".")))
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name


def test_a_decoding_step() -> None:
    """One layer of every kind, counted as often as the model has it; all sizes are those of the static cache."""
    config = v4_config(
        num_hidden_layers=5, layer_types=[WINDOW, CSA, HCA, CSA, HCA], mlp_layer_types=["hash_moe"] + ["moe"] * 4,
        hc_sinkhorn_iters=1,
    )  # fmt: skip
    calls = v4_calls(config, "sm_103a", "decode", batch=2, context=64)
    found = per_op(calls)
    assert found["sparse_attention"] == found["moe"] == found["router"] == found["grouped_output"] == 5
    assert found["hc_pre"] == found["hc_post_pre"] == 5 and found["hc_head"] == 1
    assert found["index_topk"] == 2 and found["compress"] == 2 * 2 + 2
    rows = {call.args[5].shape: call.count for call in calls if call.op == "sparse_attention" and call.args[5]}
    assert rows == {(2, 16, 32): 2, (2, 8, 32): 2}  # 64 / 4 and 64 / 8 compressed rows
    (scored,) = [call for call in calls if call.op == "index_topk"]
    assert scored.args[0].shape == (2, 1, 32, 16) and scored.args[0].dtype == torch.bfloat16


def test_sizes_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="batch: 0, allowed: >= 1"):
        v4_calls(v4_config(), "sm_103a", "decode", batch=0, context=32)
    with pytest.raises(ValueError, match="tokens: 64, allowed: <= context 32"):
        v4_calls(v4_config(), "sm_103a", "prefill", batch=1, context=32, tokens=64)


def test_a_configuration_is_read_from_its_file(tmp_path: Path) -> None:
    """By its model_type, from a folder or the file; what transformers does not accept is named."""
    path = tmp_path / "config.json"
    ratios = [0, 0, 4, 128, 4, 0]  # with the draft layer behind the others, as the release has it
    path.write_text(json.dumps({"model_type": "deepseek_v4", "num_hidden_layers": 5, "compress_ratios": ratios}))
    for given in (path, tmp_path):
        config = read_config(str(given))
        assert config.layer_types == [WINDOW, WINDOW, CSA, HCA, CSA]
    path.write_text(json.dumps({"model_type": "deepseek_v4", "num_hidden_layers": 5, "layer_types": ["other"]}))
    with pytest.raises(ModelError, match=r"config\.json is no configuration of DeepSeek-V4"):
        read_config(str(path))
    path.write_text("{")
    with pytest.raises(ModelError, match="is no JSON"):
        read_config(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_counts_are_those_of_the_whole_model(role: str) -> None:
    """The same calls, with the same counts, as a capture of every layer of its own."""
    kinds = [WINDOW, WINDOW, CSA, HCA, CSA, HCA, CSA]
    config = v4_config(
        num_hidden_layers=7, layer_types=kinds, mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 4, hc_sinkhorn_iters=1
    )
    small, _ = representative_v4(config)
    assert small.num_hidden_layers == 4
    calls = v4_calls(config, "sm_103a", role, batch=2, context=64, tokens=24)
    whole = []
    for layer in range(7):  # alone, so that nothing stands for anything else
        whole += v4_calls(with_layers(config, [layer]), "sm_103a", role, batch=2, context=64, tokens=24)
    outside = {"hc_head", "rms_norm"}  # once in every model, so the single layers have it too often
    want = {str(c): c.count for c in merged(whole) if c.op not in outside}
    assert {str(c): c.count for c in calls if c.op not in outside} == want
    assert per_op(calls)["hc_head"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("role", "batch", "tokens"), [("decode", 8, 1), ("prefill", 1, 4096)])
def test_the_release(role: str, batch: int, tokens: int) -> None:
    """Every layer of V4-Flash is recognised whole, at its real sizes."""
    found = per_op(v4_calls(v4_flash_config(), "sm_103a", role, batch, 8192, tokens))
    assert found["sparse_attention"] == found["moe"] == found["router"] == found["grouped_output"] == 43
    assert found["hc_pre"] == found["hc_post_pre"] == 43 and found["index_topk"] == 21 and found["hc_head"] == 1
