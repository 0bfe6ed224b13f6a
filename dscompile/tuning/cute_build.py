"""The CuTe kernels that fit the calls of a workload, compiled for a bundle. Nothing starts them yet."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dscompile import compat
from dscompile.ops import NAMESPACE
from dscompile.targets import Target
from dscompile.templates import cute
from dscompile.templates.cute.record import CuteTemplate
from dscompile.templates.triton.record import Config
from dscompile.tuning import disassembly
from dscompile.tuning.build import Failure
from dscompile.tuning.calls import Call
from dscompile.tuning.cute_offline import CompiledCute, compile_request
from dscompile.tuning.disassembly import Facts, ToolError
from dscompile.tuning.offline import OfflineCompileError


@dataclass(frozen=True)
class CuteJob:
    """One call with one config of one CuTe template."""

    call: Call
    template: CuteTemplate
    config: Config


@dataclass(frozen=True)
class BuiltCute:
    """A kernel of a job."""

    job: CuteJob
    kernel: CompiledCute
    facts: Facts

    @property
    def tensor_memory_columns(self) -> int:
        return columns_of(self.kernel.ptx)


@functools.cache
def cute_templates() -> dict[str, tuple[CuteTemplate, ...]]:
    """Every CuTe template by the op that it serves; needs no compiler."""
    found: dict[str, tuple[CuteTemplate, ...]] = {}
    for module in pkgutil.iter_modules(cute.__path__):
        if module.name in _KERNELS:
            continue
        for template in getattr(importlib.import_module(f"{cute.__name__}.{module.name}"), "TEMPLATES", ()):
            found[template.op] = (*found.get(template.op, ()), template)
    return found


# Modules that import the compiler.
_KERNELS = frozenset(("attention_kernels", "device", "expert_kernels", "gather_kernels", "row_kernels"))


def plan_cute(calls: Iterable[Call], target: Target, every_config: bool) -> tuple[list[CuteJob], dict[str, str]]:
    """(jobs for the calls that a template fits, the reason of a call for each template that fits none).

    Raises MissingExtraError, in one line, if nvidia-cutlass-dsl is not installed.
    """
    compat.require_extra("gpu")
    jobs: list[CuteJob] = []
    refused: dict[str, str] = {}
    for call in calls:
        for template in cute_templates().get(f"{NAMESPACE}::{call.op}", ()):
            reason = template.applies(call.named(), target)
            space = template.space(call.sizes(), target) if reason is None else []
            if not space:
                refused[template.name] = reason or "no config passes its checks"
            jobs += [CuteJob(call, template, config) for config in (space if every_config else space[:1])]
    fitting = {job.template.name for job in jobs}
    return jobs, {name: reason for name, reason in refused.items() if name not in fitting}


def compile_cute(jobs: Iterable[CuteJob], target: Target) -> Iterator[list[BuiltCute] | Failure]:
    """The kernels of each job, in order; equal requests are compiled once."""
    known: dict[str, tuple[CompiledCute, Facts]] = {}
    for job in jobs:
        try:
            found = []
            for request in job.template.requests(job.call.named(), job.config, target):
                same = f"{request.name} {request.config} {request.details}"
                if same not in known:
                    kernel = compile_request(request, target)
                    known[same] = kernel, disassembly.read(kernel.cubin)
                found.append(BuiltCute(job, *known[same]))
            yield found
        except (OfflineCompileError, ToolError) as error:
            yield Failure(job.call, job.template.name, str(error))


def columns_of(ptx: str) -> int:
    """Columns of tensor memory that a kernel takes, from its allocations; 0 without any."""
    total = 0
    for operand in re.findall(r"tcgen05\.alloc\.[^;]*,\s*([%\w]+)\s*;", ptx):
        if operand.startswith("%"):
            moved = re.search(rf"mov\.\w+\s+{re.escape(operand)},\s*(\d+)\s*;", ptx)
            operand = moved[1] if moved else "0"
        total += int(operand)
    return total
