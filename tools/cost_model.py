"""Writes docs/cost_model.md: how far the cost model's order of configs agrees with orders by single facts.

python tools/cost_model.py [--target sm_103a] [--batch 8,256] [--context 8k] [--jobs 2]
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path

from dscompile import compat
from dscompile.kernel_options import gpu, sizes
from dscompile.tuning.agreement import FACTS, Agreement, agreements
from dscompile.tuning.build import compile_jobs, plan
from dscompile.tuning.calls import merged
from dscompile.workload_models import read_config, workload_calls

PLACE = Path(__file__).resolve().parent.parent / "docs" / "cost_model.md"
TEXT = """# The cost model, and how little is known about it

*Modelled*, nothing here is measured. Written by `make cost-model`: every config of every Triton template for a
decoding step of the released V4.1 (batch {batch}, room for {context} tokens) on {target}, compiled with Triton
{triton}.

`dscompile.tuning.predict` gives a call a time from its compiled kernels; `dscompile tune` without a GPU orders
configs by it. Nobody has compared that order with a GPU's. What can be done without one is to compare it with orders
that single facts of the same machine code give: fewer instructions issued, more bytes in flight, fewer tensor core
instructions, fewer spills. Numbers are Kendall's tau: 1 is the same order, 0 no relation, -1 the opposite; `-` where
a fact is the same for all configs. They are means over the calls of a template.

Agreement is no evidence for the model, since both sides come from the same code. Disagreement is where to measure
first.

{table}

`spread`: slowest predicted config over the quickest, the largest of the calls. `bound by`: what the model takes for
the slowest part, over all calls and configs. `unknown loops`: configs with a loop whose rounds the model cannot tell,
because nothing in it loads from global memory into registers or by ordinary asynchronous copies; it counts them once.

## Where the model only guesses

- **Latency-bound calls.** {latency:.0%} of these configs take no longer than the model's constant for one load from
  memory. Their order is that of the number of launches, and of configs with one launch it is no order at all: the
  first of the template wins, or whichever comes first. A spread of 1 says so.
- **Loops.** How often a loop runs is inferred from the bytes that the kernel must read at least. What blocks read
  again (activations in every tile of a product) is left out, so instruction counts of products are too low, those of
  small tiles most. Loops fed by TMA count once.
- **Overlap.** Memory, arithmetic and issue are taken to overlap fully. A kernel without software pipelining does not
  do that; stages therefore only show through shared memory and occupancy.
- **Bytes in flight.** All loads of a thread up to 256 bytes count as outstanding at once, wherever they stand.
- **Constants.** Launch {launch} us, latency {delay} us and a clock of {clock} GHz are guesses; they decide between
  one kernel and two (a split and its combination).
- **Caches, bank conflicts, barriers, atomic operations** are not in it.

A measured record always goes before a modelled one (see [kernels](kernels.md)).
"""


def table(found: list[Agreement]) -> str:
    """One line for each template."""
    by_template: dict[str, list[Agreement]] = defaultdict(list)
    for each in found:
        by_template[each.template].append(each)
    names = ("template", "calls", "configs", "spread", "bound by", "unknown loops", *FACTS)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for template, group in sorted(by_template.items()):
        bounds = Counter(bound for each in group for bound in each.bounds)
        cells = [
            template, str(len(group)), str(max(each.configs for each in group)),
            f"{max(each.spread for each in group):.2f}", ", ".join(f"{n} {count}" for n, count in bounds.most_common()),
            str(sum(each.loops for each in group)),
        ]  # fmt: skip
        for name in FACTS:
            known = [tau for each in group if (tau := each.tau[name]) is not None]
            cells.append(f"{sum(known) / len(known):.2f}" if known else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    from dscompile.tuning import predict

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="sm_103a")
    parser.add_argument("--batch", default="8,256")
    parser.add_argument("--context", default="8k")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    target = gpu(options.target)
    shapes = [(batch, context) for batch in sizes(options.batch) for context in sizes(options.context)]
    steps = workload_calls(read_config("v41"), target.name, "decode", shapes, 1, options.jobs)
    calls = merged(call for step in steps for call in step)
    jobs, _ = plan(calls, target, lambda call, template, space: space)
    results = dict(compile_jobs(jobs, target, options.jobs, code=False))
    built = [result for job in jobs if isinstance(result := results[job], list)]
    found = agreements(built, target)
    bounds = Counter(bound for each in found for bound in each.bounds)
    PLACE.write_text(
        TEXT.format(
            batch=options.batch,
            context=options.context,
            target=target.name,
            triton=compat.version_text("triton"),
            table=table(found),
            latency=bounds["latency"] / max(1, bounds.total()),
            launch=predict.LAUNCH_US,
            delay=predict.LATENCY_US,
            clock=predict.CLOCK_HZ / 1e9,
        )  # fmt: skip
    )
    print(f"wrote {PLACE}: {len(found)} calls, {len(built)} of {len(jobs)} configs compiled")


if __name__ == "__main__":
    main()
