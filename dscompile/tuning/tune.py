"""Finding the best config of every call of a workload, and remembering it.

With a GPU of the target every config that passes its checks is measured; without one it is compiled and ranked by the
model of `predict`, unless it spills registers: then it has no record. Spaces are small (at most a few dozen configs),
so all of them are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dscompile.targets import Target
from dscompile.templates.triton.record import Config, TritonTemplate
from dscompile.tuning.build import Built, Failure, Job, compile_jobs, plan, template_named
from dscompile.tuning.calls import Call
from dscompile.tuning.database import Database, Key, Record
from dscompile.tuning.predict import predict
from dscompile.tuning.selection import dtypes_of, key_of


@dataclass(frozen=True)
class Outcome:
    """What became of one config of one call: a record, or why there is none."""

    job: Job
    record: Record | None
    reason: str = ""


def key_of_call(call: Call, template: TritonTemplate, target: Target, driver: str = "") -> Key:
    """What the records of a call are filed under."""
    return key_of(template, call.sizes(), dtypes_of(call.meta_args()), target, driver)


def open_jobs(
    calls: Sequence[Call], target: Target, database: Database, kind: str, driver: str = "", again: bool = False
) -> tuple[list[Job], list[Failure]]:
    """Configs without a record of that kind yet, so that a run that was interrupted goes on; all of them with `again`.

    Of calls that share a record (see `database.bucket`) the last one is taken.
    """
    by_key: dict[Key, Call] = {}
    failures: list[Failure] = []
    for call in calls:
        jobs, failed = plan([call], target, lambda call, template, space: space[:1])
        failures += failed
        for job in jobs:
            by_key[key_of_call(call, template_named(call.op, job.template), target, driver)] = call

    def missing(call: Call, template: TritonTemplate, space: list[Config]) -> list[Config]:
        known = set() if again else database.known(key_of_call(call, template, target, driver), kind)
        return [config for config in space if str(config) not in known]

    return plan(by_key.values(), target, missing)[0], failures


def tune_modelled(jobs: Sequence[Job], target: Target, database: Database, processes: int) -> Iterator[Outcome]:
    """Compile every job and rank it by the model; each record is kept as soon as it is known."""
    for job, result in compile_jobs(list(jobs), target, processes, code=False):
        outcome = _modelled(job, result, target)
        if outcome.record is not None:
            database.put([outcome.record])
        yield outcome


def _modelled(job: Job, result: list[Built] | Failure, target: Target) -> Outcome:
    if isinstance(result, Failure):
        return Outcome(job, None, result.reason)
    template = template_named(job.call.op, job.template)
    spills = sum(built.facts.spills for built in result)
    if spills:  # the model knows nothing of what they cost
        return Outcome(job, None, f"{spills} accesses to spilled registers")
    try:
        prediction = predict(result, target)
    except ValueError as error:
        return Outcome(job, None, str(error))
    key = key_of_call(job.call, template, target)
    record = Record(key, str(job.config), prediction.time_us, "modelled", "", time.time())
    return Outcome(job, record, f"bound by {prediction.bound}")


def tune_measured(
    jobs: Sequence[Job], target: Target, database: Database, driver: str, device: str,
    measure: Callable[[Job], float],
) -> Iterator[Outcome]:  # fmt: skip
    """Measure every job. `measure` returns microseconds or raises (a wrong result, no resources); see `measure.py`."""
    for job in jobs:
        template = template_named(job.call.op, job.template)
        try:
            took = measure(job)
        except Exception as error:  # one config that fails must not end the search
            yield Outcome(job, None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            continue
        key = key_of_call(job.call, template, target, driver)
        record = Record(key, str(job.config), took, "measured", device, time.time())
        database.put([record])
        yield Outcome(job, record)
