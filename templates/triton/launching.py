"""The one way in which templates start kernels, so that launches can also be recorded instead of run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dscompile.templates.triton.record import Config

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


_shared: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
_reserve: dict[int, list[torch.Tensor]] = {}  # by device: what captured graphs have not taken yet
RESERVE = 1 << 20


def counters(like: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [count or more] of zeros on the device of `like`, for `device.arrival`; kernels leave zeros behind.

    Launches of one stream share them, so that nothing is cleared between kernels. A launch in a captured graph, which
    may be replayed beside others, keeps some of its own, set aside before: no node of the graph has to clear them. If
    nothing ran outside a capture before, or all are taken, they are cleared in the graph.
    """
    if like.device.type != "cuda":
        return like.new_zeros(count, dtype=torch.int32)
    device = like.device.index or 0
    if torch.cuda.is_current_stream_capturing():
        return _take(device, count, like)
    if device not in _reserve:
        _reserve[device] = [like.new_zeros(RESERVE, dtype=torch.int32)]
    where = device, torch.cuda.current_stream(like.device).cuda_stream
    known = _shared.get(where)
    if known is None or known.numel() < count:
        size = max(1024, 1 << (count - 1).bit_length())
        known = _shared[where] = like.new_zeros(size, dtype=torch.int32)
    return known


def _take(device: int, count: int, like: torch.Tensor) -> torch.Tensor:
    left = _reserve.get(device)
    if not left or left[0].numel() < count:
        return like.new_zeros(count, dtype=torch.int32)
    taken, left[0] = left[0][:count], left[0][count:]
    return taken


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
