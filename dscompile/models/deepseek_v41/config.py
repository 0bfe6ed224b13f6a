"""`DeepseekV41Config`: the model's configuration, read from either form of the release's config file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dscompile.models.deepseek_v41.config_names import FLAT_NAMES, NESTED_NAMES, REQUIRED, ROPE_SCALING_NAMES
from dscompile.models.deepseek_v41.config_rules import check_config
from dscompile.models.deepseek_v41.engram_hash import engram_primes

LayerKind = Literal["window", "full", "reindex", "reuse"]

CONFIG_FILES = ("config.json", "inference/config.json", "inference_config.json")

# Sizes of `DeepseekV41Config.miniature`.
_MINIATURE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_groups": 4,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "rope_scaling_original_max_position_embeddings": 64,
    "compress_ratios": (0, 2, 2, 2, 1, 1, 1, 1),
    "kv_source_layer_ids": (1, 3, 4),
    "index_source_layer_ids": (1, 3, 4, 6),
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "engram_layer_ids": (),
    "engram_num_embeddings": (),
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 97,
    "engram_compressed_vocab_size": 60,
    "image_token_id": None,
}


@dataclass(frozen=True)
class DeepseekV41Config:
    """Sizes and constants of a DeepSeek-V4.1 text model. The defaults are the released DeepSeek-V4.1-Flash.

    Field names are those of `text_config` in the Hugging Face config.json; `rope_scaling` is spread over the
    `rope_scaling_*` fields. `compress_ratios` may be longer than the model (the rest belongs to the draft layers).
    Raises `ValueError` naming the key, its value and what is allowed.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    # Mixture of experts
    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    gate_temp: float = 1.0
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    # Norms and positions
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling_type: str = "yarn"
    rope_scaling_factor: float = 16.0
    rope_scaling_beta_fast: float = 32.0
    rope_scaling_beta_slow: float = 1.0
    rope_scaling_original_max_position_embeddings: int = 65536
    # Compressed attention: which layers own rows, which own an index, which publish candidates
    compress_ratios: tuple[int, ...] = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int | None = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    # What a decode step scores while a group is open: as the release's code does (True), or the layer's own keys, which
    # makes a decode step equal to the same token in a prefill.
    release_decode_keys: bool = True
    # Hyper-connections
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    # Engram
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_compressed_vocab_size: int = 99092
    engram_pad_token_id: int = 2
    # The rest
    image_token_id: int | None = 129264
    bos_token_id: int | None = 0
    eos_token_id: int | None = 1
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        check_config(self)

    # What follows from the fields

    @property
    def num_engram_rows(self) -> int:
        """Rows that an Engram layer looks up per token."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def activation_limit(self) -> float:
        """What the experts' activation is clamped at; infinite for a `swiglu_limit` of 0."""
        return self.swiglu_limit if self.swiglu_limit > 0 else math.inf

    def ratio(self, layer: int) -> int:
        """Tokens per compressed row in `layer`; 0 for a window-only layer."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows `layer` reads: the largest KV source <= `layer`. ValueError if none."""
        return _latest("kv_source_layer_ids", self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int:
        """The layer whose index list `layer` uses: the largest index source <= `layer`. ValueError if none."""
        return _latest("index_source_layer_ids", self.index_source_layer_ids, layer)

    def kind(self, layer: int) -> LayerKind:
        """ "window" (no compressed rows), "full" (own rows and index), "reindex" (own index) or "reuse" (neither)."""
        if self.ratio(layer) == 0:
            return "window"
        if layer in self.kv_source_layer_ids:
            return "full"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    def uses_candidates(self, layer: int) -> bool:
        """Whether index source `layer` scores only the candidate rows that an earlier layer published."""
        source = self.candidate_source_layer_id
        return source is not None and layer > source and self.kind(layer) == "reindex"

    # Ways to make one

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeepseekV41Config:
        """From a parsed config file of either form; keys that the text model does not use are ignored.

        A nested `text_config` (or Hugging Face key names at the top) and the flat names of `inference/config.json` are
        told apart by the keys. ValueError lists the keys that are missing.
        """
        if "text_config" in values:
            nested = {**values, **values["text_config"]}
            return cls._from_names(nested, NESTED_NAMES, "text_config")
        if "hidden_size" in values:
            return cls._from_names(values, NESTED_NAMES, "config")
        return cls._from_names(values, FLAT_NAMES, "inference config")

    @classmethod
    def _from_names(cls, values: Mapping[str, Any], names: Mapping[str, str], form: str) -> DeepseekV41Config:
        found = {name: values[key] for key, name in names.items() if key in values}
        scaling = values.get("rope_scaling")
        if scaling is not None:
            found |= {name: scaling[key] for key, name in ROPE_SCALING_NAMES.items() if key in scaling}
        elif names is NESTED_NAMES:
            found["rope_scaling_type"] = "none"
        found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        if not found.get("engram_layer_ids"):
            found |= {"engram_layer_ids": (), "engram_num_embeddings": ()}
        found.setdefault("candidate_source_layer_id", None)
        key_of = {name: key for key, name in names.items()}
        missing = sorted(key_of[name] for name in REQUIRED if name not in found)
        if missing:
            raise ValueError(f"{form}: missing keys {missing}")
        return cls(**found)

    @classmethod
    def from_file(cls, path: str | Path) -> DeepseekV41Config:
        """From a JSON file, or from a folder that holds one of `CONFIG_FILES` (the first found is taken)."""
        path = Path(path)
        if path.is_dir():
            candidates = [path / name for name in CONFIG_FILES]
            path = next((each for each in candidates if each.is_file()), path)
            if path.is_dir():
                raise FileNotFoundError(f"{path}: none of {', '.join(CONFIG_FILES)}")
        return cls.from_dict(json.loads(path.read_text()))

    @classmethod
    def released(cls) -> DeepseekV41Config:
        """The released DeepSeek-V4.1-Flash (also what `DeepseekV41Config()` gives)."""
        return cls()

    @classmethod
    def miniature(cls, **overrides: Any) -> DeepseekV41Config:
        """A tiny model of eight layers with every layer kind, for examples and tests.

        Layer 0 window only; 1 and 3 Full with ratio 2; 2 Reuse; 4 Full with ratio 1 and candidate source; 5 and 7
        Reuse; 6 Reindex inside the candidates. No Engram unless asked for (`engram_layer_ids=(1,)`).
        """
        values: dict[str, Any] = {**_MINIATURE, **overrides}
        engram = values.get("engram_layer_ids", ())
        if engram and "engram_num_embeddings" not in overrides:
            heads, grams = values["engram_n_heads"], values["engram_max_ngram_size"]
            primes = engram_primes(len(engram), grams, heads, values["engram_vocab_size"])
            values["engram_num_embeddings"] = tuple(sum(map(sum, layer)) for layer in primes)
        return cls(**values)

    def with_changes(self, **changes: Any) -> DeepseekV41Config:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def _latest(key: str, sources: tuple[int, ...], layer: int) -> int:
    found = [source for source in sources if source <= layer]
    if not found:
        raise ValueError(f"{key}: {list(sources)} has no source for layer {layer}; allowed: one at or before it")
    return max(found)
