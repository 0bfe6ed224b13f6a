"""Eager, stock Inductor and dsv4 on the CPU, in one run and in turn, for DeepSeek-V4 (transformers) and V4.1.

    python benchmarks/cpu.py                              # everything at the default sizes; an hour or more
    python benchmarks/cpu.py --models v41 --modes eager,dsv4 --prompts 2048 --contexts 8192 --batches 1 --json out.json
    python benchmarks/cpu.py --quick                      # tiny sizes: does it run?
    python benchmarks/cpu.py --compile-cost               # compiling 8 layers beside compiling 40

Every mode of a model is a process of its own that stays alive, and each in turn is asked for one repetition, so that
all of them meet the machine in the same state. Weights and inputs are seeded and the same everywhere, and outputs are
compared. Compiling starts from an empty cache, and from nothing for every case. Decoding starts from a cache filled
with random rows; V4 uses `StaticV4Cache` for it in every mode and no cache for prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cpu_cases import MODELS, MODES, Case, Setup, cases
from cpu_process import Worker, WorkerError, cache_root
from cpu_tables import case_table, compile_cost_table, compile_table, machine, memory_table, print_all
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Say = Callable[..., None]


class Team:
    """The workers of one model, one a mode; a worker that ended is started again for the next case."""

    def __init__(self, options: argparse.Namespace, model: str, caches: Path, say: Say) -> None:
        self.options, self.model, self.caches, self.say = options, model, caches, say
        self.workers: dict[str, Worker] = {}
        self.built: dict[str, Any] = {}
        self.skipped: dict[tuple[str, str], str] = {}  # (mode, phase) -> why nothing more is tried
        self.failures: list[dict[str, str]] = []

    def setup(self, mode: str) -> Setup:
        o = self.options
        return Setup(self.model, mode, o.hidden, o.layers, o.steps, o.quick, dtype=o.dtype, threads=o.threads)

    def worker(self, mode: str) -> Worker:
        if mode not in self.workers:
            folder = self.caches / f"{self.model}-{mode}"
            folder.mkdir(exist_ok=True)
            self.say(f"{self.model}, {mode}: building the model")
            worker = self.workers[mode] = Worker(self.setup(mode), folder, folder / "output.log")
            try:
                self.built[mode] = worker.ask("build", timeout=self.options.timeout)
            except WorkerError:
                worker.end()
                del self.workers[mode]
                raise
        return self.workers[mode]

    def ask(self, mode: str, command: str, case: Case, timeout: float) -> Any:
        """The worker's result, or WorkerError, with the end of its output in the record of the run."""
        try:
            return self.worker(mode).ask(command, case, timeout)
        except WorkerError as error:
            log = self.caches / f"{self.model}-{mode}" / "output.log"
            self.failures.append({"mode": mode, "case": str(case), "error": str(error), "output": tail(log)})
            if error.gone:
                self.workers.pop(mode, None)
            raise

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()


def run_case(team: Team, case: Case, say: Say) -> dict[str, Any]:
    """All modes of one case: compile in turn, then one repetition each in turn."""
    options = team.options
    result: dict[str, Any] = {"model": team.model, **vars(case), "name": str(case), "load": os.getloadavg()[0]}
    modes: dict[str, dict[str, Any]] = {mode: {} for mode in options.modes}
    outputs: dict[str, np.ndarray] = {}
    for mode, record in modes.items():
        say(f"{team.model}, {case}: {mode}, {'first run' if mode == 'eager' else 'compiling'}")
        if reason := team.skipped.get((mode, case.phase)):
            record["error"] = reason
            continue
        try:
            record |= team.ask(mode, "prepare", case, options.stock_timeout if mode == "stock" else options.timeout)
            outputs[mode] = record.pop("logits")
            record["repetitions"] = []
        except WorkerError as error:
            record["error"] = str(error)
            if error.gone:
                team.skipped[mode, case.phase] = f"not tried ({case} {error})"
    repeat(team, case, modes, say)
    reference = next((mode for mode in modes if mode in outputs), None)
    for mode, record in modes.items():
        summarise(record)
        if mode in outputs and reference is not None:
            record |= {"compared_with": reference, **agreement(outputs[reference], outputs[mode])}
    result["modes"] = modes
    result["ratios"] = {
        f"dsv4 vs {other}": modes[other]["median_seconds"] / modes["dsv4"]["median_seconds"]
        for other in ("stock", "eager")
        if all("median_seconds" in modes.get(mode, {}) for mode in (other, "dsv4"))
    }
    return result


def repeat(team: Team, case: Case, modes: dict[str, dict[str, Any]], say: Say) -> None:
    """Repetitions in turn, beginning with another mode each time; fewer (at least 3) if they take long."""
    began = time.perf_counter()
    for turn in range(team.options.repeats):
        if turn >= 3 and time.perf_counter() - began > team.options.case_seconds:
            say("", advance=team.options.repeats - turn)
            return
        say(f"{team.model}, {case}: repetition {turn + 1}")
        ready = [mode for mode, record in modes.items() if "error" not in record]
        for mode in ready[turn % max(1, len(ready)) :] + ready[: turn % max(1, len(ready))]:
            try:
                modes[mode]["repetitions"].append(team.ask(mode, "repeat", case, team.options.timeout))
            except WorkerError as error:
                modes[mode]["error"] = str(error)


def summarise(record: dict[str, Any]) -> None:
    """Medians and the like, from the repetitions."""
    if not record.get("repetitions"):
        return
    seconds = [repetition["seconds"] for repetition in record["repetitions"]]
    record["median_seconds"], record["min_seconds"] = statistics.median(seconds), min(seconds)
    record["median_cpu_seconds"] = statistics.median(r["cpu_seconds"] for r in record["repetitions"])
    record["peak_bytes"] = max(repetition["peak_bytes"] for repetition in record["repetitions"])


def agreement(reference: np.ndarray, got: np.ndarray) -> dict[str, float]:
    """Of logits [rows, vocab]: the mean and lowest cosine of a row, and how often the likeliest token is the same."""
    a, b = reference.astype(np.float64), got.astype(np.float64)
    cosine = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    same = (a.argmax(-1) == b.argmax(-1)).mean()
    return {"cosine_mean": float(cosine.mean()), "cosine_min": float(cosine.min()), "same_token": float(same)}


def run_models(options: argparse.Namespace, caches: Path, progress: Progress, results: dict[str, Any]) -> None:
    """Fills `results` case by case, so that an interrupted run still reports what it has."""
    todo = cases(options.prompts, options.contexts, options.batches)
    steps = len(options.models) * (len(options.modes) + len(todo) * (len(options.modes) + options.repeats))
    task = progress.add_task("starting", total=steps)

    def say(what: str, advance: int = 1) -> None:
        announce(progress, task, what, advance)

    for model in options.models:
        team = Team(options, model, caches, say)
        results["sizes"][model] = team.setup("eager").sizes()
        try:
            for case in todo:
                results["cases"].append(run_case(team, case, say))
                results["workers"][model] = team.built
        finally:
            results["failures"] += team.failures
            team.end()


def run_compile_cost(options: argparse.Namespace, caches: Path, progress: Progress, results: dict[str, Any]) -> None:
    """Compiles V4.1's miniature with 8 and with 40 layers, a prompt of 40 tokens and a decoding step."""
    modes = [mode for mode in options.modes if mode != "eager"]
    todo = [(mode, count) for mode in modes for count in (8, 40)]
    task = progress.add_task("starting", total=2 * len(todo))
    for mode, count in todo:
        folder = caches / f"miniature-{count}-{mode}"
        folder.mkdir(exist_ok=True)
        setup = Setup("v41", mode, miniature=count, steps=1, dtype=options.dtype, threads=options.threads)
        worker = Worker(setup, folder, folder / "output.log")
        try:
            worker.ask("build")
            for case in (Case("prefill", 1, 40), Case("decode", 1, 40)):
                announce(progress, task, f"{mode}: {count} layers, {case}", 1)
                row = {"mode": mode, "layers": count, "name": str(case), "load": os.getloadavg()[0]}
                results["compile_cost"].append(row)
                limit = options.stock_timeout if mode == "stock" else options.timeout
                row |= worker.ask("prepare", case, limit)
                del row["logits"]
        except WorkerError as error:
            results["compile_cost"][-1]["error"] = str(error)
        finally:
            worker.end()


def tail(log: Path, size: int = 3000) -> str:
    return log.read_text(errors="replace")[-size:] if log.exists() else ""


def announce(progress: Progress, task: Any, what: str, advance: int) -> None:
    progress.update(task, advance=advance, **({"description": what} if what else {}))
    if what and not progress.console.is_terminal:
        print(f"[{progress.tasks[0].elapsed or 0:6.0f} s] {what}", file=sys.stderr, flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(allowed):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}, allowed: {', '.join(allowed)}")
        return [name for name in allowed if name in found]

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names(tuple(MODELS)), default=[*MODELS], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", type=names(MODES), default=[*MODES], help=f"of {', '.join(MODES)}")
    parser.add_argument("--prompts", type=numbers, help="prompt lengths (default 512,2048,4096)")
    parser.add_argument("--contexts", type=numbers, help="tokens seen when decoding starts (default 1024,8192)")
    parser.add_argument("--batches", type=numbers, help="batch sizes of decoding (default 1,8)")
    parser.add_argument("--full", action="store_true", help="also a prompt of 8192 tokens (eager takes up to 20 GB)")
    parser.add_argument("--repeats", type=int, help="repetitions of a case (default 7)")
    parser.add_argument("--case-seconds", type=float, default=240, help="no more repetitions after this, but for 3")
    parser.add_argument("--steps", type=int, help="tokens of one repetition of decoding (default 8)")
    parser.add_argument("--hidden", type=int, default=1024, help="model width")
    parser.add_argument("--layers", type=int, default=1, help="how often the layer pattern is repeated")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    parser.add_argument(
        "--stock-timeout", type=float, default=900, help="seconds that stock Inductor may compile a case"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for anything else")
    parser.add_argument("--keep-cache", type=Path, metavar="FOLDER", help="keep compiled code (and use what is there)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few cases: a smoke test")
    parser.add_argument("--compile-cost", action="store_true", help="only compile V4.1's miniature, 8 and 40 layers")
    options = parser.parse_args()
    usual = {"prompts": [512, 2048, 4096], "contexts": [1024, 8192], "batches": [1, 8], "repeats": 7, "steps": 8}
    quick = {"prompts": [48], "contexts": [64], "batches": [1], "repeats": 2, "steps": 2}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.full and 8192 not in options.prompts:
        options.prompts.append(8192)
    return options


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    empty: dict[str, Any] = {"sizes": {}, "workers": {}, "cases": [], "compile_cost": [], "failures": []}
    results = {**machine(options), **empty}
    shown = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    interrupted = False
    with cache_root(options.keep_cache) as caches, Progress(*shown, console=console, transient=True) as progress:
        try:
            (run_compile_cost if options.compile_cost else run_models)(options, caches, progress, results)
        except KeyboardInterrupt:
            interrupted = True
    results["load_at_end"] = os.getloadavg()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, default=str))
    tables = [compile_cost_table] if options.compile_cost else [case_table, memory_table]
    if not options.compile_cost and options.modes != ["eager"]:
        tables.append(compile_table)
    print_all(console, results, tables)
    for failure in results["failures"]:
        console.print(f"{failure['mode']}, {failure['case']}: {failure['error']}", style="red")
        console.print(failure["output"], style="dim", markup=False, highlight=False)
    failed = [record for case in results["cases"] for record in case["modes"].values() if "error" in record]
    broken = any("did not finish" not in record["error"] and "not tried" not in record["error"] for record in failed)
    return 1 if broken or interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
