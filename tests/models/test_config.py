"""Both config files of the release, and what makes a configuration invalid."""

import json
from pathlib import Path
from typing import Any

import pytest

from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.models.deepseek_v41.config_names import FLAT_NAMES, NESTED_NAMES, REQUIRED, ROPE_SCALING_NAMES

RELEASED = DeepseekV41Config()


def nested(config: DeepseekV41Config) -> dict[str, Any]:
    text = {key: getattr(config, name) for key, name in NESTED_NAMES.items()}
    scaling = {key: getattr(config, name) for key, name in ROPE_SCALING_NAMES.items() if key != "type"}
    outer = {key: text.pop(key) for key in ("image_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")}
    values = {"architectures": ["DeepseekV41ForCausalLM"], **outer, "text_config": {**text, "rope_scaling": scaling}}
    return json.loads(json.dumps(values))


def flat(config: DeepseekV41Config) -> dict[str, Any]:
    return json.loads(json.dumps({key: getattr(config, name) for key, name in FLAT_NAMES.items()}))


@pytest.mark.parametrize("config", [RELEASED, DeepseekV41Config.miniature(engram_layer_ids=(1, 3))])
@pytest.mark.parametrize("form", [nested, flat])
def test_both_forms_give_the_same_config(config: DeepseekV41Config, form: Any) -> None:
    assert DeepseekV41Config.from_dict(form(config)) == config


def test_released_layer_kinds() -> None:
    kinds = [RELEASED.kind(layer) for layer in range(40)]
    assert [layer for layer in range(40) if kinds[layer] == "full"] == [2, 8, 14, 20]
    assert [layer for layer in range(40) if kinds[layer] == "reindex"] == [24, 28, 32, 36]
    assert kinds[:2] == ["window", "window"] and kinds.count("reuse") == 30
    assert [RELEASED.kv_source(layer) for layer in (2, 7, 8, 19, 39)] == [2, 2, 8, 14, 20]
    assert [RELEASED.index_source(layer) for layer in (19, 23, 24, 39)] == [14, 20, 24, 36]
    assert [layer for layer in range(40) if RELEASED.uses_candidates(layer)] == [24, 28, 32, 36]


def test_conformance_config_is_the_miniature(conformance_dir: Path) -> None:
    config = DeepseekV41Config.from_file(conformance_dir)
    mine = DeepseekV41Config.miniature()
    for name in (*REQUIRED, "candidate_source_layer_id", "rope_scaling_factor", "hc_mult", "swiglu_limit"):
        assert getattr(config, name) == getattr(mine, name), name


def test_plain_hugging_face_text_config_and_missing_rope_scaling() -> None:
    values = nested(RELEASED)["text_config"]
    assert DeepseekV41Config.from_dict(values).hidden_size == 5120
    del values["rope_scaling"]
    assert DeepseekV41Config.from_dict(values).rope_scaling_type == "none"


def test_missing_keys_are_named_in_the_files_own_words() -> None:
    values = flat(RELEASED)
    del values["dim"], values["window_size"]
    with pytest.raises(ValueError, match=r"missing keys \['dim', 'window_size'\]"):
        DeepseekV41Config.from_dict(values)


def test_file_lookup(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="inference/config.json"):
        DeepseekV41Config.from_file(tmp_path)
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(flat(RELEASED)))
    assert DeepseekV41Config.from_file(tmp_path) == RELEASED
    (tmp_path / "config.json").write_text(json.dumps(nested(DeepseekV41Config.miniature())))
    assert DeepseekV41Config.from_file(tmp_path).hidden_size == 128


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kv_source_layer_ids": (0, 3, 4), "index_source_layer_ids": (0, 3, 4, 6)}, "kv_source_layer_ids: 0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit: -1.0"),
        ({"kv_source_layer_ids": (1, 2, 3, 4)}, "kv_source_layer_ids"),  # 2 is no index source
        ({"index_source_layer_ids": (0, 1, 3, 4, 6)}, "index_source_layer_ids: 0"),
        ({"compress_ratios": (0, 2, 1, 2, 1, 1, 1, 1)}, r"compress_ratios\[2\]: 1"),
        ({"compress_ratios": (2, 2, 2, 2, 1, 1, 1, 1)}, "kv_source_layer_ids"),  # layer 0 has no source
        ({"compress_ratios": (0, 2, 2)}, "compress_ratios"),
        ({"index_source_layer_ids": (3, 1, 4, 6)}, "index_source_layer_ids"),
        ({"kv_source_layer_ids": (1, 3, 9)}, "kv_source_layer_ids"),
        ({"candidate_source_layer_id": 5}, "candidate_source_layer_id: 5"),
        ({"candidate_source_layer_id": 1}, "candidate_source_layer_id: 1"),  # layers 3 and 4 read other rows
        ({"head_dim": 48}, "head_dim: 48"),
        ({"index_head_dim": 16}, "index_head_dim: 16"),
        ({"qk_rope_head_dim": 31}, "qk_rope_head_dim"),
        ({"o_groups": 3}, "o_groups: 3"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok: 17"),
        ({"hidden_size": 0}, "hidden_size: 0"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ({"rope_scaling_type": "linear"}, "rope_scaling_type"),
        ({"engram_layer_ids": (9,)}, "engram_layer_ids"),
        ({"engram_layer_ids": (1,), "engram_num_embeddings": (5,)}, r"engram_num_embeddings: \(5,\)"),
    ],
)
def test_invalid(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key) as error:
        DeepseekV41Config.miniature(**changes)
    assert "allowed" in str(error.value)
