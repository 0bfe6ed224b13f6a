"""Arguments with values for a call that is known only by its sizes: random, but of the kind that a model hands in.

Indices are in range, packed rows are rows of their format, positions are those after a full context, cosines and sines
belong together. The same seed gives the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dscompile.formats import FORMATS
from dscompile.ops import OPS
from dscompile.tuning.calls import Call, TensorSpec

# op -> {argument: the argument that names its format}
_FORMATS = {
    "sparse_attention": {"window_kv": "window_format", "comp_kv": "comp_format"},
    "sparse_attention_paged": {"window_pool": "window_format", "comp_kv": "comp_format"},
    "index_topk": {"keys": "key_format"},
    "index_topk_candidates": {"keys": "key_format"},
    "gather_rows": {"rows": "format"},
    "unpack_used": {"rows": "format"},
    "unpack": {"rows": "format"},
}
# The argument whose last axis is a row's length
_WIDTH = {"sparse_attention": "q", "sparse_attention_paged": "q", "index_topk": "q", "index_topk_candidates": "q"}
_ROWS = 4096  # packed rows that are made; a larger pool repeats them


def make_inputs(call: Call, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """The call's arguments in schema order, tensors on `device` with the strides of the call."""
    generator = torch.Generator().manual_seed(seed)
    names = [argument.name for argument in OPS[call.op].op._schema.arguments]
    given = dict(zip(names, call.args))
    made: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, TensorSpec):
            made[name] = value
            continue
        rule = _RULES.get((call.op, name)) or _RULES.get(("*", name))
        if name in _FORMATS.get(call.op, {}) and given[_FORMATS[call.op][name]] != "none":
            tensor = _packed(call.op, value, given, given[_FORMATS[call.op][name]], generator)
        elif rule is not None:
            tensor = rule(value, given, generator)
        else:
            tensor = _plain(value, generator)
        made[name] = _placed(tensor, value, device)
    return tuple(made.values())


def _placed(tensor: Tensor, spec: TensorSpec, device: torch.device | str) -> Tensor:
    """On `device`; a tensor that is shorter along its first axis is repeated there, so that the host stays small."""
    place = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    if not spec.shape or tensor.shape[0] == spec.shape[0] or tensor.shape[0] == 0:
        return place.copy_(tensor)
    part = tensor.to(device=device, dtype=spec.dtype)
    for start in range(0, spec.shape[0], len(part)):
        place[start : start + len(part)] = part[: spec.shape[0] - start]
    return place


def _plain(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if spec.dtype.is_floating_point:
        size = spec.shape[-1] ** -0.5 if len(spec.shape) >= 2 and min(spec.shape[-2:]) > 64 else 1.0
        return _normal(spec.shape, generator) * size
    if spec.dtype == torch.bool:
        return torch.rand(spec.shape, generator=generator) < 0.5
    return torch.zeros(spec.shape, dtype=spec.dtype)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal values; of a large tensor a leading part only, see `_placed`."""
    return torch.randn(_leading(shape), generator=generator)


def _leading(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of at most 2^24 elements of it, whole along all axes but the first."""
    count = math.prod(shape)
    if count <= 1 << 24 or len(shape) < 2:
        return shape
    return (max(1, (1 << 24) * shape[0] // count), *shape[1:])


def _packed(op: str, spec: TensorSpec, given: dict[str, Any], name: str, generator: torch.Generator) -> Tensor:
    width = given[_WIDTH[op]].shape[-1] if op in _WIDTH else given["dim"]
    rows = FORMATS[name].pack(torch.randn((_ROWS, width), generator=generator))
    shape = _leading(spec.shape)
    return rows[torch.arange(math.prod(shape[:-1])) % _ROWS].view(shape)


def _below(limit: Callable[[dict[str, Any]], int]) -> Callable[..., Tensor]:
    """Different indices below `limit` along the last axis, as long as there are enough."""

    def rule(spec: TensorSpec, given: dict[str, Any], generator: torch.Generator) -> Tensor:
        bound, last = limit(given), spec.shape[-1] if spec.shape else 1
        lines = math.prod(spec.shape[:-1])
        if last > bound:
            return torch.randint(0, max(bound, 1), spec.shape, generator=generator)
        found = [torch.randperm(bound, generator=generator)[:last] for _ in range(min(lines, 512))]
        picks = torch.stack(found).sort(-1).values if found else torch.empty(0, last, dtype=torch.int64)
        return picks.repeat(-(-lines // max(len(picks), 1)), 1)[:lines].view(spec.shape)

    return rule


def _full(value: Callable[[dict[str, Any]], int]) -> Callable[..., Tensor]:
    return lambda spec, given, generator: torch.full(spec.shape, value(given), dtype=torch.int64)


def _last_positions(spec: TensorSpec, given: dict[str, Any], generator: torch.Generator) -> Tensor:
    """Of the newest tokens: the last of them reads the newest of the window's rows."""
    rows = given["window_slots"] if "window_slots" in given else given["window_kv"]
    return (rows.shape[1] - spec.shape[-1] + torch.arange(spec.shape[-1])).expand(spec.shape)


def _angle(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def rule(spec: TensorSpec, given: dict[str, Any], generator: torch.Generator) -> Tensor:
        angles = torch.rand(spec.shape, generator=torch.Generator().manual_seed(7)) * 6.28
        return function(angles)

    return rule


def _bytes(low: int, high: int) -> Callable[..., Tensor]:
    return lambda spec, given, generator: torch.randint(low, high, _leading(spec.shape), generator=generator)


_EXPERTS = ("experts", "experts_packed", "moe", "moe_packed")
# op -> its stored weights, each with an argument of scales
_STORED = {
    "experts_packed": ("w13", "w2"),
    "moe_packed": ("w13", "w2", "shared_gate", "shared_up", "shared_down"),
}
_RULES: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("*", "cos"): _angle(torch.cos),
    ("*", "sin"): _angle(torch.sin),
    ("*", "slots"): _below(lambda given: given["pool"].shape[0]),
    ("*", "n_visible"): _full(lambda given: (given.get("keys") or given["comp_kv"]).shape[1]),
    ("sparse_attention", "q_pos"): _last_positions,
    ("sparse_attention_paged", "q_pos"): _last_positions,
    ("sparse_attention_paged", "window_slots"): _below(lambda given: given["window_pool"].shape[0]),
    ("sparse_attention", "comp_idx"): _below(lambda given: given["comp_kv"].shape[1]),
    ("sparse_attention_paged", "comp_idx"): _below(lambda given: given["comp_kv"].shape[1]),
    ("gather_rows", "indices"): _below(lambda given: given["rows"].shape[1]),
    ("unpack_used", "indices"): _below(lambda given: given["rows"].shape[1]),
    **{(op, "indices"): _below(lambda given: given["w13"].shape[0]) for op in _EXPERTS},
    **{(op, "weights"): lambda spec, given, g: torch.rand(spec.shape, generator=g) for op in _EXPERTS},
    ("pack_rows", "token"): _below(lambda given: given["x"].shape[0]),
    ("combine_rows", "slot"): _below(lambda given: given["rows"].shape[0]),
    ("router", "forced_indices"): _below(lambda given: given["weight"].shape[0]),
    ("engram_gather", "rows"): _below(lambda given: given["table"].shape[0]),
    # Scales of stored weights: small powers of two, as UE8M0 bytes.
    **{(op, f"{name}_scale"): _bytes(118, 124) for op, names in _STORED.items() for name in names},
    **{(op, name): _bytes(0, 127) for op, names in _STORED.items() for name in names},
    ("linear_packed", "weight_scale"): _bytes(118, 124),
    ("linears_packed", "w0_scale"): _bytes(118, 124),
    ("linears_packed", "w1_scale"): _bytes(118, 124),
    ("grouped_output_packed", "wo_b_scale"): _bytes(118, 124),
    ("engram_gather", "scales"): _bytes(118, 124),
}
