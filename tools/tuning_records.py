"""Writes dscompile/tuning/shipped/: the best config of every kernel of the released models, modelled, for every target.

python tools/tuning_records.py [--model v41] [--weights stored] [--target sm_103a] [--folder .cache/tuning]

What was tuned stays in the folder, so that after a change only what changed is tuned again. Finding the calls takes
minutes; `--same-calls` takes those of the last run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dscompile.lowering.template import triton_templates
from dscompile.targets import get_target
from dscompile.tuning.calls import Call, merged
from dscompile.tuning.database import Database
from dscompile.tuning.selection import source_hash
from dscompile.tuning.tune import open_jobs, tune_modelled
from dscompile.workload_models import read_config, workload_calls

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "dscompile" / "tuning" / "shipped"
KINDS = (("v41", "plain"), ("v4-flash", "plain"), ("v41", "stored"))
TARGETS = ("sm_103a", "sm_100a", "sm_90a")
BATCHES = (8, 16, 32, 64, 128, 256)
CONTEXT = 8192


def decoding_calls(model: str, weights: str, processes: int) -> list[Call]:
    """Of a step at every batch size. All GPUs have the same calls."""
    steps = workload_calls(
        read_config(model), TARGETS[0], "decode", list(itertools.product(BATCHES, (CONTEXT,))), 1, processes,
        weights == "stored",
    )  # fmt: skip
    return merged(call for calls in steps for call in calls)


def tune(calls: Sequence[Call], target: str, database: Database, processes: int) -> None:
    """Every config that has no record yet."""
    machine = get_target(target)
    jobs, failures = open_jobs(calls, machine, database, "modelled")
    for failure in failures:
        print(f"    no kernel: {failure.call}: {failure.reason}", flush=True)
    for outcome in tune_modelled(jobs, machine, database, processes):
        if outcome.record is None:
            print(f"    {outcome.job.template} ({outcome.job.config}): {outcome.reason}", flush=True)


def write(database: Database, place: Path) -> int:
    """Of each key the best record, if the kernel's source is still the same; without the time of day."""
    current = {t.name: source_hash(t) for found in triton_templates().values() for t in found}
    best: dict[tuple[object, str], dict[str, object]] = {}
    for record in database.records():  # the quickest first
        if current.get(record.key.template) == record.key.source_hash:
            best.setdefault((record.key, record.kind), {**asdict(record), "when": 0.0})
    lines = sorted(json.dumps(record, sort_keys=True) for record in best.values())
    place.parent.mkdir(exist_ok=True)
    place.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted({model for model, _ in KINDS}))
    parser.add_argument("--weights", choices=("plain", "stored"))
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "tuning")
    parser.add_argument("--same-calls", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for model, weights in KINDS:
        if options.model not in (None, model) or options.weights not in (None, weights):
            continue
        print(f"==> {model}, {weights} weights: finding the calls", flush=True)
        place = options.folder / f"{model}_{weights}.calls"
        if not (options.same_calls and place.is_file()):
            place.write_bytes(pickle.dumps(decoding_calls(model, weights, options.jobs)))
        calls = pickle.loads(place.read_bytes())
        for target in (options.target,) if options.target else TARGETS:
            name = f"{model}_{target}"
            database = Database(options.folder / f"{name}.sqlite3")
            tune(calls, target, database, options.jobs)
            print(f"{write(database, SHIPPED / f'{name}.jsonl')} records in {name}.jsonl", flush=True)


if __name__ == "__main__":
    main()
