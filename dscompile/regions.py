"""Marking a model's repeated layers as regions that `torch.compile` compiles once per kind.

`torch.compiler.nested_compile_region` must wrap a function of a class: a wrapped bound method of an instance does not
trace. To leave the layer's class alone, each marked instance is given a subclass that only wraps `forward`; the subclass
is made once per class and keeps its name, so printed models and isinstance checks stay as they were.
"""

from __future__ import annotations

import collections
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


@functools.cache
def _region_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    # `type.__new__` directly: a class hook such as transformers' GradientCheckpointingLayer.__init_subclass__ would wrap
    # our forward once more, and nothing between the module's call and the region may hide the marked function.
    forward = _nested_region(layer_class.forward)
    functools.update_wrapper(forward, layer_class.forward, updated=())
    body: dict[str, Any] = {
        "__doc__": layer_class.__doc__,
        "__module__": layer_class.__module__,
        "__qualname__": layer_class.__qualname__,
        _MARK: layer_class,
    }
    region = type(layer_class.__name__, (layer_class,), body)
    region.forward = forward  # type: ignore[method-assign]
    return region


def _nested_region(forward: Any) -> Any:
    wrap = torch.compiler.nested_compile_region
    # A region that torch cannot prove reusable is traced again for every layer and merged afterwards; the limit on
    # remembered traces (8) would then stop models of many layers, with an error, though nothing is wrong.
    options = {"max_reuse_entries": 1024} if "max_reuse_entries" in inspect.signature(wrap).parameters else {}
    return wrap(forward, **options)


def count_kinds(model: nn.Module) -> dict[str, int]:
    """Marked layers by class name, for reports."""
    return dict(collections.Counter(type(m).__name__ for m in model.modules() if is_region(m)))
