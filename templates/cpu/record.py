"""The record that every CPU template exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Meta = Mapping[str, Any]


def fits_cpu(meta: Meta) -> str | None:
    """None if every tensor argument in `meta` lives on the CPU, else the reason why a CPU template cannot serve."""
    for name, value in meta.items():
        device = getattr(value, "device", None)
        if device is not None and device.type != "cpu":
            return f"{name} is on {device}, this template is for the CPU"
    return None


@dataclass(frozen=True)
class CpuTemplate:
    """One way to run one op on the CPU.

    name: of the template; an opaque one becomes the custom op `dsv4_cpu::<name>`.
    op: the vocabulary op that it implements, `dsv4::<op>` (or `aten::<op>` for an ATen op that has a faster form).
    form: "inline" = `fn` is plain PyTorch, traced in place so that Inductor fuses it with its neighbours;
        "opaque" = `fn` runs eagerly behind a custom op (host reads of data and generated C++ allowed).
    applies: called with the op's arguments by name (tensors or fakes); None if the template fits, else the reason.
    fn: takes exactly the op's arguments.
    """

    name: str
    op: str
    form: Literal["inline", "opaque"]
    fn: Callable[..., Any]
    applies: Callable[[Meta], str | None] = fits_cpu
