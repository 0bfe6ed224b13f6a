"""transformers' `DeepseekV4ForCausalLM`, unmodified, as one compiled graph per number of new tokens.

    from dscompile.integrations.transformers import StaticV4Cache, prepare

    prepare(model)
    model.compile(backend="dsv4")
    cache = StaticV4Cache(model.config, batch_size=1, max_tokens=4096, dtype=model.dtype)
    model.generate(ids, cache=cache, max_new_tokens=64)

`StaticV4Cache` replaces the model's growing cache (see `v4_cache` for how each of its branches on sizes is settled).
`prepare` sets up one model instance through public means only: forward pre-hooks, the experts setting, and a subclass
of the decoder layer for the regions (`dscompile.regions`). The classes of transformers stay as they are.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from dscompile.integrations.v4_cache import ROWS_MASKED, StaticCSALayer, StaticHCALayer, StaticWindowLayer
from dscompile.regions import mark_regions, unmark_regions

LAYER_CLASSES: dict[str, type[StaticWindowLayer]] = {
    "sliding_attention": StaticWindowLayer,
    "heavily_compressed_attention": StaticHCALayer,
    "compressed_sparse_attention": StaticCSALayer,
}


class StaticV4Cache(Cache):
    """A cache of fixed size for `DeepseekV4ForCausalLM`, made for `torch.compile`.

    Args:
        config: the model's configuration (`model_type` "deepseek_v4").
        batch_size: rows of every call; all rows are at the same position.
        max_tokens: tokens (prompt and generated) that fit. Compressed rows are allocated in whole groups; a token
            whose group has no row any more raises IndexError ("slots ... allowed: < rows of the pool").
        dtype: of the model's activations, so of everything stored.
        device: where the model runs.

    Numbers equal those of the model's own `DynamicCache`, whatever way a sequence is cut into forwards. Padding is
    not supported (the model's compressors would take padding for tokens), nor removing tokens. The tensors keep their
    addresses for the life of the object; `reset()` makes it ready for the next sequences. Another object of the same
    sizes runs the same compiled graph.

    `is_compileable` is False on purpose: `generate` would otherwise build the window mask outside the graph, where
    no pass can see what it means, and on a GPU start an Inductor compile of its own around the user's.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if getattr(config, "model_type", None) != "deepseek_v4":
            raise ValueError(f"StaticV4Cache is for deepseek_v4; got a configuration of {config.model_type!r}")
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r}, allowed: an int >= 1")
        device = torch.empty(0, device=device).device  # with its index, as a tensor's device has it
        self.max_tokens = max_tokens
        self.start = torch.zeros((), dtype=torch.int64, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        common: dict[str, Any] = {
            "batch_size": batch_size, "max_tokens": max_tokens, "window": config.sliding_window,
            "head_dim": config.head_dim, "dtype": dtype, "device": device, "start": self.start, "length": self.length,
        }  # fmt: skip
        layers: list[Any] = [_layer(config, index, kind, common) for index, kind in enumerate(config.layer_types)]
        super().__init__(layers=layers)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Tokens seen so far, an int64 scalar tensor (a value, not the counter itself)."""
        return self.length.clone()

    def tensors(self) -> list[Tensor]:
        """Every tensor of the cache, once: for counting bytes, or `torch._dynamo.mark_static_address`."""
        rows = [t for layer in self.layers if isinstance(layer, StaticWindowLayer) for t in layer.state()]
        return [self.start, self.length, *rows]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in self.tensors())


def _layer(config: PreTrainedConfig, index: int, kind: str, common: dict[str, Any]) -> StaticWindowLayer:
    layer_class = LAYER_CLASSES[kind]
    if not issubclass(layer_class, StaticHCALayer):
        return layer_class(layer_idx=index, **common)
    dims = {"compressor": config.head_dim, "indexer": config.index_head_dim}
    return layer_class(
        layer_idx=index,
        compress_rate=config.compress_rates[kind],
        stream_dims={name: dims[name] for name in layer_class.STREAMS},
        gate_dtype=torch.promote_types(common["dtype"], torch.float32),
        **common,
    )


def prepare(model: nn.Module, *, regions: bool = True) -> nn.Module:
    """Readies a `DeepseekV4ForCausalLM` (or its base model) for `StaticV4Cache` and for compiling; returns it.

    - Decoding one token with ratio-128 layers: the model masks nothing over the compressed rows then, since its own
      cache only holds visible ones. A pre-hook on those attention modules extends the mask exactly as the model does
      for longer chunks.
    - Padding, and a mask or positions that the cache cannot mean, are refused.
    - Experts run as "grouped_mm" if the model was on "eager", whose Python loop over experts breaks the graph.
    - `regions`: decoder layers become regions that are compiled once per kind. `unprepare` undoes everything.

    Raises `TypeError` for another model and `ValueError` for an attention implementation other than "eager".
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        warnings.warn(
            "prepare() was given torch.compile(model). Its generate() runs nothing compiled: call "
            "model.compile(backend='dsv4') on the model itself, or set model.forward = torch.compile(model.forward)",
            stacklevel=2,
        )
        model = model._orig_mod
    base = _base_model(model)
    attention = base.config._attn_implementation
    if attention != "eager":
        raise ValueError(f"attention implementation must be 'eager', V4's only one; got {attention!r}")
    unprepare(model)
    if base.config._experts_implementation == "eager":
        base.set_experts_implementation("grouped_mm")
    hooks = [base.register_forward_pre_hook(_check_call, with_kwargs=True)]
    for layer in base.layers:
        if layer.self_attn.layer_type == "heavily_compressed_attention":
            hooks.append(layer.self_attn.register_forward_pre_hook(_mask_compressed_rows, with_kwargs=True))
    base._dsv4_hooks = hooks
    if regions:
        mark_regions(base, type(base.layers[0]))
    return model


def unprepare(model: nn.Module) -> nn.Module:
    """Takes hooks and regions off again (the experts setting stays); a model that was not prepared is left alone."""
    base = _base_model(model)
    for hook in base.__dict__.pop("_dsv4_hooks", ()):
        hook.remove()
    base.__dict__.pop("_dsv4_warned", None)
    unmark_regions(base)
    return model


def _base_model(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if getattr(config, "model_type", None) != "deepseek_v4" or not hasattr(base, "layers"):
        raise TypeError(f"expected transformers' DeepseekV4ForCausalLM or DeepseekV4Model, got {type(model).__name__}")
    return base


def _mask_compressed_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a ratio-128 attention module: the mask of one token, extended over the cache's compressed rows.

    With T > 1 the compressor itself returns this bias: row j is visible to position p if j < (p + 1) // ratio. With
    the extended mask as wide as the keys, the attention's own extension (zeros) does not apply.
    """
    cache, mask, positions = kwargs.get("cache"), kwargs.get("attention_mask"), kwargs.get("position_ids")
    if not isinstance(cache, StaticV4Cache) or positions is None or positions.shape[1] != 1:
        return None
    if mask is None:
        raise ValueError("StaticV4Cache: one token is decoded without any mask; leave the model's own window mask on")
    layer = cache.layers[module.layer_idx]  # type: ignore[index]
    assert isinstance(layer, StaticHCALayer)
    row = torch.arange(layer.capacity, device=mask.device)
    visible = (positions + 1) // layer.compress_rate  # [B or 1, 1]
    bias = mask.new_zeros((mask.shape[0], 1, 1, layer.capacity))
    bias = bias.masked_fill(row.view(1, 1, 1, -1) >= visible.unsqueeze(1).unsqueeze(-1), float("-inf"))
    return args, {**kwargs, "attention_mask": torch.cat([mask, bias], dim=-1), ROWS_MASKED: True}


def _check_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of the base model: refuses what the cache cannot represent, and says when `generate` runs eagerly."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if not isinstance(cache, StaticV4Cache):
        return None
    if torch.is_grad_enabled():
        raise ValueError("StaticV4Cache is for inference: call the model under torch.no_grad()")
    if not torch.compiler.is_compiling():
        _check_room(cache, kwargs)
        _warn_if_generating(module)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        _refuse_padding(module, mask)
        return args, {**kwargs, "attention_mask": None}
    return None


def _refuse_padding(module: nn.Module, mask: Tensor) -> None:
    if torch.compiler.is_compiling():  # Dynamo runs the call eagerly instead, unless fullgraph=True makes this an error
        raise ValueError(f"StaticV4Cache: {_LEAVE_MASK_OUT}")
    if not bool(mask.all()):
        raise ValueError(
            "StaticV4Cache: attention_mask marks padding, which is not supported: all rows of a batch share their "
            "positions, and the compressors would take padding for tokens. Batch prompts of equal length."
        )
    _warn_once(module, _LEAVE_MASK_OUT)


_LEAVE_MASK_OUT = (
    "leave attention_mask out: it can only be all ones here, and a call with it does not run compiled, because a graph "
    "cannot look at its values"
)
_NOT_COMPILED = (
    "generate() is running this model uncompiled (torch.compile(model).generate() does not compile either): call "
    "model.compile(backend='dsv4') or set model.forward = torch.compile(model.forward, backend='dsv4') first"
)


def _check_room(cache: StaticV4Cache, kwargs: dict[str, Any]) -> None:
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if tokens is None:
        return
    seen, new = int(cache.length), tokens.shape[1]
    if seen + new > cache.max_tokens:
        raise ValueError(f"StaticV4Cache holds max_tokens={cache.max_tokens}; {seen} are cached and {new} more came")


def _warn_if_generating(module: nn.Module) -> None:
    """`generate` called a prepared model and this forward is not compiled (never was, or Dynamo gave up)."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        _warn_once(module, _NOT_COMPILED)


def _warn_once(module: nn.Module, message: str) -> None:
    said: set[str] = module.__dict__.setdefault("_dsv4_warned", set())
    if message not in said:
        said.add(message)
        warnings.warn(message, stacklevel=2)
