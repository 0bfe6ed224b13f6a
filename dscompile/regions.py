"""Marking a model's repeated layers as regions that `torch.compile` compiles once per kind.

`torch.compiler.nested_compile_region` must wrap a function of a class: a wrapped bound method of an instance does not
trace. To leave the layer's class alone, each marked instance is given a subclass that only wraps `forward`. It is
made once per class and keeps its name, so printed models, isinstance checks and state dicts stay as they were. What
does need the original class (pickling a whole module, gradient checkpointing) works again after `unmark_regions`.

The backend sees one subgraph per kind of layer: layers whose graphs differ in anything but their inputs are different
kinds, and torch puts a kind that occurs once back in line.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

_MARK = "_dscompile_region_of"


def mark_regions(model: nn.Module, layer_class: type[nn.Module] | None = None) -> int:
    """Makes every `layer_class` instance inside `model` a region; returns how many there are now.

    Without `layer_class`, the layers are the entries of the `nn.ModuleList` in `model` that holds the most parameters,
    taking the outermost one where lists are nested. Marking twice changes nothing. Raises `ValueError` if there is
    nothing to mark.
    """
    layers = [m for m in model.modules() if isinstance(m, layer_class)] if layer_class else _repeated_layers(model)
    if not layers:
        what = layer_class.__name__ if layer_class else "module in an nn.ModuleList"
        raise ValueError(f"mark_regions: {type(model).__name__} has no {what}")
    for layer in layers:
        if not is_region(layer):
            layer.__class__ = _region_class(type(layer))
    return len(layers)


def unmark_regions(model: nn.Module) -> int:
    """Gives every marked layer inside `model` its own class back; returns how many there were."""
    marked = [m for m in model.modules() if is_region(m)]
    for layer in marked:
        layer.__class__ = getattr(type(layer), _MARK)
    return len(marked)


def is_region(module: nn.Module) -> bool:
    """Whether `module` is marked."""
    return _MARK in type(module).__dict__


def _repeated_layers(model: nn.Module) -> list[nn.Module]:
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():  # outermost first, so a nested list never beats the one around it on a tie
        if isinstance(module, nn.ModuleList):
            size = sum(p.numel() for p in module.parameters())
            if size > most:
                best, most = list(module), size
    return best


_REGION_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _region_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    if layer_class not in _REGION_CLASSES:
        _REGION_CLASSES[layer_class] = _make_region_class(layer_class)
    return _REGION_CLASSES[layer_class]


def _make_region_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    body: dict[str, Any] = {
        "__doc__": layer_class.__doc__,
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        _MARK: layer_class,
    }
    region: type[nn.Module] = type(layer_class.__name__, (layer_class,), body)
    # Set after the class is made: a base class that wraps its subclasses' forward (transformers' checkpointing layer
    # does) would put its wrapper around the region, and the call would no longer reach a marked function directly.
    region.forward = _nested_region(layer_class.forward)  # type: ignore[method-assign]
    return region


def _nested_region(forward: Any) -> Any:
    wrap = torch.compiler.nested_compile_region
    # A region with an argument that torch cannot compare (a cache object) is traced for every layer and merged after;
    # one that it can compare is remembered, and more than 8 unlike layers would end with an error, not a slow compile.
    options: dict[str, Any] = (
        {"max_reuse_entries": 1024} if "max_reuse_entries" in inspect.signature(wrap).parameters else {}
    )
    return functools.update_wrapper(wrap(forward, **options), forward, updated=())
