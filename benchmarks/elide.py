"""Prefill that runs its last layers on each prompt's tail, beside one that runs all of it, on the CPU.

    python benchmarks/elide.py                     # a prompt of 8192 tokens; some minutes on two cores
    python benchmarks/elide.py --tokens 4096 --layers 20 --json out.json
    python benchmarks/elide.py --quick             # tiny sizes: does it run?

A V4.1 of small sizes with the release's proportions: half of the layers, and one, up to the last KV source, a window of
128. All forms run in one process, in turn, on the same weights, prompt and kernels; compiling is not counted. Logits
are those of the last token of each prompt, compared with the run over everything: the weights are random, so how large
the effect of an approximation is says something about the arithmetic and nothing about the released model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dscompile
from dscompile.miniatures import v41_model
from dscompile.models.deepseek_v41 import DeepseekV41ForCausalLM
from dscompile.models.deepseek_v41.generate import prefill

Form = tuple[str, dict[str, Any]]


def sizes(layers: int, hidden: int, window: int, tokens: int) -> dict[str, Any]:
    """Changes to the miniature: a window layer, Full layers of ratio 2, then the last source and what reads it."""
    source = layers // 2
    middle = max(1, source // 2)
    later = tuple(range(source + 2, layers, 4))
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "sliding_window": window,
        "max_position_embeddings": max(4096, tokens),
        "compress_ratios": (0, *(2,) * (source - 1), *(1,) * (layers - source)),
        "kv_source_layer_ids": tuple(sorted({1, middle, source})),
        "index_source_layer_ids": tuple(sorted({1, middle, source, *later})),
        "candidate_source_layer_id": source,
        "candidate_topk_blocks": 64,
        "index_topk": min(64, tokens // 8),
    }


def forms(window: int, layers: int, multiples: tuple[int, ...] = (1, 2, 4)) -> list[Form]:
    """Name and options: everything, the exact form, and bounded tails of so many windows."""
    behind = layers - layers // 2
    needed = window + (behind - 1) * (window - 1)
    tails = [window * multiple for multiple in multiples if window * multiple < needed]
    exact: list[Form] = [("all tokens", {}), ("exact", {"role": "prefill", "elide": "exact"})]
    return exact + [(f"bounded {n}", {"role": "prefill", "elide": "bounded", "elide_tail": n}) for n in tails]


def compiled(model: DeepseekV41ForCausalLM, options: dict[str, Any], inductor: bool) -> Any:
    return torch.compile(model, backend="dsv4", options={"inductor": inductor, **options}, fullgraph=True)


def run(form: Any, model: DeepseekV41ForCausalLM, ids: Tensor, capacity: int) -> tuple[Tensor, float]:
    """Logits [1, vocab] after the prompt int64 [1, T] and the seconds it took, into a fresh cache of `capacity`."""
    cache = model.new_cache(1, capacity)
    positions = torch.arange(ids.shape[1])[None]
    started = time.perf_counter()
    logits = prefill(form, ids, positions, cache)
    return logits, time.perf_counter() - started


def effect(want: Tensor, got: Tensor) -> dict[str, float]:
    """Of logits [B, vocab]: relative error, share of equal best tokens, mean overlap of the best ten."""
    tens = [len(set(a.tolist()) & set(b.tolist())) / 10 for a, b in zip(want.topk(10).indices, got.topk(10).indices)]
    return {
        "error": float((got - want).norm() / want.norm()),
        "best": float((got.argmax(-1) == want.argmax(-1)).float().mean()),
        "ten": statistics.mean(tens),
    }


def measure(options: argparse.Namespace, say: Any) -> list[dict[str, Any]]:
    """One record per form: seconds of every repetition, the report's words, and the effect on logits."""
    changes = sizes(options.layers, options.hidden, options.window, options.tokens)
    model = v41_model(torch.float32, **changes)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, options.tokens), generator=generator)
    several = torch.randint(model.config.vocab_size, (options.prompts, options.effect_tokens), generator=generator)
    records: list[dict[str, Any]] = []
    runs, want = [], None
    for name, settings in forms(options.window, options.layers, tuple(options.tails)):
        form = compiled(model, settings, options.inductor)
        say(f"{name}: compiling, first prompt")
        run(form, model, prompt, options.tokens)
        elision = dscompile.last_report().graphs[-1].elision
        runs.append(form)
        records.append({"form": name, "report": elision.lines() if elision else [], "seconds": []})
        if elision:
            records[-1] |= {"tail": elision.tail, "exact": elision.exact}
    for repeat in range(options.repeat):
        for record, form in zip(records, runs, strict=True):
            record["seconds"].append(run(form, model, prompt, options.tokens)[1])
            say(f"repetition {repeat + 1}, {record['form']}: {record['seconds'][-1]:.2f} s")
    for record, form in zip(records, runs, strict=True):
        say(f"{record['form']}: logits of {options.prompts} prompts of {options.effect_tokens} tokens")
        logits = torch.cat([run(form, model, each[None], options.tokens)[0] for each in several])
        want = logits if want is None else want
        record["effect"] = effect(want, logits)
    base = statistics.median(records[0]["seconds"])
    for record in records:
        record["median"] = statistics.median(record["seconds"])
        record["times_faster"] = base / record["median"]
    return records


def table(records: list[dict[str, Any]]) -> Table:
    shown = Table("form", "tail", "s", "times faster", "logits: relative error", "same best token", "same best ten")
    for record in records:
        seen = record["effect"]
        shown.add_row(
            record["form"], str(record.get("tail", "")), f"{record['median']:.2f}", f"{record['times_faster']:.2f}",
            f"{seen['error']:.2e}", f"{seen['best']:.0%}", f"{seen['ten']:.0%}",
        )  # fmt: skip
    return shown


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the timed prompt")
    parser.add_argument("--layers", type=int, default=10, help=">= 6")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--tails", type=int, nargs="*", default=[1, 2, 4], help="bounded tails, in windows")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="prompts whose logits are compared")
    parser.add_argument("--effect-tokens", type=int, default=1024, help="tokens of each of them")
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor (long on few cores)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.layers, options.hidden, options.window = 160, 6, 64, 16
        options.repeat, options.prompts, options.effect_tokens = 1, 2, 120
    if options.layers < 6:
        parser.error(f"--layers: {options.layers}, allowed: >= 6")
    return options


def main(arguments: list[str] | None = None) -> None:
    options, console = parse(arguments), Console(stderr=True)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    records = measure(options, lambda text: console.print(text, highlight=False))
    Console(width=140).print(table(records))
    for record in records:
        for line in record["report"]:
            print(line)
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": None}, "forms": records}, indent=1))


if __name__ == "__main__":
    main()
