"""How many instances of which role a cluster has room for, what they serve together, what goes between them.

*Modelled*, from the instances of `roles`, and beside it the figures that others have published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dscompile.distributed.cluster import Cluster
from dscompile.distributed.roles import Instance, request_bytes
from dscompile.distributed.steps import Workload
from dscompile.models.deepseek_v41.config import DeepseekV41Config

FORMULAS: Mapping[str, str] = MappingProxyType(
    {
        "tokens per second and GPU": "tokens of a step / its time; prefill: new input tokens, decode: output tokens",
        "step time": "sum over parts of max(FLOP / peak, bytes / HBM rate); the exchange beside it or after it",
        "fits": "slots x expert + dense weights + requests x (state page + token pages) <= 0.9 HBM, Engram on the host",
        "requests per second": "min(prefill GPUs x rate / new input tokens, decode GPUs x rate / (output - 1))",
        "hand-over bytes": "rows and keys of the input (890 L in the release) + window + open groups + last token ids",
        "implied share": "published tokens per second x modelled cost of a token / data-sheet rate",
    }
)


@dataclass(frozen=True)
class Balance:
    """Instances of both roles on a cluster.

    busy: share of the time that a role's instances work. handover_bytes: of one request; handover_bytes_per_s: of all.
    out_share, in_share: of a prefill GPU's and a decode GPU's link in one direction, None if its rate is unknown;
    over: which link. input counts what was found in a cache too.
    """

    prefill: Instance
    decode: Instance
    prefill_count: int
    decode_count: int
    idle_gpus: int
    requests_per_s: float
    prefill_busy: float
    decode_busy: float
    output_per_s: float
    computed_per_s: float
    total_per_s: float
    handover_bytes: int
    handover_bytes_per_s: float
    over: str
    out_share: float | None
    in_share: float | None


def balances(
    config: DeepseekV41Config, cluster: Cluster, work: Workload, instances: Sequence[Instance]
) -> list[Balance]:
    """For every pair of a prefill and a decode instance that can run the best counts; the quickest pair first."""
    able = [each for each in instances if each.problem is None]
    pairs = [(p, d) for p in able if p.role == "prefill" for d in able if d.role == "decode"]
    found = [each for p, d in pairs if (each := _balance(config, cluster, work, p, d)) is not None]
    return sorted(found, key=lambda each: -each.requests_per_s)


def _balance(
    config: DeepseekV41Config, cluster: Cluster, work: Workload, prefill: Instance, decode: Instance
) -> Balance | None:
    """The counts with most requests per second, of those the fewest GPUs; None without room for one of each."""
    filled = prefill.ranks * prefill.tokens_per_s / work.new  # requests per second of one instance
    drained = decode.ranks * decode.tokens_per_s / work.decoded
    best: tuple[float, int, int, int] | None = None
    for n in range(1, cluster.gpus // prefill.ranks + 1):
        room = (cluster.gpus - n * prefill.ranks) // decode.ranks
        m = next((m for m in range(room, 0, -1) if _packs(cluster, [decode.ranks] * m + [prefill.ranks] * n)), 0)
        if not m:
            continue
        rate = min(n * filled, m * drained)
        m = max(1, math.ceil(rate / drained - 1e-9))
        idle = cluster.gpus - n * prefill.ranks - m * decode.ranks
        best = max(best or (0.0, 0, 0, 0), (rate, idle, n, m))
    if best is None:
        return None
    rate, idle, n, m = best
    each = request_bytes(config, work.input)
    one_domain = cluster.gpus <= cluster.domain
    link = (cluster.link_bytes_per_s if one_domain else cluster.network_bytes_per_s).value
    flow = rate * each
    return Balance(
        prefill, decode, n, m, idle, rate, rate / (n * filled), rate / (m * drained), rate * work.output,
        rate * (work.new + work.output), rate * (work.input + work.output), each, flow,
        "link" if one_domain else "network", flow / (n * prefill.ranks) / link if link else None,
        flow / (m * decode.ranks) / link if link else None,
    )  # fmt: skip


def _packs(cluster: Cluster, sizes: Sequence[int]) -> bool:
    """Whether instances of these numbers of ranks, in falling order, fit without one that straddles domains.

    One that is larger than a domain takes whole ones.
    """
    free = [min(cluster.domain, cluster.gpus)] * max(1, cluster.gpus // cluster.domain)
    for size in sorted(sizes, reverse=True):
        whole = math.ceil(size / cluster.domain)
        fit = [i for i, room in enumerate(free) if room >= min(size, cluster.domain)]
        if len(fit) < whole:
            return False
        for i in fit[:whole]:
            free[i] -= min(size, cluster.domain)
    return True


@dataclass(frozen=True)
class Figure:
    """A published number of tokens per second: of one GPU of an instance, or of a rack (ranks 0)."""

    name: str
    tokens_per_s: float
    ranks: int = 0


# As handed on; where they were published, and for which lengths, could not be found (model_v41 6).
PREFILL_FIGURES = (Figure("prefill DEP2", 64.4e3, 2), Figure("prefill DEP4", 53.3e3, 4))
RACK_FIGURE = Figure("rack of 72", 954e3)
PUBLISHED_ON = ("sm_103a", 72)
PUBLISHED_DECODE = 64  # ranks of the published decode instance; 8 of the rack's GPUs are left


@dataclass(frozen=True)
class Implied:
    """What a figure means under the model, with `reading` taken for granted.

    gpus: that share it; tokens_per_s: of each. Shares of peak rates, 1 is all: fp8 (every FLOP at the FP8 peak),
    arithmetic (each at the peak of its operands), hbm, link (one direction); of_model: of the modelled tokens.
    prefill_gpus: that the input would take at the published rate of a prefill GPU, None where it is no question.
    """

    figure: Figure
    reading: str
    gpus: int
    tokens_per_s: float
    fp8: float
    arithmetic: float
    hbm: float
    link: float
    of_model: float
    prefill_gpus: float | None = None


def implied(
    cluster: Cluster, work: Workload, instances: Sequence[Instance], found: Sequence[Balance]
) -> Iterator[Implied]:
    """The published figures, on the machine that they are of; nothing for other clusters."""
    if (cluster.target.name, cluster.gpus) != PUBLISHED_ON:
        return
    by_role = {(each.role, each.ranks): each for each in instances}
    for figure in PREFILL_FIGURES:
        if prefill := by_role.get(("prefill", figure.ranks)):
            of_model = figure.tokens_per_s / prefill.tokens_per_s
            yield Implied(
                figure, "new input tokens of one GPU", 1, figure.tokens_per_s,
                *_shares(cluster, {prefill: figure.tokens_per_s}), of_model,
            )  # fmt: skip
    rack = RACK_FIGURE.tokens_per_s
    if decode := by_role.get(("decode", PUBLISHED_DECODE)):
        each = rack / PUBLISHED_DECODE
        yield Implied(
            RACK_FIGURE, f"output tokens only, on {PUBLISHED_DECODE} decode GPUs", PUBLISHED_DECODE, each,
            *_shares(cluster, {decode: each}), each / decode.tokens_per_s, _needed(rack / work.decoded, work),
        )  # fmt: skip
    if found:
        best = found[0]
        requests = rack / (work.input + work.output)
        rates = {best.prefill: requests * work.new / cluster.gpus, best.decode: requests * work.decoded / cluster.gpus}
        yield Implied(
            RACK_FIGURE, "input and output tokens of all GPUs, mean GPU of the best balance", cluster.gpus,
            rack / cluster.gpus, *_shares(cluster, rates), rack / best.total_per_s, _needed(requests, work),
        )  # fmt: skip


def _needed(requests_per_s: float, work: Workload) -> float:
    return requests_per_s * work.new / PREFILL_FIGURES[0].tokens_per_s


def _shares(cluster: Cluster, rates: Mapping[Instance, float]) -> tuple[float, float, float, float]:
    """fp8, arithmetic, hbm, link of a GPU that makes so many tokens a second the way of each instance."""
    fp8, memory = cluster.target.flops_per_s["fp8"].value, cluster.target.hbm_bytes_per_s.value
    assert fp8 and memory, f"{cluster.target.name} lacks rates"
    steps = [(rate / each.step.tokens, each) for each, rate in rates.items()]  # steps per second
    return (
        sum(rate * each.step.flops for rate, each in steps) / fp8,
        sum(rate * each.times.peak_us * 1e-6 for rate, each in steps),
        sum(rate * each.step.hbm_bytes for rate, each in steps) / memory,
        sum(rate * each.times.exchange_us * 1e-6 for rate, each in steps),
    )
