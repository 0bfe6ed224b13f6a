"""One layer's experts spread over ranks: by the exchange, and by all-reduce as the release's own code does it.

    python benchmarks/ep.py [--ranks 2,4,8] [--tokens 32] [--quick]

All-reduce: every rank gathers the tokens of all, computes its own experts on them, and all sums are added up on each.
Both run the same experts in one process group of real processes over gloo, turn by turn; printed are bytes that leave a
rank (of the exchange counted, of the collectives by the ring's formula), median times, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dscompile.ops  # noqa: F401
from dscompile.distributed import operators
from dscompile.distributed.placement import Placement
from dscompile.distributed.routing import slot_table
from dscompile.distributed.traffic import reset, traffic

FORMS = ("exact", "padded", "exact fp8")


@dataclass(frozen=True)
class Sizes:
    """Of the layer and of the run."""

    hidden: int = 1024
    inner: int = 512
    experts: int = 64
    top_k: int = 6
    tokens: int = 32
    rounds: int = 9


@dataclass(frozen=True)
class Result:
    """Of one way, on one rank: bytes that leave it, seconds of every round, the largest relative difference."""

    sent: float
    seconds: list[float]
    error: float


class Layer:
    """One rank's experts, and the two ways to run a batch through all of them."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int) -> None:
        self.sizes, self.rank, self.ranks = sizes, rank, ranks
        self.placement = Placement.contiguous(sizes.experts, ranks)
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(sizes.experts, 2 * sizes.inner, sizes.hidden, generator=generator) * sizes.hidden**-0.5
        down = torch.randn(sizes.experts, sizes.hidden, sizes.inner, generator=generator) * sizes.inner**-0.5
        self.all = up.bfloat16(), down.bfloat16()
        held = torch.tensor(self.placement.on_rank(rank))
        self.own = self.all[0][held], self.all[1][held]
        self.table = slot_table(self.placement, 1)
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD.group_name

    def experts(self, x: Tensor, indices: Tensor, weights: Tensor, stacks: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = torch.ops.dsv4.experts(x, indices, weights, *stacks, 10.0, True, torch.float32)
        return found

    def exchange(self, x: Tensor, indices: Tensor, weights: Tensor, form: str) -> Tensor:
        capacity = len(x) if form == "padded" else 0
        ticket = operators.dispatch(
            x, indices, weights, self.table, None, None, self.group, self.ranks, self.placement.slots_per_rank,
            capacity, "error", "fp8" if "fp8" in form else "plain", "collectives", "",
        )  # fmt: skip
        rows, slots, shares = operators.dispatch_wait(ticket, x, indices, weights, self.ranks, capacity, "error")
        sums = self.experts(rows, slots, shares, self.own).to(x.dtype)
        return operators.combine_wait(operators.combine(ticket, sums, None), x, torch.float32)

    def all_reduce(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        everyone = [self._gathered(tensor) for tensor in (x, indices, weights)]
        first = self.rank * self.placement.slots_per_rank
        local = everyone[1] - first
        local = torch.where((local >= 0) & (local < self.placement.slots_per_rank), local, -1)
        sums = self.experts(everyone[0], local, everyone[2], self.own)
        dist.all_reduce(sums)
        return sums[self.rank * len(x) : (self.rank + 1) * len(x)]

    def _gathered(self, tensor: Tensor) -> Tensor:
        everyone = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(everyone, tensor)
        return torch.cat(everyone)

    def ring_bytes(self) -> float:
        """Leaving a rank: (R - 1) of its own rows, then 2 (R - 1) / R of the fp32 sums of all R."""
        s, others = self.sizes, self.ranks - 1
        row = 2 * s.hidden + 12 * s.top_k
        return others * s.tokens * row + 2 * others * s.tokens * 4 * s.hidden


@torch.no_grad()
def measure(rank: int, ranks: int, sizes: Sizes, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # some machines cannot reach themselves by name
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    layer = Layer(sizes, rank, ranks)
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(sizes.tokens, sizes.hidden, generator=generator).bfloat16()
    indices = torch.rand(sizes.tokens, sizes.experts, generator=generator).argsort(1)[:, : sizes.top_k].contiguous()
    weights = torch.rand(sizes.tokens, sizes.top_k, generator=generator)
    want = layer.experts(x, indices, weights, layer.all)
    ways: dict[str, Any] = {"all-reduce": lambda: layer.all_reduce(x, indices, weights)}
    ways |= {form: lambda form=form: layer.exchange(x, indices, weights, form) for form in FORMS}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sent, errors = {"all-reduce": layer.ring_bytes()}, dict[str, float]()
    for turn in range(sizes.rounds + 1):
        for name, way in ways.items():
            reset(layer.group)
            dist.barrier()
            began = time.perf_counter()
            got = way()
            spent = time.perf_counter() - began
            if turn:  # the first one makes connections
                seconds[name].append(spent)
            errors[name] = float((got - want).abs().max() / want.abs().max())
            if name != "all-reduce":
                counted = traffic(layer.group)
                sent[name] = counted.dispatch_bytes + counted.label_bytes + counted.combine_bytes
    torch.save({name: Result(sent[name], seconds[name], errors[name]) for name in ways}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run(ranks: int, sizes: Sizes) -> dict[str, Result]:
    """Every way with so many processes: bytes and the slowest rank's times."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (ranks, sizes, folder), nprocs=ranks)
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {
        name: Result(
            statistics.mean(each[name].sent for each in found),
            [max(times) for times in zip(*(each[name].seconds for each in found))],
            max(each[name].error for each in found),
        )
        for name in found[0]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="2,4,8", help="numbers of processes, such as 2,4")
    parser.add_argument("--tokens", type=int, default=Sizes.tokens, help="of every rank")
    parser.add_argument("--quick", action="store_true", help="two ranks, small sizes, one round: a smoke test")
    options = parser.parse_args()
    counts = [2] if options.quick else [int(count) for count in options.ranks.split(",")]
    sizes = Sizes(128, 64, 16, 4, 8, 1) if options.quick else Sizes(tokens=options.tokens)
    table = Table("ranks", "way", "kB sent by a rank", "ratio", "ms a layer", "ratio", "largest error",
                  title=f"{sizes}, gloo over loopback, bf16, measured here, now; ratios to all-reduce",
                  title_justify="left", show_edge=False)  # fmt: skip
    wrong = False
    for ranks in counts:
        found = run(ranks, sizes)
        base, slow = found["all-reduce"].sent, statistics.median(found["all-reduce"].seconds)
        for name, result in found.items():
            spent = statistics.median(result.seconds)
            table.add_row(str(ranks), name, f"{result.sent / 1e3:.0f}", f"{result.sent / base:.2f}",
                          f"{spent * 1e3:.1f}", f"{spent / slow:.2f}", f"{result.error:.1g}")  # fmt: skip
            wrong |= result.error > (0.1 if "fp8" in name else 0.02)
    Console(width=120).print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
