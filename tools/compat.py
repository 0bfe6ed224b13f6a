"""Compiles every Triton template with several releases of Triton, each installed in a folder of its own.

    python tools/compat.py [--releases 3.6.0,3.7.1] [--targets sm_90a,sm_103a] [--folder .cache/compat] [--json FILE]
        [--write FILE]

The calls are those of a decoding step and of a prompt of V4.1, with plain and with stored weights, captured once with
the installed releases. Each release then compiles them in a process that finds it before the installed one. Exit status
1 if anything did not compile.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
TARGETS = ("sm_90a", "sm_100a", "sm_103a")
ROLES = (("decode", 8, 1), ("prefill", 1, 4096))


def capture(path: Path) -> None:
    """The calls of the released V4.1, pickled."""
    from dscompile.models.deepseek_v41 import DeepseekV41Config
    from dscompile.tuning.calls import merged
    from dscompile.workload import v41_calls

    found = []
    for role, batch, tokens in ROLES:
        for stored in (False, True):
            config = DeepseekV41Config.released()
            found += v41_calls(config, "sm_103a", role, batch, 8192, tokens, stored=stored)  # type: ignore[arg-type]
    path.write_bytes(pickle.dumps(merged(found)))


def install(release: str, folder: Path) -> Path:
    """The folder with that release of Triton, alone."""
    place = folder / f"triton-{release}"
    if not (place / "triton").is_dir():
        print(f"==> installing Triton {release} into {place}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
        subprocess.run([*command, f"triton=={release}"], check=True)
    return place


def compile_all(calls: Path, targets: list[str]) -> None:
    """In a process with one release: a line of JSON for every target."""
    import triton

    from dscompile.targets import get_target
    from dscompile.tuning.build import first_only, plan, template_named
    from dscompile.tuning.disassembly import ToolError, read
    from dscompile.tuning.offline import OfflineCompileError, compile_launch, launches_of

    for name in targets:
        target = get_target(name)
        jobs, failures = plan(pickle.loads(calls.read_bytes()), target, first_only)
        reasons, kernels = [f"{f.call.op}: {f.reason}" for f in failures], 0
        spills: int | None = 0
        for job in jobs:
            template = template_named(job.call.op, job.template)
            for launch in launches_of(template, job.call.meta_args(), job.config, target):
                try:
                    kernel = compile_launch(launch, target)
                except OfflineCompileError as error:
                    reasons.append(str(error))
                    continue
                kernels += 1
                try:
                    facts = read(kernel.cubin)
                    spills = None if spills is None else spills + bool(facts.spills or facts.stack_bytes)
                except ToolError:  # a release may compile for more than its own disassembler knows
                    spills = None
        row = {"triton": triton.__version__, "target": name, "kernels": kernels, "spilling": spills, "failed": reasons}
        print(json.dumps(row), flush=True)


def document(rows: list[dict[str, Any]]) -> str:
    """The result as a page of the documentation."""
    lines = [
        "# Releases of Triton",
        "",
        "*Compiled only.* Written by `make compat`: the kernels of a decoding step (batch 8) and of a prompt (4,096",
        "tokens) of the released V4.1, with plain and with stored weights, first config of every template, compiled by",
        "several releases of Triton. `spilling`: kernels with spilled registers, `?` where the release has no",
        "disassembler for the target.",
        "",
        "| Triton | target | kernels | spilling | failed |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        spilling = row.get("spilling")
        cells = row["triton"], row["target"], row["kernels"], "?" if spilling is None else spilling, len(row["failed"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    reasons = [f"- {row['triton']}, {row['target']}: {reason}" for row in rows for reason in row["failed"]]
    return "\n".join([*lines, *(["", "Failed:", "", *reasons] if reasons else [])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--releases", default=",".join(RELEASES))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--folder", type=Path, default=Path(".cache/compat"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="a Markdown file for the result")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.targets.split(",")
    if options.inside:
        compile_all(options.inside, targets)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    calls = (options.folder / "calls.pickle").resolve()
    print("==> finding the calls of V4.1", flush=True)
    capture(calls)
    rows = []
    for release in options.releases.split(","):
        place = install(release, options.folder).resolve()
        environment = {
            **os.environ, "PYTHONPATH": f"{place}:{Path.cwd()}", "TRITON_CACHE_DIR": str(place / "cache"),
            "TRITON_DEFAULT_FP_FUSION": "0",
        }  # fmt: skip
        command = [sys.executable, __file__, "--inside", str(calls), "--targets", options.targets]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(found) < len(targets):
            missing = targets[len(found) :]
            found.append(
                {"triton": release, "target": missing[0], "kernels": 0, "failed": [f"ended {done.returncode}"]}
            )
        for row in found:
            counts = f"{row['kernels']} kernels, {row.get('spilling', 0)} spilling, {len(row['failed'])} failed"
            print(f"Triton {row['triton']}, {row['target']}: {counts}", flush=True)
            for reason in row["failed"]:
                print(f"    {reason}")
        rows += found
    if options.write:
        options.write.write_text(document(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
