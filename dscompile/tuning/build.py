"""All kernels of a workload, compiled for a target in parallel."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from dscompile.lowering.template import choose, triton_templates
from dscompile.ops import NAMESPACE
from dscompile.targets import Target, get_target
from dscompile.templates.triton.launching import Launch
from dscompile.templates.triton.record import Config, TritonTemplate
from dscompile.tuning import known_facts, toolchain
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.database import GROWING
from dscompile.tuning.disassembly import Facts, ToolError
from dscompile.tuning.offline import CompiledKernel, OfflineCompileError, traced


@dataclass(frozen=True)
class Job:
    """One call with one config of one template."""

    call: Call
    template: str
    config: Config


@dataclass(frozen=True)
class Built:
    """A kernel of a job. grid: of its launch.

    main: it is the one (of the job's kernels) that takes most bytes of the op's own arguments. scratch_bytes: of the
    tensors it takes that are neither argument nor result of the op, so that one kernel writes and another reads them.
    """

    job: Job
    kernel: CompiledKernel
    facts: Facts
    grid: tuple[int, ...]
    main: bool = True
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Failure:
    """What of a workload has no kernel, and why. template: "" if no template fits the call."""

    call: Call
    template: str
    reason: str


def template_named(op: str, name: str) -> TritonTemplate:
    """The Triton template of that name for `op`; KeyError if there is none."""
    for template in triton_templates().get(f"{NAMESPACE}::{op}", ()):
        if template.name == name:
            return template
    raise KeyError(f"no Triton template {name!r} for {op}")


def plan(
    calls: Iterable[Call], target: Target, select: Callable[[Call, TritonTemplate, list[Config]], list[Config]]
) -> tuple[list[Job], list[Failure]]:
    """The jobs of a workload: for each call its template and the configs that `select` takes out of the space."""
    jobs: list[Job] = []
    failures: list[Failure] = []
    for call in calls:
        choice = choose(triton_templates().get(f"{NAMESPACE}::{call.op}", ()), call.named())
        if choice.template is None:
            failures.append(Failure(call, "", choice.reason))
            continue
        template = choice.template
        space = template.space(call.sizes(), target)
        if not space:
            failures.append(Failure(call, template.name, "no config passes its checks"))
        jobs += [Job(call, template.name, config) for config in select(call, template, space)]
    return jobs, failures


def first_only(call: Call, template: TritonTemplate, space: list[Config]) -> list[Config]:
    """The config that a template names first."""
    return space[:1]


def compile_job(job: Job, target: Target, code: bool = True) -> list[Built]:
    """Every kernel that a job launches. Raises OfflineCompileError and ToolError.

    code: with the files of every kernel; without them what is known from an earlier compile is enough.
    """
    template = template_named(job.call.op, job.template)
    args = job.call.meta_args()
    launches, results = traced(template, args, job.config, target)
    own = {_storage(value) for value in (*args, *results) if isinstance(value, torch.Tensor)}
    taken = [_bytes(launch, own, True) for launch in launches]
    built = []
    for launch, size in zip(launches, taken):
        kernel, facts = known_facts.of_launch(launch, target, code)
        scratch = _bytes(launch, own, False)
        built.append(Built(job, kernel, facts, launch.grid, size == max(taken), scratch))
    return built


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(launch: Launch, own: set[int], inside: bool) -> int:
    """Bytes of the tensors that a launch takes and whose memory is (or is not) in `own`, each once."""
    found = {
        _storage(value): value.untyped_storage().nbytes()
        for value in launch.arguments.values()
        if isinstance(value, torch.Tensor) and (_storage(value) in own) is inside
    }
    return sum(found.values())


def compile_jobs(
    jobs: list[Job], target: Target, processes: int, code: bool = True
) -> Iterator[tuple[Job, list[Built] | Failure]]:
    """Results as they come. A process that dies takes the jobs of a kernel down as failures, not the others.

    Jobs that differ in nothing but batch and context mostly share their kernels, so one process does them in turn and
    compiles a kernel once. Processes are started afresh ("spawn"), so that no thread of this one is copied half-way
    through a lock. code: as for `compile_job`.

    Raises ToolchainError, before anything is compiled, if nothing can be.
    """
    if jobs:
        toolchain.require(target)
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        groups.setdefault(_kernel_of(job), []).append(job)
    if processes <= 1 or len(groups) <= 1:
        for job in (job for group in groups.values() for job in group):
            yield job, _guarded(job, target.name, code)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=limit_threads) as pool:
        waiting = {pool.submit(_guarded_group, group, target.name, code): group for group in groups.values()}
        for future in as_completed(waiting):
            error = future.exception()
            for number, job in enumerate(waiting[future]):
                if error is not None:
                    yield job, Failure(job.call, job.template, f"the compiling process ended: {error}")
                else:
                    yield job, future.result()[number]


def _kernel_of(job: Job) -> Hashable:
    """Equal for jobs whose kernels are probably equal."""
    fixed = {name: value for name, value in job.call.sizes().items() if name not in GROWING}
    return job.template, job.config, str(fixed), tuple(a.dtype for a in job.call.args if isinstance(a, TensorSpec))


def limit_threads() -> None:
    """For a process among several on one machine: a single thread, and the parent alone answers an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _guarded_group(jobs: list[Job], target: str, code: bool) -> list[list[Built] | Failure]:
    return [_guarded(job, target, code) for job in jobs]


def _guarded(job: Job, target: str, code: bool) -> list[Built] | Failure:
    try:
        return compile_job(job, get_target(target), code)
    except (OfflineCompileError, ToolError) as error:
        return Failure(job.call, job.template, str(error))
