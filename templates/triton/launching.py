"""The one way in which templates start kernels, so that launches can also be recorded instead of run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dscompile.templates.triton.record import Config

# torch dtype -> how Triton's signatures spell the type of a pointer to it
POINTERS: dict[torch.dtype, str] = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]

#: Products and sums are rounded one by one, as in the references; a fused form would differ in the last bit, and a
#: writer then in a whole code.
OPTIONS = {"enable_fp_fusion": False}


def interpreting() -> bool:
    """Whether kernels of this process run in Triton's interpreter, which knows no machine instructions."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Launch:
    """A kernel and what it would have been started with. Values of tensors are never looked at."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by parameter name, in order; tensors, numbers or None
    constants: dict[str, Any]  # the tl.constexpr parameters
    config: Config

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def signature(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
        """(types by parameter, constants by parameter, attributes by position): what `ASTSource` takes.

        As Triton does when it starts a kernel: None and the integer 1 become constants, and pointers and integers that
        are divisible by 16 say so, which decides about the width of loads.
        """
        types: dict[str, str] = {}
        constants = dict(self.constants)
        attributes: dict[tuple[int], Any] = {}
        for position, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                types[name] = "constexpr"
                continue
            value = self.arguments[name]
            if value is None or (type(value) is int and value == 1):
                types[name], constants[name] = "constexpr", value
            else:
                types[name] = _type(name, value)
                if isinstance(value, torch.Tensor):
                    aligned = value.storage_offset() * value.element_size() % 16 == 0
                else:
                    aligned = type(value) is int and value % 16 == 0
                if aligned:
                    attributes[(position,)] = ALIGNED
        return types, constants, attributes


def _type(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.dtype not in POINTERS:
            raise TypeError(f"{name}: no pointer type for {value.dtype}; allowed: {', '.join(map(str, POINTERS))}")
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"{name}: a kernel cannot take {type(value).__name__}")


_recorder: ContextVar[list[Launch] | None] = ContextVar("dscompile_launches", default=None)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Inside, `launch` starts nothing and adds to the list instead. Run templates on meta tensors there."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def launch(kernel: Any, grid: Sequence[int], *args: Any, config: Config, **constants: Any) -> None:
    """Start `kernel[grid](*args, **constants)` with the warps and stages of `config`, or record that.

    args: the kernel's first parameters, in order; `constants`: the rest, all `tl.constexpr`. A grid with a 0 starts
    nothing.
    """
    grid = tuple(int(size) for size in grid)
    launches = _recorder.get()
    if launches is not None:
        named = dict(zip(kernel.arg_names, args))
        missing = [name for name in kernel.arg_names if name not in named and name not in constants]
        if missing or len(args) + len(constants) != len(kernel.arg_names):
            raise TypeError(f"{kernel.__name__}: {len(args)} arguments and {sorted(constants)}; missing: {missing}")
        launches.append(Launch(kernel, grid, named, constants, config))
    elif 0 not in grid:
        kernel[grid](*args, **constants, num_warps=config.num_warps, num_stages=config.num_stages, **OPTIONS)
