"""Two DeepSeek miniatures through `torch.compile(backend="dsv4")`: the tokens of eager, what was recognised, how fast.

    python examples/quickstart.py [--dtype bfloat16] [--tokens 16] [--report coverage.html]

One is this project's DeepSeek-V4.1, the other transformers' DeepSeek-V4, both with random weights and one layer of
every kind. A run takes two to three minutes on two cores, nearly all of it compiling. Exit status 1: nothing was
recognised, or tokens differ from eager's where rounding cannot be the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import dscompile
from dscompile.integrations.transformers import StaticV4Cache, prepare
from dscompile.miniatures import v4_model, v41_model

PROMPT, ROUNDS = 192, 5
PARTS = ("prefill", "decode")

# Larger than the miniatures' own sizes, so that there is something to speed up; compiling takes as long either way.
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 8, "head_dim": 64, "q_lora_rank": 128,
    "moe_intermediate_size": 128, "sliding_window": 32, "index_head_dim": 32, "index_topk": 16, "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
}  # fmt: skip
# Window only; own rows of 2 tokens; those again; own rows of 1 token, which name candidates; an index among those.
V41_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 5, "compress_ratios": (0, 2, 2, 1, 1), "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3, 4), "candidate_source_layer_id": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model, how to make its static cache, and how to call it: (forward, ids, first position, cache) -> logits."""

    name: str
    model: nn.Module
    new_cache: Callable[[], Any]
    call: Callable[[Callable[..., Any], Tensor, int, Any], Tensor]


def v41(dtype: torch.dtype, room: int) -> Subject:
    model = v41_model(dtype, **SIZES, **V41_LAYERS)

    def call(forward: Callable[..., Any], ids: Tensor, start: int, cache: Any) -> Tensor:
        return forward(ids, torch.arange(start, start + ids.shape[1])[None], cache)

    return Subject("V4.1", model, lambda: model.new_cache(1, room), call)


def v4(dtype: torch.dtype, room: int) -> Subject:
    model = prepare(as_loaded(v4_model(**SIZES), dtype))

    def call(forward: Callable[..., Any], ids: Tensor, start: int, cache: Any) -> Tensor:
        return forward(ids, cache=cache).logits  # the cache knows the position

    return Subject("V4", model, lambda: StaticV4Cache(model.config, 1, room, dtype), call)


def as_loaded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The dtypes that `from_pretrained(dtype=...)` gives: norms, mixes and some others stay float32."""
    for name, weight in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules_strict):
            weight.data = weight.data.to(dtype)
    return model


class Run(NamedTuple):
    tokens: Tensor  # int64 [n]
    logits: Tensor  # float32 [n, vocab], what each token was chosen from
    seconds: list[float]  # of the prefill, then of each decode step


@torch.no_grad()
def greedy(
    subject: Subject, forward: Callable[..., Any], count: int, after_prefill: Callable[[], None] = lambda: None
) -> Run:
    """`count` greedy tokens: one call with the whole prompt, then one call per token."""
    ids, start, cache = torch.arange(PROMPT)[None] * 7 % 512, 0, subject.new_cache()
    tokens, logits, seconds = [], [], []
    for _ in range(count):
        began = time.perf_counter()
        last = subject.call(forward, ids, start, cache)[:, -1].float()
        seconds.append(time.perf_counter() - began)
        start += ids.shape[1]
        ids = last.argmax(-1, keepdim=True)
        tokens.append(ids[0])
        logits.append(last)
        if len(tokens) == 1:
            after_prefill()
    return Run(torch.cat(tokens), torch.cat(logits), seconds)


class Outcome(NamedTuple):
    subject: str
    report: dscompile.Report
    eager: list[Run]
    compiled: list[Run]
    compile_seconds: list[float]  # of the first prefill and the first decode step, first run included


def demonstrate(subject: Subject, count: int, step: Callable[[str], None]) -> Outcome:
    compiled = torch.compile(subject.model, backend="dsv4")  # the only line that an existing program needs

    step(f"{subject.name}: eager")
    eager = [greedy(subject, subject.model, count)]
    step(f"{subject.name}: compiling the prefill")
    with dscompile.collect() as report:
        got = [greedy(subject, compiled, count, lambda: step(f"{subject.name}: compiling the decode step"))]
    for turn in range(ROUNDS):  # in turn, so that both meet the machine in the same state
        step(f"{subject.name}: measuring, round {turn + 1}")
        eager.append(greedy(subject, subject.model, count))
        got.append(greedy(subject, compiled, count))
    return Outcome(subject.name, report, eager[1:], got[1:], got[0].seconds[:2])


def coverage(graph: dscompile.report.GraphReport, title: str) -> Table:
    """Matches by family (rows) and layer (columns)."""

    def place(layer: str) -> str:
        return f"layer {layer.rsplit('.', 1)[1]}" if layer.rsplit(".", 1)[-1].isdigit() else "other"

    found = Counter((match.family, place(match.layer)) for match in graph.matches)
    columns = sorted({column for _, column in found})
    table = Table("recognised", *columns, title=title, title_justify="left", show_edge=False, pad_edge=False)
    for family in sorted({family for family, _ in found}):
        table.add_row(family, *(str(found[family, column] or "") for column in columns))
    return table


def describe(outcome: Outcome) -> Iterator[Any]:
    for graph, what in zip(outcome.report.graphs, PARTS):
        if what == PARTS[0]:
            yield coverage(graph, f"{outcome.subject} {what}")
        yield (f"  {what}: {len(graph.matches)} matches, {len(graph.misses)} near misses, "
               f"{graph.nodes_before} -> {graph.nodes_after} operations")  # fmt: skip
        if graph.misses:
            reasons = Counter(f"{miss.family}/{miss.pattern}: {miss.reason}" for miss in graph.misses)
            yield from (f"    near miss, {count} x {reason}" for reason, count in reasons.most_common(3))


def failures(outcome: Outcome, dtype: torch.dtype) -> Iterator[str]:
    """What must not happen."""
    graphs = outcome.report.graphs
    if len(graphs) < 2 or not all(graph.matches for graph in graphs):
        yield f"{outcome.subject}: nothing was recognised in one of {len(graphs)} graphs (2 expected)"
    eager, got = outcome.eager[0], outcome.compiled[0]
    if not got.logits.isfinite().all():
        yield f"{outcome.subject}: logits are not finite"
    differing = (eager.tokens != got.tokens).nonzero()
    if dtype is not torch.float32 or not len(differing):
        return
    step = int(differing[0])
    margin = float(eager.logits[step, eager.tokens[step]] - eager.logits[step, got.tokens[step]])
    spread = float(eager.logits[step].std())
    if margin > 0.02 * spread:  # V4.1 rounds to 4 bits: a last-bit difference can move a value by a whole step
        yield f"{outcome.subject}: token {step} differs in float32, and it was no near tie ({margin:.2g})"


def comparison(outcomes: list[Outcome]) -> Table:
    table = Table("", "tokens", "logit diff", "compile s", "eager ms", "dsv4 ms", "speed-up",
                  title=f"dsv4 beside eager: medians of {ROUNDS} runs in turn, measured here, now",
                  title_justify="left", show_edge=False, pad_edge=False)  # fmt: skip
    for outcome in outcomes:
        eager, got = outcome.eager[0], outcome.compiled[0]
        equal = int((eager.tokens == got.tokens).long().cumprod(0).sum())
        same = slice(0, equal + 1)  # both saw the same input up to the first token that differs
        difference = float((eager.logits[same] - got.logits[same]).abs().max())
        for part, calls, compiling in zip(PARTS, (slice(1), slice(1, None)), outcome.compile_seconds):
            slow, fast = (statistics.median(s for run in runs for s in run.seconds[calls]) * 1e3
                          for runs in (outcome.eager, outcome.compiled))  # fmt: skip
            shown = (f"{equal}/{len(eager.tokens)}", f"{difference:.1g}") if part == PARTS[0] else ("", "")
            times = f"{compiling:.0f}", f"{slow:.1f}", f"{fast:.1f}", f"{slow / fast:.1f} x"
            table.add_row(f"{outcome.subject} {part}", *shown, *times)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=16, help="to generate, at least 2")
    parser.add_argument("--only", choices=("v41", "v4"), help="one of the two models")
    parser.add_argument("--report", help="a file for the full reports (.html, .json or text)")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    makers = [make for name, make in (("v41", v41), ("v4", v4)) if options.only in (None, name)]
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
    console = Console()
    outcomes = []
    shown = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*shown, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(makers) * (4 + ROUNDS))

        def step(what: str) -> None:
            progress.update(task, description=what)
            progress.advance(task)
            if not console.is_terminal:
                print(f"[{time.perf_counter() - began:5.0f} s] {what}", flush=True)

        began = time.perf_counter()
        for make in makers:
            step(f"building {make.__name__}")
            outcomes.append(demonstrate(make(dtype, PROMPT + options.tokens), options.tokens, step))
    for outcome in outcomes:
        console.print(*describe(outcome), sep="\n", soft_wrap=True)
    console.print(comparison(outcomes))
    if options.report:
        dscompile.Report([graph for outcome in outcomes for graph in outcome.report.graphs]).write(options.report)
    wrong = [line for outcome in outcomes for line in failures(outcome, dtype)]
    for line in wrong:
        console.print(f"FAILED {line}", style="red")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
