"""Transports for hardware that is not here, between threads: torch's symmetric memory and DeepEP, both stood in for."""

from __future__ import annotations

import importlib.util
import random
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dscompile.ops  # noqa: F401
from dscompile import compat
from dscompile.distributed import traffic
from dscompile.distributed.placement import Placement
from dscompile.distributed.routing import Spec, slot_table
from dscompile.distributed.transports import TRANSPORTS, deepep, refuse_capture, symmetric, transport
from dscompile.formats import FORMATS
from support import deep_ep as stand_in
from support.fabric import Meeting, ThreadGroup, run_threads

RANKS, EXPERTS, TOP_K, SIZE, INNER = 3, 8, 3, 128, 32
PLACEMENT = Placement((0, 1, 2, 3, 4, 5, 6, 7, 1), EXPERTS, RANKS)


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(EXPERTS, 2 * INNER, SIZE, generator=generator) / 8
    return up, torch.randn(EXPERTS, SIZE, INNER, generator=generator) / 6


def tokens(rank: int, round_: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens in bf16: a different number on each, none on the last, some experts missing."""
    generator = torch.Generator().manual_seed(10 * round_ + rank)
    count = 0 if rank == RANKS - 1 else 4 + 3 * rank
    x = torch.randn(count, SIZE, generator=generator).bfloat16()
    indices = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return x, indices.masked_fill(torch.rand(count, TOP_K, generator=generator) < 0.2, -1), torch.rand(count, TOP_K)


def errors(carrier: Any, spec: Spec, rounds: int) -> list[float]:
    """Exchanges one after the other and in pairs that overlap; the largest relative error of each."""
    up, down = (stack.bfloat16() for stack in weights())
    held = torch.tensor(PLACEMENT.on_rank(spec.rank))
    table = slot_table(PLACEMENT, 2)
    found = []

    def start(round_: int) -> tuple[Any, Tensor]:
        x, indices, shares = tokens(spec.rank, round_)
        sent = FORMATS["fp8_g32_ue8m0"].fake_quant(x) if spec.payload == "fp8" else x
        want = torch.ops.dsv4.experts(sent, indices, shares, up, down, 10.0, True, torch.float32)
        return carrier.dispatch(x, indices, shares, table, spec), want

    def middle(exchange: Any) -> None:
        rows, slots, shares = exchange.arrive()
        if spec.fixed:
            assert rows.shape[0] == spec.ranks * spec.capacity and not rows[(slots < 0).all(1)].any()
        assert rows.dtype == torch.bfloat16 and slots.dtype == torch.int64
        exchange.combine(torch.ops.dsv4.experts(rows, slots, shares, up[held], down[held], 10.0, True, torch.float32))

    for round_ in range(0, rounds, 3):
        started = [start(round_)]
        middle(started[0][0])
        started += [start(round_ + 1), start(round_ + 2)]
        for exchange, _ in started[1:]:
            middle(exchange)
        for exchange, want in started:
            got = exchange.finish()
            assert got.shape == want.shape and got.dtype == torch.float32
            found.append(float((got - want).abs().max() / want.abs().max()) if len(want) else 0.0)
    return found


def spec_of(rank: int, capacity: int = 0, overflow: str = "error", payload: str = "plain") -> Spec:
    return Spec(f"threads {rank}", RANKS, rank, PLACEMENT.slots_per_rank, capacity, overflow, payload)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, ThreadGroup]:
    """Threads as process groups, by name."""
    meeting = Meeting(RANKS)
    found = {f"threads {rank}": ThreadGroup(meeting, rank) for rank in range(RANKS)}
    monkeypatch.setattr(compat, "process_group", lambda name: found[name])
    return found


# Symmetric memory


class Memory:
    """torch.distributed._symmetric_memory between threads that are late at random."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group, self.made = group, 0

    def empty(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.made += 1
        return torch.full(size, 255, dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: str) -> Any:
        everyone = self.group.meeting.everyone(self.group.number, tensor)

        def get_buffer(rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
            return everyone[rank].view(dtype).view(sizes)

        def barrier(channel: int = 0, timeout_ms: int = 0) -> None:
            self.group.meeting.everyone(self.group.number, None)
            time.sleep(random.random() * 0.01)

        return SimpleNamespace(get_buffer=get_buffer, barrier=barrier)


class ThreadCollectives:
    def __init__(self, group: str) -> None:
        self.group = compat.process_group(group)

    def _all(self, value: Any) -> list[Any]:
        return self.group.meeting.everyone(self.group.number, value)

    def swap(self, rows: Tensor, sent: list[int], received: list[int]) -> Any:
        parts = [everyone[self.group.number] for everyone in self._all(rows.split(sent))]
        assert [len(part) for part in parts] == received
        return lambda: torch.cat(parts)

    def counts(self, counts: Tensor) -> list[int]:
        return [int(everyone[self.group.number]) for everyone in self._all(counts)]

    def any(self, flag: Tensor) -> bool:
        return any(map(bool, self._all(flag)))


@pytest.mark.parametrize(("capacity", "overflow", "payload"), [(8, "error", "plain"), (7, "error", "fp8"),
                                                               (3, "exact", "fp8")])  # fmt: skip
def test_symmetric(capacity: int, overflow: str, payload: str, groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "Collectives", ThreadCollectives)

    def work(rank: int) -> tuple[list[float], int, int]:
        name, memory = f"threads {rank}", Memory(groups[f"threads {rank}"])
        carrier = symmetric.Symmetric(name, rank, RANKS, torch.device("cpu"), memory)
        found = errors(carrier, spec_of(rank, capacity, overflow, payload), 12)
        return found, memory.made, carrier.held_bytes

    rows = {"plain": 2 * SIZE, "fp8": SIZE + SIZE // 32}[payload] + TOP_K * 6
    for found, made, held in run_threads(work, groups["threads 0"].meeting):
        assert len(found) == 12 and max(found) < 0.02
        if overflow == "error":  # two for each size of row, however many swaps
            assert made == 4 and held == 2 * RANKS * capacity * (rows + 2 * SIZE)


def test_symmetric_never_uses_a_buffer_twice_in_a_row(groups: Any) -> None:
    """Also when a graph of swaps is replayed: the last one uses another buffer than the first."""

    def work(rank: int) -> list[int]:
        memory = Memory(groups[f"threads {rank}"])
        carrier = symmetric.Symmetric(f"threads {rank}", rank, RANKS, torch.device("cpu"), memory)
        return [id(carrier._next(size)) for size in (5, 9, 5, 5, 9, 9, 5, 9)]

    for used in run_threads(work, groups["threads 0"].meeting):
        assert all(a != b for a, b in zip(used, [*used[1:], used[0]])) and len(set(used)) == 4


def test_symmetric_says_what_is_missing(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has no symmetric memory for cpu; allowed: 'collectives'"):
        symmetric.symmetric_memory(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'symmetric' needs GPUs that torch's symmetric memory connects.*finds none"):
        transport("symmetric", "threads 0")
    carrier = symmetric.Symmetric("threads 0", 0, RANKS, torch.device("cpu"), None)
    with pytest.raises(ValueError, match="'symmetric' with expert_exchange 'exact', allowed: 'padded'"):
        carrier.dispatch(*tokens(0, 0), slot_table(PLACEMENT, 2), spec_of(0))


def test_no_buffers_are_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_capture("it")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="it makes its buffers at the first exchange.*allowed: one step of that size"
    ):
        refuse_capture("it")


# DeepEP


@pytest.fixture
def deep_ep(groups: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in)

    def all_reduce(tensor: Tensor, op: Any, group: ThreadGroup) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.copy_(torch.stack(group.meeting.everyone(group.number, tensor.clone())).max(0).values)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return stand_in


@pytest.mark.parametrize("payload", ["plain", "fp8"])
@pytest.mark.parametrize(("capacity", "overflow"), [(0, "error"), (7, "error"), (3, "exact")])
def test_deep_ep(capacity: int, overflow: str, payload: str, deep_ep: Any, groups: Any) -> None:
    def work(rank: int) -> list[float]:
        return errors(deepep.connect(f"threads {rank}"), spec_of(rank, capacity, overflow, payload), 3)

    for rank, found in enumerate(run_threads(work, groups["threads 0"].meeting)):
        assert len(found) == 3 and max(found) < 0.02
        calls = groups[f"threads {rank}"].calls
        one = ["dispatch", "wait", "combine"]
        assert [name for name, _ in calls] == [
            "buffer", *one, "dispatch", "dispatch", *["wait", "combine"] * 2, "wait", "wait", "wait",
        ]  # fmt: skip
        fixed = (capacity, overflow) == (7, "error")
        assert calls[0][1] == {"tokens": 7 if fixed else 64, "fp8": payload == "fp8"}
        assert calls[1][1] == {"sync": not fixed, "tokens": (4, 7, 1)[rank], "asynchronous": True}
        assert calls[3][1]["asynchronous"] and (not fixed or calls[3][1]["rows"] == RANKS * 7)
        assert traffic.traffic(f"threads {rank}").exchanges >= 3


def test_deep_ep_makes_a_larger_buffer_when_more_tokens_come(deep_ep: Any, groups: Any) -> None:
    def work(rank: int) -> None:
        carrier = deepep.connect(f"threads {rank}")
        for count in (5, 64, 70, 3):
            here = count if rank == 1 else 1
            x = torch.randn(here, SIZE).bfloat16()
            indices = torch.full((here, 1), rank)
            exchange = carrier.dispatch(x, indices, torch.ones(here, 1), slot_table(PLACEMENT, 2), spec_of(rank))
            rows, _, _ = exchange.arrive()
            exchange.combine(rows)
            assert torch.equal(exchange.finish(), x.float())

    run_threads(work, groups["threads 0"].meeting)
    made = [(name, entry["tokens"]) for name, entry in groups["threads 0"].calls if name in ("buffer", "destroy")]
    assert made == [("buffer", 64), ("destroy", 64), ("buffer", 128)]


def test_deep_ep_says_what_is_missing(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("deep_ep") is None:
        with pytest.raises(ValueError, match="'deep_ep' needs the package deep_ep, which is not installed"):
            transport("deep_ep", "threads 0")
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ValueError, match="needs the package deep_ep, which "):
        transport("deep_ep", "threads 0")
    old = ModuleType("deep_ep")
    old.__version__ = "1.2.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", old)
    with pytest.raises(ValueError, match="deep_ep 1.2.1 has no ElasticBuffer, allowed: release 2 or later"):
        transport("deep_ep", "threads 0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "'deep_ep' with rows of torch.float32, allowed: torch.bfloat16"),
        ({"size": 60}, "'deep_ep': rows of 60 values, allowed: multiples of 8"),
        ({"size": 64, "payload": "fp8"}, "with payload 'fp8': rows of 64 values, allowed: multiples of 128"),
        ({"top_k": 33}, "'deep_ep': 33 experts a token, allowed: up to 32"),
        ({"capacity": 2}, "3 tokens on rank 0 with expert_capacity 2, allowed: up to the capacity"),
    ],
)
def test_deep_ep_refuses(change: dict[str, Any], words: str, deep_ep: Any, groups: Any) -> None:
    given = {"dtype": torch.bfloat16, "size": SIZE, "payload": "plain", "top_k": 1, "capacity": 0, **change}
    x = torch.zeros(3, given["size"], dtype=given["dtype"])
    indices = torch.zeros(3, given["top_k"], dtype=torch.int64)
    spec = spec_of(0, given["capacity"], payload=given["payload"])
    with pytest.raises(ValueError, match=words):
        deepep.connect("threads 0").dispatch(x, indices, indices.float(), slot_table(PLACEMENT, 2), spec)


def test_unknown() -> None:
    assert TRANSPORTS == ("collectives", "symmetric", "deep_ep")
    with pytest.raises(ValueError, match="transport: 'rdma', allowed: collectives, symmetric, deep_ep"):
        transport("rdma", "threads 0")
