"""One rank of a large job in a single process, and everything that is refused: no other process is needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dscompile
from dscompile.distributed.agreement import difference
from dscompile.distributed.layers import layer_of
from dscompile.distributed.mesh import MeshError, ranks_of
from dscompile.distributed.placement import Placement, PlacementError
from dscompile.distributed.rebalance import Rebalancer
from dscompile.distributed.sharding import sharded_experts
from dscompile.expert_options import form_of
from dscompile.options import OptionError, Options
from dscompile.passes.expert_parallel import ExpertParallelError
from tests.support.expert_blocks import Blocks, tokens
from tests.support.ranks import fake_group


def run(model: torch.nn.Module, x: torch.Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    with torch.no_grad(), dscompile.collect() as report:
        torch.compile(model, backend="dsv4", options={"inductor": False, **options})(x)
    return report.graphs[-1]


def refused(model: torch.nn.Module, x: torch.Tensor, **options: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Dynamo wraps it
        run(model, x, **options)
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, (ExpertParallelError, PlacementError, OptionError)), inner
    return str(inner)


def test_one_rank_of_72() -> None:
    """Rank 5 of 72: whole layers are made for it in one process, and run with its own rows in place of others'."""
    model = Blocks(layers=2, n_routed_experts=144)
    x = tokens(model.config, 0, (2, 4), torch.float32)
    with fake_group(5, 72) as group:
        mesh = init_device_mesh("cpu", (72,), mesh_dim_names=("ep",))
        sharded = dscompile.shard_experts(model, mesh, "ep")
        assert sharded.held_bytes * 72 == sharded.whole_bytes
        assert sharded.layers[1].held == (10, 11)
        for options in ({}, {"expert_exchange": "padded", "expert_capacity": 8}):
            graph = run(model, x, mesh=mesh, expert_parallel="ep", **options)
            form = "padded to 8 rows a rank" if options else "exact"
            assert graph.exchanges == [
                f"layers.{i}.ffn.experts: 144 experts in 2 slots on each of 72 ranks, {form}, payload plain, "
                "collectives" for i in (0, 1)
            ]  # fmt: skip
        assert refused(model, x).endswith("option 'mesh' is None; allowed: the mesh that was given to shard_experts")
        other = dist.new_group([4, 5])
        assert "in a group of ranks [4, 5] (this is number 1), allowed: the mesh given to" in refused(
            model, x, mesh=other
        )
        with pytest.raises(RuntimeError, match="MoE holds only this rank's experts"):
            model(x)
        with pytest.raises(ValueError, match="spread already"):
            dscompile.shard_experts(model, group)


def test_experts_that_are_not_recognised_are_not_taken_for_all() -> None:
    model = Blocks(layers=1)
    x = tokens(model.config, 0, (1, 2), torch.float32)
    with fake_group(0, 2) as group:
        dscompile.shard_experts(model, group)
        message = refused(model, x, mesh=group, disable=["experts"])
    assert "layers.0.ffn.experts" in message and "were not recognised" in message


def test_a_model_that_holds_every_expert() -> None:
    """Without `shard_experts` each rank uses its part of the whole stack; the state is kept for the next graph."""
    model = Blocks(layers=1)
    x = tokens(model.config, 0, (1, 2), torch.float32)
    with fake_group(1, 4) as group:
        run(model, x, mesh=group, expert_load=True)
        layer = layer_of(model.layers[0].ffn.experts.w13)
        assert layer is not None and layer.whole and layer.held == (4, 5, 6, 7)
        run(model, x, mesh=group, expert_load=True)
        assert layer_of(model.layers[0].ffn.experts.w13) is layer
        assert int(layer.load.sum()) == 2 * 2 * model.config.num_experts_per_tok


def test_copies_and_saved_weights() -> None:
    """A copy of a rank's share does not pass for a whole model, nor weights of other experts for its own."""
    model = Blocks(layers=1)
    x = tokens(model.config, 0, (1, 2), torch.float32)
    experts = model.config.n_routed_experts
    with fake_group(0, 2) as group:
        order = tuple(reversed(range(experts)))
        sharded = dscompile.shard_experts(model, group, placement=Placement(order, experts, 2))
        state = model.state_dict()
        assert state["layers.0.ffn.experts.held_experts"].tolist() == [*order[: experts // 2]]
        model.load_state_dict(state)
        plain = Blocks(layers=1)
        dscompile.shard_experts(plain, group)
        with pytest.raises(ValueError, match=r"weights of experts \[15, 14.*for slots that hold \[0, 1"):
            plain.load_state_dict(state)
        with pytest.raises(ValueError, match="assign=True"):
            model.load_state_dict(state, assign=True)
        copied = copy.deepcopy(model)
        for options in ({"mesh": group}, {}):
            message = refused(copied, x, **options)
            assert f"weights of {experts // 2} experts and a router that chooses among {experts}" in message
        experts_module = model.layers[0].ffn.experts
        experts_module.w2 = torch.nn.Parameter(experts_module.w2.clone(), requires_grad=False)
        assert "some of its weights were replaced" in refused(model, x, mesh=group)
        with pytest.raises(RuntimeError, match="holds only this rank's experts"):
            model.layers[0].ffn(x)
        assert sharded.layers[0].members == (0, 1)


def test_whole_models_and_caches_are_not_cut() -> None:
    class Caches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(4, 8, 2))
            self.register_buffer("v", torch.zeros(4, 8, 2))

    model = Blocks(layers=1)
    x = tokens(model.config, 0, (1, 2), torch.float32)
    with fake_group(0, 2) as group:
        with pytest.raises(ValueError, match="Caches has no module with experts"):
            dscompile.shard_experts(Caches(), group)
        assert "no experts were recognised" in run(torch.nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2),
                                                   mesh=group).notes[-1]  # fmt: skip
        run(model, x, mesh=group)
        with pytest.raises(ValueError, match="every rank holds all of its experts"):
            Rebalancer(sharded_experts(model, group), every=1)
        sharded = dscompile.shard_experts(model, group)
        assert sharded.held_bytes * 2 == sharded.whole_bytes
        assert run(model, x, mesh=group).exchanges


def test_numbers_that_do_not_go_together() -> None:
    model = Blocks(layers=1)
    x = tokens(model.config, 0, (3, 2), torch.float32)
    experts = model.config.n_routed_experts
    with fake_group(0, 3) as group:
        assert refused(model, x, mesh=group).startswith(f"{experts} experts on 3 ranks, allowed without a placement")
        with pytest.raises(PlacementError, match=f"{experts} experts on 3 ranks"):
            dscompile.shard_experts(model, group)
        with pytest.raises(PlacementError, match=r"experts 0 of \d+ have no slot"):
            Placement((1, *range(1, experts)), experts, 2)
        with pytest.raises(PlacementError, match="placements for layers.7, allowed: layers.0.ffn.experts"):
            wide = Placement((*range(experts), *range(-experts % 3)), experts, 3)
            dscompile.shard_experts(model, group, placement={"layers.7": wide, "layers.0.ffn.experts": wide})
        with pytest.raises(PlacementError, match=f"{experts} experts on 2 ranks, allowed: {experts} experts on the"):
            dscompile.shard_experts(model, group, placement=Placement.contiguous(experts, 2))
        with pytest.raises(ValueError, match="Linear has no module with experts"):
            dscompile.shard_experts(torch.nn.Linear(2, 2), group)
    with fake_group(0, 2) as group:
        message = refused(model, x, mesh=group, expert_exchange="padded", expert_capacity=5)
        assert "6 tokens on this rank" in message and "'expert_capacity' is 5; allowed: at least 6, or" in message


def test_options() -> None:
    with pytest.raises(OptionError, match="'mesh': experts cannot be spread before torch.distributed is initialised"):
        Options(mesh=object())
    with pytest.raises(MeshError, match="initialised"):
        ranks_of(object())
    for name, value in (
        ("expert_parallel", "ep"), ("expert_exchange", "exact"), ("expert_capacity", 4), ("expert_load", True),
        ("expert_payload", "fp8"), ("expert_overflow", "exact"), ("expert_transport", "deep_ep"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=f"{name!r} is {value!r}.*without the option 'mesh'"):
            Options(**{name: value})
    with fake_group(1, 4) as group:
        for wrong, message in (
            ({"mesh": 3}, r"mesh is 3 \(int\), allowed: a DeviceMesh or a ProcessGroup"),
            ({"expert_exchange": "padding"}, "'padding'.*None or one of exact, padded; did you mean 'padded'"),
            ({"expert_exchange": "padded"}, "'expert_capacity' is None for a padded exchange"),
            ({"expert_capacity": 4}, "'expert_capacity' is 4 .* for an exact exchange"),
            ({"expert_exchange": "padded", "expert_capacity": 0}, "'expert_capacity' is 0 .*whole number >= 1"),
            ({"expert_payload": "fp4"}, "'fp4'.*one of auto, plain, fp8"),
            ({"expert_transport": "pigeon"}, "'pigeon'.*one of collectives"),
            ({"expert_transport": "symmetric"}, "'symmetric' for an exact exchange; allowed: expert_exchange='padded'"),
            ({"expert_load": 1}, "'expert_load' is 1"),
            ({"expert_parallel": "ep"}, "dimension 'ep' of a process group"),
            ({"verify": True}, "'verify' is True with the option 'mesh'"),
        ):  # fmt: skip
            with pytest.raises(OptionError, match=message):
                Options(**{"mesh": group, **wrong})
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        with pytest.raises(OptionError, match="dimensions dp, ep and none chosen"):
            Options(mesh=mesh)
        with pytest.raises(OptionError, match="dimension 'tp' of a mesh with dimensions dp, ep"):
            Options(mesh=mesh, expert_parallel="tp")
        chosen = Options(mesh=mesh, expert_parallel="ep")
        assert ranks_of(mesh, "ep").members == (0, 1) and ranks_of(mesh, "ep").rank == 1
        assert chosen.cache_key() == Options(mesh=mesh, expert_parallel="ep").cache_key()
        assert chosen.cache_key() != Options(mesh=mesh, expert_parallel="dp").cache_key()
        assert form_of(chosen) == "exact"
        assert form_of(Options(mesh=group, role="decode", expert_capacity=4)) == "padded"


def test_what_ranks_differ_in() -> None:
    assert difference([{"a": "1"}, {"a": "1"}]) == ""
    said = difference([{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1"}])
    assert said == (
        "ranks differ in a: ranks 0, 2: 1; rank 1: 2\nranks differ in b: ranks 0, 1: x; rank 2: (nothing); "
        "allowed: the same on every rank"
    )


def test_tuning_records_are_among_what_ranks_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from dscompile.targets import get_target
    from dscompile.tuning import selection
    from dscompile.tuning.database import Database

    h200, gb300 = get_target("sm_90a"), get_target("sm_103a")
    assert selection.records_fingerprint(h200) != selection.records_fingerprint(gb300)
    assert selection.records_fingerprint(h200) == selection.records_fingerprint(h200)
    monkeypatch.setattr(selection, "databases", lambda: (Database(None),))
    assert selection.records_fingerprint(h200) == selection.records_fingerprint(gb300)
