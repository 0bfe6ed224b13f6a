"""How long a template takes on the GPU of this machine, measured so that numbers of different configs compare.

Each of a few copies of the arguments is larger than the L2 cache together, and they take turns, so every call reads
from memory. The calls are recorded in one CUDA graph and replayed; the median over replays counts. Before anything is
timed the result must agree with the op's reference, on copies: an op that writes to a pool is given a fresh one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dscompile.ops import OPS
from dscompile.targets import Target
from dscompile.tuning.build import Job, template_named
from dscompile.tuning.inputs import make_inputs


class WrongResultError(RuntimeError):
    """A config's result differs from the reference's; the message says by how much. Such a config never wins."""


@dataclass(frozen=True)
class Measurer:
    """Measures jobs on one device. Instances are called with a `Job` and return microseconds.

    rounds: replays of the graph, whose median counts; calls: of the template in a graph; most_bytes: of all copies of
    the arguments.
    """

    target: Target
    device: torch.device
    rounds: int = 20
    calls: int = 10
    most_bytes: int = 8 << 30

    def __call__(self, job: Job) -> float:
        template = template_named(job.call.op, job.template)

        def run(args: tuple[Any, ...]) -> Any:
            return template.fn(*args, config=job.config, target=self.target)

        args = make_inputs(job.call, self.device)
        check(job.call.op, run, args)
        copies = [args, *(_copied(args) for _ in range(self.copies(args) - 1))]
        return self._time(run, copies)

    def copies(self, args: Sequence[Any]) -> int:
        """So many that together they are twice the L2 cache, at least 2, within `most_bytes`."""
        size = max(1, sum(value.untyped_storage().nbytes() for value in args if isinstance(value, Tensor)))
        wanted = -(-2 * int(self.target.l2_bytes.value or 0) // size)
        return max(1, min(max(2, wanted), self.calls, self.most_bytes // size))

    def _time(self, run: Any, copies: list[tuple[Any, ...]]) -> float:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            for args in copies:  # compiles and warms up outside the capture
                run(args)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for turn in range(self.calls):
                    run(copies[turn % len(copies)])
            times = []
            for _ in range(self.rounds + 2):
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record(stream)
                graph.replay()
                after.record(stream)
                stream.synchronize()
                times.append(before.elapsed_time(after) * 1e3 / self.calls)
        return statistics.median(times[2:])


def _copied(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in args)


def check(op: str, run: Any, args: Sequence[Any]) -> None:
    """Run the template and the reference on copies of `args`; WrongResultError if results or changed arguments differ.

    Integers and bytes of packed rows may differ in one of a thousand places (a sum in another order can move a value
    across a rounding boundary, or swap equal choices), floats by 2% of the root mean square.
    """
    mine, theirs = _copied(args), _copied(args)
    got, want = run(mine), OPS[op].reference(*theirs)
    pairs = [*zip(_tensors(got), _tensors(want), strict=True), *zip(_tensors(mine), _tensors(theirs), strict=True)]
    for number, (a, b) in enumerate(pairs):
        difference = disagreement(a, b)
        if difference > 1.0:
            raise WrongResultError(
                f"{op}: value {number} differs from the reference, {difference:.3g} times the allowed"
            )


def disagreement(got: Tensor, want: Tensor) -> float:
    """How far two tensors are apart, 1 being the most that is accepted."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    if not got.dtype.is_floating_point:
        return float((got != want).double().mean()) / 1e-3
    a, b = got.double(), want.double()
    if not a.isnan().equal(b.isnan()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    size = b.square().mean().sqrt().clamp_min(1e-12)
    return float((a - b).square().mean().sqrt() / size) / 0.02


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [value for value in result or () if isinstance(value, Tensor)]


def driver_version() -> str:
    """The NVIDIA driver's version, "" if it cannot be asked."""
    import subprocess

    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.SubprocessError):
        return ""
