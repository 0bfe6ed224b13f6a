"""Experts change ranks between steps in real processes: equal results, nothing compiled anew, evener ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dscompile
from dscompile import compat
from dscompile.distributed import layers, rebalance
from dscompile.distributed.layers import ExpertLayer
from dscompile.distributed.mesh import ranks_of
from dscompile.distributed.placement import Placement, PlacementError, copies
from dscompile.distributed.rebalance import Rebalancer, apply, gathered_loads, moves
from dscompile.distributed.sharding import ShardedExperts, shard_experts
from dscompile.models.deepseek_v41 import DeepseekV41Config
from dscompile.models.deepseek_v41.moe import MoE
from support.ranks import run_ranks

RANKS, EXPERTS, REDUNDANT = 4, 16, 4


class Small(nn.Module):
    """Two mixtures of experts with a head; the experts' choice leans heavily to the first ones."""

    def __init__(self) -> None:
        super().__init__()
        config = DeepseekV41Config.miniature(hidden_size=64, moe_intermediate_size=32, n_routed_experts=EXPERTS)
        self.moes = nn.ModuleList(MoE(config, torch.float32, False) for _ in range(2))
        self.head = nn.Linear(64, 11)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator) / 8)
        for moe in self.moes:
            moe.gate.bias.copy_(torch.linspace(0.6, 0, EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        for moe in self.moes:
            x = x + moe(x)
        return self.head(x)


def spread() -> Placement:
    """Every expert once, in order, and the last ones, which are hardly used, a second time."""
    return Placement((*range(EXPERTS), *range(EXPERTS - REDUNDANT, EXPERTS)), EXPERTS, RANKS)


def follow(rank: int) -> dict[str, Any]:
    """A model in steps: experts move before the fifth."""
    model, group = Small(), dist.group.WORLD
    x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(rank))
    want = model(x)
    experts = shard_experts(model, group, placement=spread())
    options = {"mesh": group, "expert_load": True, "inductor": False}
    compiled = torch.compile(model, backend="dsv4", options=options)
    rebalancer = Rebalancer(experts, every=2)
    results, reports, counts = [], [], []
    with dscompile.collect() as seen:
        for step in range(6):
            reports.append(rebalancer.tick(step))
            counts.append(int(gathered_loads(experts).sum()))
            results.append(compiled(x))
    return {
        "errors": [float((got - want).abs().max() / want.abs().max()) for got in results],
        "reports": reports, "graphs": len(seen.graphs), "counts": counts,
        "placements": [layer.placement for layer in experts.layers],
    }  # fmt: skip


@pytest.mark.slow
def test_equal_before_and_after_without_compiling(tmp_path: Path) -> None:
    found = run_ranks(follow, RANKS, tmp_path, seconds=120)
    tokens = RANKS * 24 * 4 * 2
    for rank in found:
        assert rank["graphs"] == 1 and max(rank["errors"]) < 1e-5
        assert [report is not None for report in rank["reports"]] == [False] * 4 + [True, False]
        assert rank["placements"] == found[0]["placements"]
        assert rank["counts"] == [0, tokens, 2 * tokens, 3 * tokens, 0, tokens]
    report = found[0]["reports"][4]
    assert report.tokens == 4 * tokens
    assert report.copies > 0 and report.bytes == report.copies * 3 * 64 * 32 * 4
    assert report.after > max(report.before + 0.2, 0.9)
    assert all(layer.after >= layer.before for layer in report.layers)
    assert "balance" in str(report) and found[0]["placements"][0] != spread()
    assert max(placement.replicas.max() for placement in found[0]["placements"]) > 1


def stacks(held: tuple[int, ...]) -> list[Tensor]:
    """Weights of some experts in several formats, a stack that is stored transposed among them."""
    rows = torch.tensor(held).reshape(-1, 1, 1)
    codes = (rows * 7 + torch.arange(15).reshape(3, 5)).to(torch.uint8)
    fp32 = rows * 100.0 + torch.arange(6).reshape(2, 3)
    return [
        codes, fp32.bfloat16(), (rows / 4 + torch.arange(4)).to(torch.float8_e4m3fn).reshape(-1, 2, 2), fp32.clone(),
        fp32.transpose(1, 2).contiguous().transpose(1, 2), torch.tensor(held, dtype=torch.float64),
    ]  # fmt: skip


def same(mine: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.float(), b.float()) for a, b in zip(mine, other, strict=True))


def alone(rank: int, width: int = 4) -> ShardedExperts:
    """Two layers without a model."""
    made = [ExpertLayer(f"layer{i}", spread(), rank, stacks(spread().on_rank(rank)), False, width) for i in range(2)]
    return ShardedExperts(tuple(made), ranks_of(dist.group.WORLD))


def move_and_disagree(rank: int) -> dict[str, Any]:
    experts, found = alone(rank), {}
    ids = [[id(tensor) for tensor in layer.weights] for layer in experts.layers]
    generator = np.random.default_rng(0)
    found["right"] = []
    for round_ in range(4):
        # The whole cycle of ranks at first: every slot is overwritten and its old weights are needed elsewhere.
        extra = generator.integers(0, EXPERTS, REDUNDANT)
        slots = np.roll(spread().slots, 5) if round_ == 0 else generator.permutation([*range(EXPERTS), *extra])
        new = Placement(tuple(slots.tolist()), EXPERTS, RANKS)
        wanted = {"layer1": new} if round_ == 1 else {"layer0": new, "layer1": new}
        count = {layer.name: len(copies(layer.placement, new)) for layer in experts.layers}
        done = apply(experts, wanted)
        found["right"].append([same(list(layer.weights), stacks(layer.held)) for layer in experts.layers])
        found["right"].append([move.copies == (count[move.name] if move.name in wanted else 0) for move in done])
    found["in place"] = ids == [[id(tensor) for tensor in layer.weights] for layer in experts.layers]
    table = layers.slot_table(experts.layers[0].placement, 4)
    found["table"] = torch.equal(experts.layers[0].table, table)

    errors: list[str] = []
    found["errors"] = errors

    def expect(call: Any) -> None:
        try:
            call()
            errors.append("nothing")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    other = spread() if rank == 2 else Placement(tuple(np.roll(spread().slots, 1).tolist()), EXPERTS, RANKS)
    expect(lambda: apply(experts, {"layer0": other}))
    expect(lambda: Rebalancer(experts, every=3 if rank == 1 else 2))
    rebalancer = Rebalancer(experts, every=1)
    for step in (0, 1, 2):
        rebalancer.tick(step)
        dist.barrier()
    expect(lambda: rebalancer.tick(4 if rank == 3 else 3))
    found["unmoved"] = all(same(list(layer.weights), stacks(layer.held)) for layer in experts.layers)
    idle = Rebalancer(experts, every=1, most_copies=2)
    for step in range(4):
        report = idle.tick(step)
        dist.barrier()
    assert report is not None
    found["idle"] = report.copies, report.before, report.tokens
    for layer in experts.layers:
        layer.load += (torch.arange(EXPERTS) + 1) ** 2 * (rank + 1)
    for step in range(4, 8):
        report = idle.tick(step) or report
        dist.barrier()
    found["few"] = [(move.copies, move.after > move.before, move.bytes) for move in report.layers]
    found["still right"] = all(same(list(layer.weights), stacks(layer.held)) for layer in experts.layers)
    return found


def test_moves_of_any_dtype_and_ranks_that_differ(tmp_path: Path) -> None:
    for rank in run_ranks(move_and_disagree, RANKS, tmp_path):
        assert rank["right"] == [[True, True]] * 8 and rank["in place"] and rank["table"]
        apart, numbers, late = rank["errors"]
        assert "ranks differ in the new placement of layer0: ranks 0, 1, 3: " in apart and "; rank 2: " in apart
        assert "ranks differ in every: ranks 0, 2, 3: 2; rank 1: 3; allowed: the same on every rank" in numbers
        assert "the step before which experts move: ranks 0, 1, 2: 3; rank 3: 4" in late
        assert all(error.startswith("AgreementError") for error in rank["errors"])
        assert rank["unmoved"] and rank["still right"]
        assert rank["idle"] == (0, 1.0, 0)
        each = sum(tensor[0].numel() * tensor.element_size() for tensor in stacks((0,)))
        assert all(0 < count <= 2 and better and size == count * each for count, better, size in rank["few"])


@pytest.fixture
def single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_bad_input(single: Any) -> None:
    one = Placement((0, 1, 2, 1), 3, 1)
    weights = [torch.zeros(4, 2, 2), torch.zeros(4, 2)]
    layer = ExpertLayer("moe", one, 0, weights, False, 2)
    experts = ShardedExperts((layer,), ranks_of(single))
    with pytest.raises(PlacementError, match="placements for nope, allowed: moe"):
        apply(experts, {"nope": one})
    with pytest.raises(PlacementError, match="moe: 3 experts in 3 slots on 1 ranks, allowed: 3, 4 and 1, as before"):
        moves(experts, {"moe": Placement((0, 1, 2), 3, 1)})
    wide = ExpertLayer("narrow", Placement((0, 1, 0, 1), 2, 1), 0, [torch.zeros(4, 1)], False, 2)
    with pytest.raises(PlacementError, match="narrow: an expert with 3 replicas, allowed: up to 2"):
        apply(ShardedExperts((wide,), experts.ranks), {"narrow": Placement((0, 1, 0, 0), 2, 1)})
    whole = ExpertLayer("whole", Placement.contiguous(3, 1), 0, [torch.zeros(3, 1)], True)
    with pytest.raises(PlacementError, match="whole: this model holds every expert, allowed: one given to shard"):
        apply(ShardedExperts((whole,), experts.ranks), {"whole": Placement.contiguous(3, 1)})
    for name, value in (("every", 0), ("margin", 0), ("most_copies", -1), ("every", 2.0)):
        with pytest.raises(ValueError, match=f"{name}: {value}, allowed: a whole number >= "):
            Rebalancer(experts, **{"every": 1, name: value})
    with pytest.raises(PlacementError, match="2 nodes for 1 ranks and \\[3\\] experts, allowed: a divisor of both"):
        Rebalancer(experts, 1, nodes=2)
    rebalancer = Rebalancer(experts, 1)
    assert rebalancer.tick(5) is None
    with pytest.raises(ValueError, match="step 5 after step 5, allowed: a later one"):
        rebalancer.tick(5)


def test_each_rebalancer_has_its_own_announcements(single: Any) -> None:
    layer = ExpertLayer("moe", Placement.contiguous(2, 1), 0, [torch.zeros(2, 1)], False)
    experts = ShardedExperts((layer,), ranks_of(single))
    first, second = Rebalancer(experts, 1, margin=1), Rebalancer(experts, 3, margin=1)
    done = [(first.tick(step) is not None, second.tick(step) is not None) for step in range(6)]
    assert [a for a, _ in done] == [False, False, True, False, True, False]
    assert [b for _, b in done] == [False, False, False, False, True, False]
    assert compat.group_store(single).check([f"dsv4/replace/{rebalance._MADE[str(single.group_name)]}/0"])
