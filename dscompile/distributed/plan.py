"""What expert parallelism would cost on a cluster, per layer: bytes, expected ranks, times at data-sheet rates.

*Modelled*, from the formulas in `FORMULAS`; nothing is measured and nothing overlaps. A token goes once to each
distinct rank that holds one of its experts (model_v41 7), a choice of experts is taken as even.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dscompile.distributed.cluster import Cluster
from dscompile.distributed.placement import PlacementError

FORMULAS: Mapping[str, str] = MappingProxyType(
    {
        "distinct ranks": "R (1 - C(E - p, k) / C(E, k)), p = E / R experts a rank",
        "remote ranks": "distinct ranks (R - 1) / R",
        "dispatch bytes": "B x remote ranks x (D + D / 32): E4M3 codes and a scale for 32 of them",
        "combine bytes": "B x remote ranks x 2 D: bf16",
        "weight bytes": "slots x 3 D I (1/2 + 1/32): FP4 codes and scales, of all layers",
        "dispatch us, combine us": "bytes / rate of a GPU, one direction",
        "experts us": "max(weights touched / HBM rate, 6 N D I / FP8 peak), N = B k tokens a rank, "
        "touched = slots (1 - (1 - k / E)^(B R))",
    }
)


@dataclass(frozen=True)
class ExpertNumbers:
    """Of a model: experts, how many each token takes, hidden size, inner size, layers that have them."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    layers: int


@dataclass(frozen=True)
class ExchangePlan:
    """One number of ranks and one batch: bytes per GPU and layer, microseconds per layer; see `FORMULAS`.

    limit: what a GPU's bytes wait for, "link" or "network". fits: the weights fit into the GPU's memory.
    """

    ranks: int
    batch: int
    slots: int
    distinct_ranks: float
    remote_ranks: float
    dispatch_bytes: float
    combine_bytes: float
    weight_bytes: float
    dispatch_us: float
    experts_us: float
    combine_us: float
    limit: str
    fits: bool | None

    @property
    def layer_us(self) -> float:
        """Dispatch, experts and combine one after the other."""
        return self.dispatch_us + self.experts_us + self.combine_us


def distinct_ranks(experts: int, top_k: int, ranks: int) -> float:
    """How many ranks hold at least one of a token's experts, on average; each expert on one rank."""
    held = experts / ranks
    return ranks * (1 - math.exp(_log_comb(experts - held, top_k) - _log_comb(experts, top_k)))


def exchange_plan(model: ExpertNumbers, cluster: Cluster, ranks: int, batch: int, redundant: int = 0) -> ExchangePlan:
    """batch: tokens of every rank in a step. redundant: slots beyond one for each expert; they relieve busy ranks,
    which an even choice does not have, so they cost memory here and gain nothing.

    Raises:
        PlacementError: experts and redundant slots that do not divide among the ranks; a batch below 1.
        ClusterError: as `Cluster.rate`.
    """
    total = model.experts + redundant
    if redundant < 0 or total % ranks:
        raise PlacementError(
            f"{model.experts} experts and {redundant} redundant slots on {ranks} ranks, allowed: a sum that the ranks "
            "divide"
        )
    if batch < 1:
        raise PlacementError(f"batch: {batch}, allowed: >= 1")
    rate, limit = cluster.rate(ranks)
    slots = total // ranks
    met = distinct_ranks(model.experts, model.top_k, ranks)
    remote = met * (ranks - 1) / ranks
    d, i, k = model.hidden, model.inner, model.top_k
    dispatch, combine = batch * remote * (d + d / 32), batch * remote * 2 * d
    expert = 3 * d * i * (1 / 2 + 1 / 32)
    touched = slots * (1 - (1 - k / model.experts) ** (batch * ranks))
    target = cluster.target
    experts_us = target.floor_us(touched * expert, 6 * batch * k * d * i, "fp8")
    assert experts_us is not None, f"{target.name} lacks rates"
    weights = slots * expert * model.layers
    memory = target.hbm_bytes.value
    return ExchangePlan(
        ranks, batch, slots, met, remote, dispatch, combine, weights, dispatch / rate * 1e6, experts_us,
        combine / rate * 1e6, limit, None if memory is None else weights < memory,
    )  # fmt: skip


def _log_comb(n: float, k: int) -> float:
    """Of the binomial coefficient, n not whole too; -inf below k."""
    return -math.inf if n < k else math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def exchange_plans(
    model: ExpertNumbers, cluster: Cluster, ranks: Sequence[int], batches: Sequence[int]
) -> Iterator[ExchangePlan]:
    """Every number of ranks with every batch; where experts do not divide, with as many redundant slots as it takes."""
    for count in ranks:
        for batch in batches:
            yield exchange_plan(model, cluster, count, batch, -model.experts % count)
