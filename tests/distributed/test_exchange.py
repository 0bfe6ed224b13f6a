"""Tokens to their experts and back, in real processes over gloo, against all experts in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dscompile.distributed import operators, traffic, wire
from dscompile.distributed.placement import Placement
from dscompile.distributed.routing import Spec, chosen_slots, destinations, route, slot_table
from tests.support.ranks import run_ranks

EXPERTS, TOP_K, SIZE, INNER = 12, 3, 64, 32


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(EXPERTS, 2 * INNER, SIZE, generator=generator) / 8
    return up, torch.randn(EXPERTS, SIZE, INNER, generator=generator) / 6


def tokens(kind: str, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens: a different number on each, none on the last."""
    generator = torch.Generator().manual_seed(100 + rank)
    count = 0 if rank == ranks - 1 and kind != "one token" else 1 if kind == "one token" else 5 + 3 * rank
    if kind == "no tokens":
        count = 0
    x, shares = torch.randn(count, SIZE, generator=generator), torch.rand(count, TOP_K, generator=generator)
    indices = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    if kind == "one expert":
        indices = torch.tensor([7, -1, -1]).expand(count, TOP_K).contiguous()
    if kind == "idle ranks":
        indices = indices % 3
    return x, indices, shares


def placement_of(kind: str, ranks: int) -> Placement:
    slots = -(-EXPERTS // ranks) + (kind == "replicas")
    extra = np.random.default_rng(0).integers(0, EXPERTS, ranks * slots - EXPERTS)
    order = [*range(EXPERTS), *extra]
    if kind == "replicas":
        order = np.random.default_rng(1).permutation(order).tolist()
    return Placement(tuple(int(expert) for expert in order), EXPERTS, ranks)


KINDS = ("even", "one expert", "idle ranks", "replicas", "one token", "no tokens")
# A rank of the largest group has up to 5 + 3 * 6 tokens.
FORMS = {"exact": (0, "error"), "padded": (26, "error"), "small": (3, "exact")}


def work(rank: int, ranks: int) -> dict[str, Any]:
    """Every case in one group: whether shapes agree, the largest difference, the largest value; and bytes."""
    group = dist.group.WORLD
    assert group is not None
    name, found = group.group_name, {}
    up, down = weights()
    for kind in KINDS:
        placement = placement_of(kind, ranks)
        mine = torch.tensor(placement.on_rank(rank))
        table = slot_table(placement, int(placement.replicas.max()) + 1)
        x, indices, shares = tokens(kind, rank, ranks)
        for form, (capacity, overflow) in FORMS.items():
            for payload in ("plain", "fp8"):
                sent = wire.FORMATS[wire.PAYLOAD].fake_quant(x) if payload == "fp8" else x
                want = torch.ops.dsv4.experts(sent, indices, shares, up, down, 10.0, True, torch.float32)
                traffic.reset(name)
                load = torch.zeros(EXPERTS, dtype=torch.int64)
                ticket = operators.dispatch(
                    x, indices, shares, table, load, None, name, ranks, placement.slots_per_rank, capacity, overflow,
                    payload, "collectives", "",
                )  # fmt: skip
                rows, slots, wanted = operators.dispatch_wait(ticket, x, indices, shares, ranks, capacity, overflow)
                sums = torch.ops.dsv4.experts(rows, slots, wanted, up[mine], down[mine], 10.0, True, torch.float32)
                got = operators.combine_wait(operators.combine(ticket, sums, None), x, torch.float32)
                error = float((got - want).abs().max()) if len(x) else 0.0
                largest = float(want.abs().max()) if len(x) else 1.0
                counted = traffic.traffic(name)
                assert torch.equal(load, torch.bincount(indices[indices >= 0].flatten(), minlength=EXPERTS))
                found[f"{kind} {form} {payload}"] = (
                    got.shape == want.shape, error, largest, counted, distinct(indices, placement, rank),
                )  # fmt: skip
    assert operators.pending_exchanges() == 0
    return found


def distinct(indices: torch.Tensor, placement: Placement, rank: int) -> int | None:
    """How many (token, other rank) pairs there are; None where replicas leave a choice."""
    if placement.redundant:
        return None
    home = {expert: slot // placement.slots_per_rank for slot, expert in enumerate(placement.slots)}
    return sum(len({home[e] for e in row if e >= 0} - {rank}) for row in indices.tolist())


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_equal_to_one_process(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(work, ranks, tmp_path, ranks):
        assert len(found) == len(KINDS) * len(FORMS) * 2
        for name, (same_shape, error, largest, counted, pairs) in found.items():
            kind, form, payload = name.rsplit(" ", 2)
            assert same_shape and error <= 1e-5 * largest, name
            assert counted.exchanges == 1
            row = SIZE + SIZE // 32 if payload == "fp8" else 4 * SIZE
            assert counted.dispatch_bytes == counted.rows * row, name
            assert counted.label_bytes == counted.rows * 6 * TOP_K and counted.combine_bytes == counted.rows * 4 * SIZE
            if form == "padded":
                assert counted.rows == 26 * (ranks - 1)
            elif form == "exact" and pairs is not None:
                assert counted.rows == pairs, name


COUNTS = ([[3, 2], [1, 4]], [[0, 0], [2, 3]], [[0, 0], [0, 0]], [[5, 0], [0, 0]], [[0, 7], [0, 2]])


def counted(rank: int) -> None:
    """R19: rows for each rank as in `COUNTS[case][rank]`; each comes back in its place, from the rank it went to."""
    group = dist.group.WORLD
    assert group is not None
    for counts in COUNTS:
        for capacity in (0, 7):
            order = torch.tensor([0] * counts[rank][0] + [1] * counts[rank][1])
            shuffled = torch.randperm(len(order), generator=torch.Generator().manual_seed(rank))
            indices = order[shuffled].view(-1, 1)
            x = torch.arange(len(order) * 4, dtype=torch.float32).view(-1, 4) + 100 * rank
            shares, table = torch.ones(len(order), 1), slot_table(Placement((0, 1), 2, 2), 1)
            ticket = operators.dispatch(
                x, indices, shares, table, None, None, group.group_name, 2, 1, capacity, "error", "plain",
                "collectives", "",
            )  # fmt: skip
            rows, slots, _ = operators.dispatch_wait(ticket, x, indices, shares, 2, capacity, "error")
            arrived = rows[(slots >= 0).any(1)]
            assert len(arrived) == counts[0][rank] + counts[1][rank]
            assert [int((arrived[:, 0] // 100 == other).sum()) for other in (0, 1)] == [c[rank] for c in counts]
            sums = rows + 1000 * (rank + 1)
            got = operators.combine_wait(operators.combine(ticket, sums, None), x, torch.float32)
            assert torch.equal(got, x + 1000 * (indices + 1))


def test_ranks_without_rows_take_part(tmp_path: Path) -> None:
    run_ranks(counted, 2, tmp_path)


def test_a_row_at_the_size_of_the_release() -> None:
    assert wire.payload_bytes(5120, torch.bfloat16, "fp8") == 5280
    assert wire.label_bytes(6) == 36


@given(st.data())
def test_a_route(data: st.DataObject) -> None:
    """Every wanted expert is asked for exactly once, on a rank that holds it; one row for each distinct rank."""
    ranks, n, k = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
    per_rank = data.draw(st.integers(2, 3))
    experts = data.draw(st.integers(3, ranks * per_rank)) if ranks * per_rank >= 3 else ranks * per_rank
    extra = [data.draw(st.integers(0, experts - 1)) for _ in range(ranks * per_rank - experts)]
    placement = Placement(tuple(data.draw(st.permutations([*range(experts), *extra]))), experts, ranks)
    chosen = [data.draw(st.permutations(range(experts)))[: min(k, experts)] for _ in range(n)]
    indices = torch.tensor([[*row, *[-1] * (k - len(row))] for row in chosen], dtype=torch.int64).view(n, k)
    rank = data.draw(st.integers(0, ranks - 1))
    padded = data.draw(st.booleans())
    spec = Spec("", ranks, rank, per_rank, capacity=max(n, 1) + data.draw(st.integers(0, 2)) if padded else 0)
    table = slot_table(placement, int(placement.replicas.max()) + data.draw(st.integers(0, 2)))
    slot = chosen_slots(indices, table, rank)
    wanted = destinations(slot, spec)
    way = route(slot, wanted, spec, None if padded else wanted.sum(0).tolist())
    assert len(way.token) == len(way.slots) == (ranks * spec.capacity if padded else int(wanted.sum()))
    if padded:
        home = torch.arange(ranks).repeat_interleave(spec.capacity)
    else:
        home = torch.arange(ranks).repeat_interleave(wanted.sum(0))
    asked: dict[tuple[int, int], int] = {}
    for row, (token, where) in enumerate(zip(way.token.tolist(), home.tolist())):
        if token < 0:
            assert padded and (way.slots[row] == -1).all()
            continue
        assert way.place[token, where] == row and (way.slots[row] >= 0).any()
        for choice, local in enumerate(way.slots[row].tolist()):
            if local >= 0:
                assert placement.on_rank(where)[local] == indices[token, choice]
                asked[token, choice] = asked.get((token, choice), 0) + 1
    assert asked == {(t, c): 1 for t in range(n) for c in range(k) if indices[t, c] >= 0}
    assert int((way.place >= 0).sum()) == int((way.token >= 0).sum()) == int(wanted.sum())


@given(st.integers(0, 5), st.integers(1, 4), st.sampled_from(["plain", "fp8"]), st.integers(0, 2**31))
def test_rows_on_the_wire(rows: int, k: int, payload: str, seed: int) -> None:
    """What is packed comes out again; an unused row is zero and asks for nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    token = torch.randint(-1, 3, (rows,), generator=generator)
    slots = torch.randint(-1, 400, (rows, k), generator=generator).masked_fill((token < 0)[:, None], -1)
    shares = torch.rand(3, k, generator=generator)
    packed = wire.pack(x, token, slots, shares, payload)
    assert packed.shape == (rows, wire.payload_bytes(64, x.dtype, payload) + wire.label_bytes(k))
    values, asked, weighed = wire.unpack(packed, 64, k, x.dtype, torch.float32, payload)
    sent = wire.FORMATS[wire.PAYLOAD].fake_quant(x.float()).to(x.dtype) if payload == "fp8" else x
    assert torch.equal(values, sent[token.clamp(min=0)].masked_fill((token < 0)[:, None], 0))
    assert torch.equal(asked, slots)
    assert torch.equal(weighed, shares[token.clamp(min=0)].masked_fill((token < 0)[:, None], 0))


def test_bad_input() -> None:
    from dscompile.distributed.transports import checked_indices, transport

    for wrong in (4, -2):
        with pytest.raises(IndexError, match=f"expert {wrong}, allowed: -1 to 3"):
            checked_indices(torch.tensor([[0, wrong]]), 4)
    with pytest.raises(ValueError, match="transport: 'pigeon', allowed: collectives, symmetric, deep_ep"):
        transport("pigeon", "0")
    with pytest.raises(ValueError, match="2 replicas in a table for 1"):
        slot_table(Placement((0, 0, 1, 1), 2, 2), 1)
    with pytest.raises(RuntimeError, match="not started, or is over"):
        operators.combine_wait(torch.zeros(1, dtype=torch.uint8), torch.zeros(1, 2), torch.float32)
