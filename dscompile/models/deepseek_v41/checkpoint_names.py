"""Which stored tensors fill which parameters: the release's names, shapes per stored dtype, and how to copy them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dscompile.formats import FORMATS
from dscompile.models.deepseek_v41.engram import EngramTable
from dscompile.models.deepseek_v41.linear import WEIGHT_BLOCK, Linear, dequantise_blocks
from dscompile.models.deepseek_v41.moe import EXPERT_FORMAT, Experts

if TYPE_CHECKING:
    from dscompile.models.deepseek_v41.model import DeepseekV41ForCausalLM

TABLE_FORMAT = FORMATS["fp8_g32_ue8m0"]
PLAIN = ("BF16", "F32", "F16")

Shape = tuple[int, ...]

_IGNORED = {
    "vision": ("vision.", "aligner.", "image_start", "image_end", "image_newline"),
    "draft": ("mtp.",),
}


@dataclass(frozen=True)
class Stored:
    """A tensor to read: its shape, and that of its scale, by the dtype it may be stored in; and where it goes."""

    shapes: dict[str, tuple[Shape, Shape | None]]
    scale_name: str
    put: Callable[[Tensor, Tensor | None], None]  # (tensor, scale as uint8)


def ignored_part(name: str) -> str | None:
    """The part of the release that a tensor belongs to and that this model does not have; None for the text model."""
    if name.endswith(".ffn.gate.bias_vl"):
        return "vision"
    return next((part for part, prefixes in _IGNORED.items() if name.startswith(prefixes)), None)


def release_name(name: str) -> str:
    """The release's name of one of the model's modules or parameters (the stacked experts have none)."""
    parts = name.split(".")
    if parts[0] == "engrams" and len(parts) > 1:
        parts = ["layers", parts[1], "engram", *parts[2:]]
    if parts[0] == "layers" and len(parts) > 2 and parts[2] in ("compressor", "indexer"):
        parts.insert(2, "attn")
    if parts[0] == "layers" and len(parts) > 3 and parts[2] in ("hc_attn", "hc_ffn"):
        parts[2:] = ["_".join(parts[2:])]
    return ".".join(parts)


def held_elsewhere(model: DeepseekV41ForCausalLM) -> set[str]:
    """Names of the experts that the checkpoint has and `model` leaves to others."""
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            others = set(range(model.config.n_routed_experts)) - set(module.held)
            parts = [f"{matrix}.{part}" for matrix in ("w1", "w2", "w3") for part in ("weight", "scale")]
            names |= {f"{release_name(path)}.{e}.{part}" for e in others for part in parts}
    return names


def stored_tensors(model: DeepseekV41ForCausalLM) -> dict[str, Stored]:
    """Every tensor that `model` wants from a checkpoint, by its name there; scales go with their weights."""
    wanted: dict[str, Stored] = {}
    for path, module in model.named_modules():
        name = release_name(path)
        if isinstance(module, Linear):
            wanted[f"{name}.weight"] = _linear(module, f"{name}.scale")
        elif isinstance(module, Experts):
            wanted |= _experts(module, name)
        elif isinstance(module, EngramTable):
            wanted[f"{name}.weight"] = _table(module, f"{name}.scale")
        else:
            for own, parameter in module.named_parameters(recurse=False):
                wanted[release_name(f"{path}.{own}" if path else own)] = _plain(parameter)
    return wanted


def _plain(parameter: nn.Parameter) -> Stored:
    shape = tuple(parameter.shape)
    return Stored(dict.fromkeys(PLAIN, (shape, None)), "", lambda x, _: _copy(parameter, x))


def _linear(module: Linear, scale_name: str) -> Stored:
    rows, columns = module.weight.shape
    grid = (-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    shapes: dict[str, tuple[Shape, Shape | None]] = {"F8_E4M3": ((rows, columns), grid)}
    if module.scale is None:
        shapes |= dict.fromkeys(PLAIN, ((rows, columns), None))

    def put(x: Tensor, scale: Tensor | None) -> None:
        if module.scale is not None and scale is not None:
            _copy(module.weight, x)
            _copy(module.scale, scale)
        else:
            _copy(module.weight, x if scale is None else dequantise_blocks(x, scale, module.weight.dtype))

    return Stored(shapes, scale_name, put)


def _experts(module: Experts, name: str) -> dict[str, Stored]:
    _, both, hidden = module.shapes["w13"]
    inner = both // 2
    wanted = {}
    for e in sorted(set(module.held)):
        for matrix, stack, first, rows, columns in (
            ("w1", "w13", 0, inner, hidden),
            ("w3", "w13", inner, inner, hidden),
            ("w2", "w2", 0, hidden, inner),
        ):
            scale_name = f"{name}.{e}.{matrix}.scale"
            wanted[f"{name}.{e}.{matrix}.weight"] = _expert(module, stack, e, first, rows, columns, scale_name)
    return wanted


def _expert(module: Experts, stack: str, e: int, first: int, rows: int, columns: int, scale_name: str) -> Stored:
    packed = ((rows, EXPERT_FORMAT.payload_bytes(columns)), (rows, EXPERT_FORMAT.scale_bytes(columns)))
    shapes: dict[str, tuple[Shape, Shape | None]] = {"I8": packed, "U8": packed}
    if not module.packed:
        shapes["F8_E4M3"] = ((rows, columns), (-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)))
        shapes |= dict.fromkeys(PLAIN, ((rows, columns), None))

    def put(x: Tensor, scale: Tensor | None) -> None:
        if module.packed and scale is not None:
            value = x.view(torch.uint8)
        elif scale is None:
            value = x
        elif x.dtype == torch.float8_e4m3fn:
            value = dequantise_blocks(x, scale, module.dtype)
        else:
            value = EXPERT_FORMAT.decode(x.view(torch.uint8), scale, columns, module.dtype)
        for slot in (slot for slot, expert in enumerate(module.held) if expert == e):
            _copy(getattr(module, stack)[slot, first : first + rows], value)
            if module.packed and scale is not None:
                _copy(getattr(module, f"{stack}_scale")[slot, first : first + rows], scale)

    return Stored(shapes, scale_name, put)


def _table(module: EngramTable, scale_name: str) -> Stored:
    rows, dim = module.weight.shape
    shapes: dict[str, tuple[Shape, Shape | None]] = dict.fromkeys(PLAIN, ((rows, dim), None))
    if module.scale is not None:
        shapes = {"F8_E4M3": ((rows, dim), (rows, TABLE_FORMAT.scale_bytes(dim)))}

    def put(x: Tensor, scale: Tensor | None) -> None:
        if module.scale is not None and scale is not None:
            _copy(module.weight, x.view(torch.uint8))
            _copy(module.scale, scale)
        else:
            _copy(module.weight, x)

    return Stored(shapes, scale_name, put)


@torch.no_grad()
def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
