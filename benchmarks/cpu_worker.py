"""One model in one mode: the process that the CPU benchmark asks for one repetition at a time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cpu_cases import Case, Setup

BACKENDS = {"stock": "inductor", "dsv4": "dsv4"}

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def serve(connection: Connection, setup: Setup, log: str) -> None:
    """Answers (command, argument) with ("ok", result) or ("failed", message) until the parent hangs up.

    A process group of its own, so that the parent can end Inductor's helpers with it; output goes to the file `log`.
    The kernel is asked to end this process when its parent has ended, and first of all when memory runs out.
    """
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    commands: dict[str, Callable[..., Any]] = {}
    while True:
        try:
            command, argument = connection.recv()
        except EOFError:
            return
        try:
            if command == "build":
                subject = Subject(setup)
                commands = {"prepare": subject.prepare, "repeat": subject.repeat}
                connection.send(("ok", subject.describe()))
            else:
                connection.send(("ok", commands[command](argument)))
        except Exception as error:
            traceback.print_exc()
            line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            connection.send(("failed", line[:300]))


class Subject:
    """The model, built once; then `prepare` for a case and `repeat` as often as asked."""

    def __init__(self, setup: Setup) -> None:
        import torch
        from cpu_models import build

        began = time.perf_counter()
        torch.set_num_threads(setup.threads)
        torch.set_grad_enabled(False)
        self.setup = setup
        self.model = build(setup)
        self.call: Callable[[], Any] | None = None
        self.build_seconds = time.perf_counter() - began

    def describe(self) -> dict[str, Any]:
        weights = [*self.model.parameters()]
        return {
            "build_seconds": self.build_seconds,
            "parameters": sum(w.numel() for w in weights),
            "weight_bytes": sum(w.nbytes for w in weights),
            "rss_bytes": _memory("VmRSS"),
        }

    def prepare(self, case: Case) -> dict[str, Any]:
        """Compiles (unless eager) and runs the case once; every case starts from nothing compiled."""
        import torch
        from cpu_models import make_call
        from torch._dynamo.utils import compilation_time_metrics

        import dscompile

        self.call = None
        torch._dynamo.reset()
        forward: Any = self.model
        if self.setup.mode in BACKENDS:
            forward = torch.compile(self.model, backend=BACKENDS[self.setup.mode])
        call = make_call(self.setup, case, self.model, forward)
        name = "OutputGraph.call_user_compiler"
        graphs = len(compilation_time_metrics.get(name, []))
        _reset_peak()
        began = time.perf_counter()
        with dscompile.collect() as report:
            logits = call()
        first = time.perf_counter() - began
        self.call = call
        backend = compilation_time_metrics.get(name, [])[graphs:]
        return {
            "first_call_seconds": first,
            "backend_seconds": sum(backend),
            "graphs": len(backend),
            "peak_bytes_compiling": _memory("VmHWM"),
            "logits": logits.float().numpy(),
            "reports": [_summary(graph) for graph in report.graphs],
        }

    def repeat(self, case: Case) -> dict[str, Any]:
        """One repetition: seconds of wall clock and of all threads' CPU time, per token for decoding."""
        assert self.call is not None
        per = self.setup.steps if case.phase == "decode" else 1
        _reset_peak()
        cpu, began = time.process_time(), time.perf_counter()
        self.call()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return {"seconds": seconds / per, "cpu_seconds": cpu / per, "peak_bytes": _memory("VmHWM")}


def _summary(graph: Any) -> dict[str, Any]:
    kept = ("capture_seconds", "rewrite_seconds", "compile_seconds", "nodes_before", "nodes_after", "regions",
            "region_calls", "notes")  # fmt: skip
    return {
        **{name: getattr(graph, name) for name in kept},
        "matches": graph.counts(),
        "kernels": [[operation, kernel, count] for (operation, kernel), count in graph.kernel_counts().items()],
        "near_misses": len(graph.misses),
    }


def _memory(field: str) -> int:
    """VmRSS (now) or VmHWM (the most since `_reset_peak`) in bytes; without /proc, the most ever."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
