"""Writes dscompile/tuning/shipped/: the best config of every kernel of the released models, modelled, for every target.

python tools/tuning_records.py [--model v41] [--target sm_103a] [--folder .cache/tuning]

What was tuned stays in the folder, so that after a change only what changed is tuned again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "dscompile" / "tuning" / "shipped"
MODELS = {"v41": ("plain", "stored"), "v4-flash": ("plain",)}
TARGETS = ("sm_103a", "sm_100a", "sm_90a")
BATCHES = "8,16,32,64,128,256"


def write(database: Path, place: Path) -> int:
    """Of each key the best record, if the kernel's source is still the same; without the time of day."""
    from dscompile.lowering.template import triton_templates
    from dscompile.tuning.database import Database
    from dscompile.tuning.selection import source_hash

    current = {t.name: source_hash(t) for found in triton_templates().values() for t in found}
    known = Database(database)
    best: dict[tuple[object, str], dict[str, object]] = {}
    for record in known.records():  # the quickest first
        if current.get(record.key.template) == record.key.source_hash:
            best.setdefault((record.key, record.kind), {**asdict(record), "when": 0.0})
    lines = sorted(json.dumps(record, sort_keys=True) for record in best.values())
    place.parent.mkdir(exist_ok=True)
    place.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "tuning")
    parser.add_argument("--jobs", default=str(os.cpu_count() or 1))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for model in options.model or MODELS:
        for target in options.target or TARGETS:
            name = f"{model}_{target}"
            database = options.folder / f"{name}.sqlite3"
            for weights in MODELS[model]:
                command = [
                    sys.executable, "-m", "dscompile.cli", "tune", "--model", model, "--target", target,
                    "--weights", weights, "--batch", BATCHES, "--context", "8k", "--jobs", options.jobs,
                    "--database", str(database),
                ]  # fmt: skip
                subprocess.run(command, check=True)
            print(f"{write(database, SHIPPED / f'{name}.jsonl')} records in {name}.jsonl", flush=True)


if __name__ == "__main__":
    main()
