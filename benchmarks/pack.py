"""Prompts of unlike lengths in one flat batch, beside the same prompts in a row each, on the CPU.

    python benchmarks/pack.py                      # 64 prompts of 1 to 512 tokens; some minutes on two cores
    python benchmarks/pack.py --longest 2048 --json out.json
    python benchmarks/pack.py --quick              # tiny sizes: does it run?

Both forms are the prefill loop of `dscompile.serving` over the same model, cache, prompts and kernels, with as many
tokens a step, in turn in one process; compiling is not counted. The first tokens that follow the prompts are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dscompile.kv.deepseek_v41 import PagedModel, paged_cache
from dscompile.miniatures import v41_model
from dscompile.serving.prefill import PrefillLoop
from dscompile.serving.requests import Request


def prompts(count: int, longest: int, vocab: int) -> list[Request]:
    """Lengths as they come in practice: many short, few long (log-uniform from 1 to `longest`)."""
    draw = random.Random(0)
    lengths = [min(longest, int(longest ** draw.random())) for _ in range(count)]
    return [Request(name, tuple(draw.choices(range(vocab), k=n)), 1) for name, n in enumerate(lengths)]


def run(loop: PrefillLoop, requests: list[Request]) -> tuple[dict[int, int], float, int]:
    """First token by request, seconds and steps until all prompts are stored."""
    for request in requests:
        loop.submit(request)
    first, steps, began = {}, 0, time.perf_counter()
    while loop.busy:
        for each in loop.step():
            first[each.request.name] = each.first
            loop.release(each.request.name)
        steps += 1
    return first, time.perf_counter() - began, steps


def measure(options: argparse.Namespace, say: Any) -> list[dict[str, Any]]:
    """One record per form: seconds of every repetition, steps, and how many first tokens equal those of rows."""
    model = v41_model(torch.float32, hidden_size=options.hidden)
    requests = prompts(options.prompts, options.longest, model.config.vocab_size)
    forward = torch.compile(model, backend="dsv4", options={"inductor": options.inductor}, fullgraph=True)
    loops, records = [], []
    for name, rows, width, packed in (
        ("rows", options.rows, options.step // options.rows, False),
        ("packed", options.step // options.tile, options.tile, True),
    ):
        cache = paged_cache(model.config, rows, options.rows * (options.longest + 64))
        loop = PrefillLoop(PagedModel(model, cache, rows, options.longest, forward), width, packed)
        say(f"{name}: {rows} rows of {width} tokens, compiling")
        loop.step()
        loops.append(loop)
        records.append({"form": name, "rows": rows, "width": width, "seconds": []})
    want: dict[int, int] = {}
    for repeat in range(options.repeat):
        for record, loop in zip(records, loops):
            first, seconds, record["steps"] = run(loop, requests)
            record["seconds"].append(seconds)
            want = want or first
            record["equal"] = sum(first[name] == token for name, token in want.items())
            say(f"repetition {repeat + 1}, {record['form']}: {seconds:.2f} s")
    tokens = sum(len(request.prompt) for request in requests)
    for record in records:
        record["median"] = statistics.median(record["seconds"])
        record["times_faster"] = records[0]["median"] / record["median"]
        record["filled"] = tokens / (record["steps"] * options.step)
    return records


def table(records: list[dict[str, Any]], prompts: int) -> Table:
    shown = Table("form", "rows x tokens", "steps", "filled", "s", "times faster", "same first tokens")
    for record in records:
        shown.add_row(
            record["form"], f"{record['rows']} x {record['width']}", str(record["steps"]), f"{record['filled']:.0%}",
            f"{record['median']:.2f}", f"{record['times_faster']:.2f}", f"{record['equal']} of {prompts}",
        )  # fmt: skip
    return shown


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--step", type=int, default=512, help="tokens of a step, padding included")
    parser.add_argument("--rows", type=int, default=4, help="prompts at a time, where each has a row")
    parser.add_argument("--tile", type=int, default=32, help="tokens of a row, where prompts are packed")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor (long on few cores)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.longest, options.step, options.tile, options.hidden, options.repeat = (
            6,
            40,
            64,
            8,
            64,
            1,
        )
    for name in ("rows", "tile"):
        size = getattr(options, name)
        if size < 1 or options.step % size or options.step // size < 2:
            parser.error(f"--{name}: {size}, allowed: a divisor of the {options.step} tokens of a step")
    return options


def main(arguments: list[str] | None = None) -> None:
    options, console = parse(arguments), Console(stderr=True)
    torch._dynamo.reset()
    records = measure(options, lambda text: console.print(text, highlight=False))
    Console(width=120).print(table(records, options.prompts))
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": None}, "forms": records}, indent=1))


if __name__ == "__main__":
    main()
