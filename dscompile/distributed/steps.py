"""One step of a role on one GPU: what it computes, reads and sends, and how long that takes. *Modelled*.

A part of a step takes the longer of its arithmetic and its memory traffic at data-sheet rates, parts follow one
another; the exchange follows too, or runs beside them all. A floor: how much of it is reached is for a measurement to
say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dscompile.distributed import costs
from dscompile.distributed.cluster import Cluster
from dscompile.distributed.costs import Line, RoleError, Span
from dscompile.distributed.plan import distinct_ranks
from dscompile.models.deepseek_v41.config import DeepseekV41Config

ELIDE = ("exact", "bounded", "none")
INSTEAD = {"fp4": "fp8", "fp8": "bf16"}  # what a product runs as on a machine without that operand type


@dataclass(frozen=True)
class Workload:
    """What every request asks for.

    input, output: tokens; hit: share of the input whose rows are found in a cache. batch: requests of every decode GPU
    in a step; per_user: tokens per second that a request gets at least, in place of a batch. chunk: tokens of every
    prefill GPU in a step. elide: what a prefill leaves out ("none": nothing). overlap: the exchange runs beside
    everything else.
    """

    input: int = 8192
    output: int = 1024
    hit: float = 0.0
    batch: int | None = 256
    per_user: float | None = None
    chunk: int = 8192
    elide: str = "bounded"
    overlap: bool = True

    def __post_init__(self) -> None:
        checks = (
            ("input", self.input, self.input >= 1, ">= 1"), ("output", self.output, self.output >= 2, ">= 2"),
            ("hit", self.hit, 0 <= self.hit < 1, "0 to less than 1"), ("chunk", self.chunk, self.chunk >= 1, ">= 1"),
            ("elide", self.elide, self.elide in ELIDE, ", ".join(ELIDE)),
            ("batch", self.batch, self.batch is None or self.batch >= 1, ">= 1"),
            ("per_user", self.per_user, self.per_user is None or self.per_user > 0, "> 0"),
            ("batch", self.batch, (self.batch is None) != (self.per_user is None), "either a batch or per_user"),
        )  # fmt: skip
        for name, value, good, allowed in checks:
            if not good:
                raise RoleError(f"{name}: {value!r}, allowed: {allowed}")

    @property
    def new(self) -> int:
        """Input tokens that a prefill computes: what is not found, at least the last one."""
        return self.input - int(self.hit * self.input)

    @property
    def decoded(self) -> int:
        """Output tokens of decode steps; the first one comes from the prefill."""
        return self.output - 1


@dataclass(frozen=True)
class Step:
    """One step on one GPU. tokens: what it brings a request forward by, over all requests."""

    tokens: float
    lines: tuple[Line, ...]
    dispatch_bytes: float
    combine_bytes: float

    @cached_property
    def flops(self) -> float:
        return sum(line.flops for line in self.lines)

    @cached_property
    def hbm_bytes(self) -> float:
        return sum(line.hbm_bytes for line in self.lines)


@dataclass(frozen=True)
class Times:
    """Microseconds of a step: parts that wait for arithmetic, parts that wait for HBM, the exchange.

    peak_us: all arithmetic at the peaks of its operand types, whatever else it waits for.
    """

    arithmetic_us: float
    hbm_us: float
    exchange_us: float
    peak_us: float

    @property
    def serial_us(self) -> float:
        return self.arithmetic_us + self.hbm_us + self.exchange_us

    @property
    def overlapped_us(self) -> float:
        return max(self.arithmetic_us + self.hbm_us, self.exchange_us)

    def step_us(self, overlap: bool) -> float:
        return self.overlapped_us if overlap else self.serial_us

    def limit(self, overlap: bool) -> str:
        """What most of the step waits for: "arithmetic", "HBM" or "link"."""
        if overlap and self.exchange_us >= self.arithmetic_us + self.hbm_us:
            return "link"
        shares = {"arithmetic": self.arithmetic_us, "HBM": self.hbm_us}
        if not overlap:
            shares["link"] = self.exchange_us
        return max(shares, key=lambda name: shares[name])


def tail(config: DeepseekV41Config, elide: str) -> int | None:
    """Tokens of a request that layers behind the last KV source run on in prefill; None: all."""
    window, behind = config.sliding_window, config.num_hidden_layers - 1 - costs.last_source(config)
    return {"bounded": window, "exact": window + max(behind - 1, 0) * (window - 1)}.get(elide)


def replayed(config: DeepseekV41Config, work: Workload) -> int:
    """Tokens in front of the new ones that run again, as window rows are not kept with a found beginning.

    Bounded: a window (model_v41 6). Else layers x (window - 1), so that every ring is exact (docs/kv.md).
    """
    window, layers = config.sliding_window, config.num_hidden_layers
    return min(work.input - work.new, window if work.elide == "bounded" else layers * (window - 1))


def prefill_step(config: DeepseekV41Config, work: Workload, ranks: int) -> Step:
    """The mean step over requests that follow one another, `work.chunk` tokens each step."""
    slots, source, again = slots_of(config, ranks), costs.last_source(config), replayed(config, work)
    run = work.new + again
    requests = work.chunk / run
    share = min(1.0, requests)
    every = Span(work.chunk, max(1.0, requests), work.input - run, work.input)
    kept = min(run, tail(config, work.elide) or run)
    rest = Span(requests * kept, requests, work.input - kept, work.input, share) if kept < run else every
    lines = [line for i in range(source) for line in costs.layer_lines(config, i, every, ranks, slots)]
    lines += costs.row_lines(config, source, every)
    for i in range(source, config.num_hidden_layers):
        lines += costs.layer_lines(config, i, rest, ranks, slots, rows=i != source)
    lines.append(costs.head_line(config, Span(requests, requests, work.input - 1, work.input, share)))
    routed = source * every.tokens + (config.num_hidden_layers - source) * rest.tokens
    return _step(config, ranks, requests * work.new, lines, routed)


def decode_step(config: DeepseekV41Config, ranks: int, batch: int, context: int) -> Step:
    """One token for each of `batch` requests of a GPU that see `context` tokens each."""
    span, slots = Span(batch, batch, context - 1, context), slots_of(config, ranks)
    layers = range(config.num_hidden_layers)
    lines = [line for i in layers for line in costs.layer_lines(config, i, span, ranks, slots)]
    return _step(config, ranks, batch, [*lines, costs.head_line(config, span)], len(layers) * batch)


def times(step: Step, cluster: Cluster, ranks: int) -> Times:
    """At the rates of the cluster's target and links.

    Raises:
        RoleError: a target whose rates are unknown.
        ClusterError: as `Cluster.rate`.
    """
    memory = cluster.target.hbm_bytes_per_s.value
    if not memory:
        raise RoleError(f"{cluster.name}: {cluster.target.name} has no known HBM rate, allowed: a GPU")
    found = {"arithmetic": 0.0, "HBM": 0.0}
    peak = 0.0
    for line in step.lines:
        arithmetic, traffic = line.flops / _peak(cluster, line.operand), line.hbm_bytes / memory
        peak += arithmetic
        found["arithmetic" if arithmetic > traffic else "HBM"] += max(arithmetic, traffic)
    rate, _ = cluster.rate(ranks)
    exchange = (step.dispatch_bytes + step.combine_bytes) / rate
    return Times(found["arithmetic"] * 1e6, found["HBM"] * 1e6, exchange * 1e6, peak * 1e6)


def slots_of(config: DeepseekV41Config, ranks: int) -> int:
    """Of a rank; where experts do not divide, with as many redundant ones as it takes."""
    return math.ceil(config.n_routed_experts / ranks)


def _step(config: DeepseekV41Config, ranks: int, tokens: float, lines: list[Line], routed: float) -> Step:
    """routed: tokens times layers whose experts they go to."""
    met = distinct_ranks(config.n_routed_experts, config.num_experts_per_tok, ranks)
    rows, width = routed * met * (ranks - 1) / ranks, config.hidden_size
    return Step(tokens, tuple(lines), rows * (width + width / 32), rows * 2 * width)


def _peak(cluster: Cluster, operand: str) -> float:
    found = cluster.target.flops_per_s.get(operand)
    if found is None and operand in INSTEAD:
        return _peak(cluster, INSTEAD[operand])
    if found is None or not found.value:
        raise RoleError(f"{cluster.name}: {cluster.target.name} has no known {operand} rate, allowed: a GPU")
    return found.value
