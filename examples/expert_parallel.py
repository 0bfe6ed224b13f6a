"""Two DeepSeek miniatures with their experts spread over ranks: the tokens of one process, bytes sent, balance.

    torchrun --nproc-per-node 4 examples/expert_parallel.py [--tokens 8] [--only v41]

Every rank has prompts of its own, of a length of its own. Tokens of prompts are exchanged in the exact form, single
tokens in the padded one.
Exit status 1: a rank's tokens differ from those that the whole model gives in one process.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dscompile
from dscompile.distributed.balancer import balanced
from dscompile.distributed.plan import distinct_ranks
from dscompile.distributed.rebalance import gathered_loads
from dscompile.distributed.traffic import Traffic, reset, traffic
from dscompile.integrations.transformers import StaticV4Cache, prepare
from dscompile.miniatures import v4_model, v41_model

PARTS = ("prompts", "single tokens")


@dataclass(frozen=True)
class Subject:
    """A model, how to make its static cache, and how to call it: (forward, ids, first position, cache) -> logits."""

    name: str
    model: nn.Module
    new_cache: Callable[[], Any]
    call: Callable[[Callable[..., Any], Tensor, int, Any], Tensor]
    hidden: int
    top_k: int


def v41(room: int) -> Subject:
    model = v41_model(torch.float32)

    def call(forward: Callable[..., Any], ids: Tensor, start: int, cache: Any) -> Tensor:
        positions = torch.arange(start, start + ids.shape[1]).expand(len(ids), -1).contiguous()
        return forward(ids, positions, cache)

    config = model.config
    return Subject(
        "V4.1", model, lambda: model.new_cache(2, room), call, config.hidden_size, config.num_experts_per_tok
    )


def v4(room: int) -> Subject:
    model = v4_model()
    config = model.config

    def new_cache() -> StaticV4Cache:
        return StaticV4Cache(config, batch_size=2, max_tokens=room, dtype=model.dtype)

    def call(forward: Callable[..., Any], ids: Tensor, start: int, cache: Any) -> Tensor:
        return forward(ids, cache=cache, use_cache=True).logits

    prepare(model)
    return Subject("transformers V4", model, new_cache, call, config.hidden_size, config.num_experts_per_tok)


@torch.no_grad()
def generate(subject: Subject, forwards: tuple[Any, Any], ids: Tensor, count: int, after: Callable[[], None]) -> Tensor:
    """Greedy tokens [2, count]: `forwards` for the prompt and for single tokens; `after` is called in between."""
    cache, tokens = subject.new_cache(), []
    logits = subject.call(forwards[0], ids, 0, cache)
    after()
    for step in range(count):
        tokens.append(logits[:, -1].argmax(-1))
        if step + 1 < count:
            logits = subject.call(forwards[1], tokens[-1][:, None], ids.shape[1] + step, cache)
    return torch.stack(tokens, 1)


def demonstrate(subject: Subject, mesh: Any, count: int, console: Console) -> bool:
    """Prints the tables on rank 0; whether this rank's tokens are those of the whole model."""
    rank, group = mesh.get_local_rank("ep"), mesh.get_group("ep").group_name
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 64, (2, 12 + 3 * rank), generator=generator)
    want = generate(subject, (subject.model, subject.model), ids, count, lambda: None)
    sharded = dscompile.shard_experts(subject.model, mesh, "ep")
    options = {"mesh": mesh, "expert_parallel": "ep", "expert_load": True, "inductor": False}
    exact = torch.compile(subject.model, backend="dsv4", options=options)
    padded = torch.compile(
        subject.model, backend="dsv4", options={**options, "expert_exchange": "padded", "expert_capacity": 2}
    )
    counted: list[Traffic] = []

    def note() -> None:
        counted.append(traffic(group))
        reset(group)

    got = generate(subject, (exact, padded), ids, count, note)
    note()
    loads = gathered_loads(sharded)
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, (torch.equal(got, want), counted, ids.numel()))
    if rank == 0:
        show(subject, sharded, loads, everyone, count, console)
    return all(same for same, _, _ in everyone)


def show(subject: Subject, sharded: Any, loads: Tensor, everyone: list[Any], count: int, console: Console) -> None:
    ranks, layers = len(everyone), len(sharded.layers)
    experts, slots = sharded.layers[0].placement.experts, sharded.layers[0].placement.slots_per_rank
    console.print(
        f"\n[bold]{subject.name}[/]: {layers} layers of {experts} experts, {slots} on each of {ranks} ranks; "
        f"{sharded.held_bytes / 2**20:.1f} of {sharded.whole_bytes / 2**20:.1f} MiB of experts in a rank's memory"
    )
    table = Table("exchange", "tokens", "rows sent", "expected", "row B", "label B", "sum B", "MB sent", "MB back",
                  title="rows between ranks, all layers, counted", title_justify="left", show_edge=False)  # fmt: skip
    met = distinct_ranks(experts, subject.top_k, ranks) * (ranks - 1) / ranks
    for part, name in enumerate(PARTS):
        tokens = sum(size for _, _, size in everyone) if part == 0 else 2 * ranks * (count - 1)
        total = [sum(getattr(counted[part], key) for _, counted, _ in everyone)
                 for key in ("rows", "dispatch_bytes", "label_bytes", "combine_bytes")]  # fmt: skip
        rows = total[0]
        expected = met * tokens * layers if part == 0 else (ranks - 1) * 2 * ranks * (count - 1) * layers
        each = (f"{value / max(rows, 1):g}" for value in total[1:])
        sent, back = (total[1] + total[2]) / 1e6, total[3] / 1e6
        table.add_row(name, str(tokens), str(rows), f"{expected:.0f}", *each, f"{sent:.2f}", f"{back:.2f}")
    console.print(table)
    balance = Table("experts of", "balance", "after balancing", "busiest expert",
                    title="tokens per rank: mean over maximum", title_justify="left", show_edge=False)  # fmt: skip
    for layer, load in zip(sharded.layers, loads.double().numpy()):
        better = balanced(load, ranks, slots)
        balance.add_row(
            layer.name, f"{layer.placement.balance(load):.2f}", f"{better.balance(load):.2f}",
            f"{load.argmax()} ({load.max() / load.sum():.0%})",
        )  # fmt: skip
    console.print(balance)
    console.print(f"tokens equal to the whole model's in one process: {[same for same, _, _ in everyone]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8, help="to generate, at least 2")
    parser.add_argument("--only", choices=("v41", "v4"), help="one of the two models")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    console = Console(quiet=dist.get_rank() > 0, width=120)
    room = 12 + 3 * dist.get_world_size() + options.tokens
    right = True
    for name, make in (("v41", v41), ("v4", v4)):
        if options.only in (None, name):
            right &= demonstrate(make(room), mesh, options.tokens, console)
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
