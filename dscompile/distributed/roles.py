"""What an instance of one role could do: prefill or decode on ranks that share the experts. *Modelled*, see `steps`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dscompile.distributed import costs
from dscompile.distributed.cluster import Cluster
from dscompile.distributed.costs import RoleError
from dscompile.distributed.steps import Step, Times, Workload, decode_step, prefill_step, slots_of, times
from dscompile.kv.deepseek_v41 import cache_layout
from dscompile.models.deepseek_v41.config import DeepseekV41Config

Role = Literal["prefill", "decode"]
MEMORY_SHARE = 0.9  # of HBM for weights and caches; the rest is for activations and buffers


@dataclass(frozen=True)
class Instance:
    """One instance: its step and what fits. tokens_per_s: per GPU; prefill counts new input tokens, decode output.

    per_user: tokens per second of one request (decode). weight_bytes, capacity: of a GPU; capacity in whole requests,
    of the full length when decoding. problem: why it cannot run, or None.
    """

    role: Role
    ranks: int
    batch: int
    step: Step
    times: Times
    step_us: float
    limit: str
    tokens_per_s: float
    serial_tokens_per_s: float
    per_user: float | None
    weight_bytes: float
    capacity: int
    problem: str | None


def prefill_instance(config: DeepseekV41Config, cluster: Cluster, work: Workload, ranks: int) -> Instance:
    """Errors as `instances`."""
    return _instance("prefill", config, cluster, work, ranks, work.chunk, prefill_step(config, work, ranks))


def decode_instance(config: DeepseekV41Config, cluster: Cluster, work: Workload, ranks: int) -> Instance:
    """At the mean length while decoding. With `per_user`, the largest batch that is fast enough and fits.

    Errors as `instances`.
    """
    context = work.input + work.output // 2

    def made(batch: int) -> Instance:
        step = decode_step(config, ranks, batch, context)
        return _instance("decode", config, cluster, work, ranks, batch, step)

    if work.batch is not None:
        return made(work.batch)
    assert work.per_user is not None
    slow, fast = made(1).capacity + 1, 0  # `slow` is too many, `fast` is not
    while slow - fast > 1:
        batch = (slow + fast) // 2
        good = made(batch).step_us * work.per_user <= 1e6
        slow, fast = (slow, batch) if good else (batch, fast)
    return made(max(fast, 1))


def request_bytes(config: DeepseekV41Config, length: int) -> int:
    """Of a hand-over: compressed rows and keys, window, open groups, last token ids (890 L + ... in the release)."""
    return cache_layout(config).bytes_for(length).total


def instances(
    config: DeepseekV41Config, cluster: Cluster, work: Workload, prefill: Sequence[int], decode: Sequence[int]
) -> Iterator[Instance]:
    """Prefill instances of each number of ranks, then decode instances.

    Raises:
        RoleError: more tokens than the model has positions, no compressed rows, a target whose rates are unknown.
        ClusterError: as `Cluster.rate`.
    """
    yield from (prefill_instance(config, cluster, work, ranks) for ranks in prefill)
    yield from (decode_instance(config, cluster, work, ranks) for ranks in decode)


def _instance(
    role: Role, config: DeepseekV41Config, cluster: Cluster, work: Workload, ranks: int, batch: int, step: Step
) -> Instance:
    most = config.max_position_embeddings
    if work.input + work.output > most:
        raise RoleError(f"input + output: {work.input} + {work.output}, allowed: <= {most}, the model's positions")
    took = times(step, cluster, ranks)
    step_us = took.step_us(work.overlap)
    weights = costs.expert_bytes(config, slots_of(config, ranks)) + costs.dense_bytes(config)
    length = work.input + (work.output if role == "decode" else 0)
    room = (cluster.target.hbm_bytes.value or math.inf) * MEMORY_SHARE - weights
    capacity = max(0, int(room // cache_layout(config).bytes_for(length).pages))
    per_user = 1e6 / step_us if role == "decode" else None
    problem = None
    if capacity < 1:
        problem = "weights do not fit" if room < 0 else "no request fits"
    elif role == "decode" and batch > capacity:
        problem = f"{batch} requests do not fit"
    elif per_user is not None and work.per_user is not None and per_user < work.per_user:
        problem = "too slow for one request"
    return Instance(
        role, ranks, batch, step, took, step_us, took.limit(work.overlap), step.tokens / step_us * 1e6,
        step.tokens / took.serial_us * 1e6, per_user, weights, capacity, problem,
    )  # fmt: skip
