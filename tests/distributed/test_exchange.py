"""Tokens to their experts and back, in real processes over gloo, against all experts in one process."""

from __future__ import annotations

import datetime
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

import dscompile.ops  # noqa: F401
from dscompile.distributed.exchange import bytes_of, exchange_experts, route
from dscompile.distributed.placement import Placement

EXPERTS, TOP_K, SIZE, INNER = 12, 3, 64, 32


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(EXPERTS, 2 * INNER, SIZE, generator=generator) / 8
    return up, torch.randn(EXPERTS, SIZE, INNER, generator=generator) / 6


def tokens(kind: str, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens: a different number on each, none on the last."""
    generator = torch.Generator().manual_seed(100 + rank)
    count = 0 if rank == ranks - 1 and kind != "one token" else 1 if kind == "one token" else 5 + 3 * rank
    x, shares = torch.randn(count, SIZE, generator=generator), torch.rand(count, TOP_K, generator=generator)
    indices = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    if kind == "one expert":
        indices = torch.tensor([7, -1, -1]).expand(count, TOP_K).contiguous()
    if kind == "idle ranks":
        indices = indices % 3
    return x, indices, shares


def placement_of(kind: str, ranks: int) -> Placement:
    if kind != "replicas":
        return Placement.contiguous(EXPERTS, ranks)
    extra = np.random.default_rng(0).integers(0, EXPERTS, ranks * (EXPERTS // ranks + 1) - EXPERTS)
    return Placement(tuple(np.random.default_rng(1).permutation([*range(EXPERTS), *extra]).tolist()), EXPERTS, ranks)


KINDS = ("even", "one expert", "idle ranks", "replicas", "one token")


def work(rank: int, ranks: int, folder: str) -> None:
    """Every case in one group; the differences go to a file."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    found: dict[str, Any] = {}
    try:
        group = dist.group.WORLD
        assert group is not None
        up, down = weights()
        for kind in KINDS:
            placement = placement_of(kind, ranks)
            mine = torch.tensor(placement.on_rank(rank))

            def local(x: torch.Tensor, slots: torch.Tensor, shares: torch.Tensor, mine: torch.Tensor = mine) -> Any:
                return torch.ops.dsv4.experts(x, slots, shares, up[mine], down[mine], 10.0, True, torch.float32)

            x, indices, shares = tokens(kind, rank, ranks)
            want = torch.ops.dsv4.experts(x, indices, shares, up, down, 10.0, True, torch.float32)
            for payload in ("plain", "fp8"):
                got = exchange_experts(x, indices, shares, placement, group, local, payload)
                error = float((got - want).abs().max()) if len(x) else 0.0
                found[f"{kind} {payload}"] = (
                    got.shape == want.shape,
                    error,
                    float(want.abs().max()) if len(x) else 1.0,
                )
    except Exception:
        found["error"] = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_to_one_process(ranks: int, tmp_path: Path) -> None:
    mp.spawn(work, (ranks, str(tmp_path)), nprocs=ranks)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert "error" not in found, found["error"]
        assert len(found) == 2 * len(KINDS)
        for name, (same_shape, error, largest) in found.items():
            assert same_shape and error <= (1e-5 if name.endswith("plain") else 0.06) * largest, name


@given(st.data())
def test_a_route(data: st.DataObject) -> None:
    """Every wanted expert is asked for exactly once, on a rank that holds it; one row for each distinct rank."""
    ranks, n, k = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
    per_rank = data.draw(st.integers(2, 3))
    experts = data.draw(st.integers(3, ranks * per_rank)) if ranks * per_rank >= 3 else ranks * per_rank
    extra = [data.draw(st.integers(0, experts - 1)) for _ in range(ranks * per_rank - experts)]
    placement = Placement(tuple(data.draw(st.permutations([*range(experts), *extra]))), experts, ranks)
    rows = [data.draw(st.permutations(range(experts)))[: min(k, experts)] for _ in range(n)]
    indices = torch.tensor([[*row, *[-1] * (k - len(row))] for row in rows], dtype=torch.int64).view(n, k)
    shares, rank = torch.rand(n, k), data.draw(st.integers(0, ranks - 1))
    way = route(indices, shares, placement, rank)
    assert int(way.counts.sum()) == len(way.token) == int((way.place >= 0).sum())
    destination = torch.repeat_interleave(torch.arange(ranks), way.counts)
    asked: dict[tuple[int, int], int] = {}
    for row, (token, home) in enumerate(zip(way.token.tolist(), destination.tolist())):
        assert way.place[token, home] == row and (way.slots[row] >= 0).any()
        assert torch.equal(way.weights[row], shares[token])
        for choice, slot in enumerate(way.slots[row].tolist()):
            if slot >= 0:
                assert placement.on_rank(home)[slot] == indices[token, choice]
                asked[token, choice] = asked.get((token, choice), 0) + 1
    assert asked == {(t, c): 1 for t in range(n) for c in range(k) if indices[t, c] >= 0}
    sent, back = bytes_of(way, rank, 64, 2, "fp8")
    remote = int((destination != rank).sum())
    assert (sent, back) == (remote * 66, remote * 128)


def test_bad_input() -> None:
    with pytest.raises(IndexError, match="expert 4, allowed: -1 to 3"):
        route(torch.tensor([[0, 4]]), torch.ones(1, 2), Placement.contiguous(4, 2), 0)
    with pytest.raises(IndexError, match="expert -2, allowed: -1 to 3"):
        route(torch.tensor([[0, -2]]), torch.ones(1, 2), Placement.contiguous(4, 2), 0)
