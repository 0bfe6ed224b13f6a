"""Inside the padded exchange the host reads no value: its operators are opaque to a search of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import dscompile
from dscompile.distributed.transports import rows
from tests.support.expert_blocks import Blocks, tokens
from tests.support.ranks import run_ranks

#: As the dispatcher calls them, whoever calls.
READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}
CASES = ({"expert_payload": "plain"}, {"expert_payload": "fp8"}, {"expert_overflow": "exact"})
COUNTS = {"aten::nonzero", "aten::masked_select", "aten::bincount"}


@torch.no_grad()
def recorded(rank: int) -> list[set[str]]:
    """Of each case, names of all that exchanges run in the second call of a compiled stack of experts."""
    rows.checked_indices = lambda indices, experts: indices  # type: ignore[assignment] # reads on a CPU only
    model, found = Blocks(layers=1), []
    dscompile.shard_experts(model, dist.group.WORLD)
    x = tokens(model.config, rank, (3, 1), torch.float32)
    for case in CASES:
        options = {"role": "decode", "mesh": dist.group.WORLD, "inductor": False, "lower": False, **case}
        torch._dynamo.reset()
        run = torch.compile(model, backend="dsv4", options={"expert_capacity": 3, **options})
        run(x)  # compiles, and compares options between ranks
        with profile(activities=[ProfilerActivity.CPU]) as events:
            run(x)
        found.append({event.name for event in events.events() if in_exchange(event)})
    return found


def in_exchange(event: Any) -> bool:
    """Whether an operator of the exchange is, or called, what was recorded."""
    while event is not None:
        if event.name.startswith("dsv4_ep::"):
            return True
        event = event.cpu_parent
    return False


def test_no_read_in_the_padded_form(tmp_path: Path) -> None:
    """With a flag that all ranks wait for, it is seen."""
    for plain, fp8, flag in run_ranks(recorded, 2, tmp_path):
        for names in (plain, fp8):
            assert {"dsv4_ep::dispatch", "dsv4_ep::combine_wait", "aten::scatter_"} <= names
            assert sorted(names & (READS | COUNTS)) == []
        assert flag & READS
