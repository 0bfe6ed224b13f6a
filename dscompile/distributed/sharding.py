"""A model whose ranks each keep only their own experts in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dscompile import compat
from dscompile.distributed import agreement
from dscompile.distributed.layers import ExpertLayer, layer_of, unmark
from dscompile.distributed.mesh import Ranks, ranks_of
from dscompile.distributed.placement import Placement, PlacementError


@dataclass(frozen=True)
class ShardedExperts:
    """The experts of a model spread over ranks: layers in order, and the group."""

    layers: tuple[ExpertLayer, ...]
    ranks: Ranks

    @property
    def held_bytes(self) -> int:
        """Bytes of experts in this rank's memory."""
        return sum(layer.held_bytes for layer in self.layers)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all experts, each once."""
        each = ((layer.held_bytes, layer.placement) for layer in self.layers)
        return sum(held * where.experts // where.slots_per_rank for held, where in each)

    def loads(self) -> Tensor:
        """int64 [layers, experts]: tokens that chose each expert on this rank since they were last zeroed."""
        return torch.stack([layer.load for layer in self.layers])


def shard_experts(
    model: nn.Module,
    mesh: Any,
    expert_parallel: str | None = None,
    placement: Placement | Mapping[str, Placement] | None = None,
    replicas: int | None = None,
    of: Sequence[nn.Module] | None = None,
) -> ShardedExperts:
    """Keep only this rank's experts in memory; the model then runs compiled with the same mesh, and not without.

    Every rank of the mesh calls it, with equal weights on all.

    Args:
        model: holds every expert of its layers. Modules with experts are those that hold two or more parameters of
            three dimensions or more with the same first one, the number of experts; or those in `of`.
        mesh, expert_parallel: a DeviceMesh and its dimension, or a process group.
        placement: where experts lie, for all layers or by the module's name; None is `Placement.contiguous`.
        replicas: the most replicas of an expert that a later placement may have; None: as many as slots allow.

    Raises:
        MeshError, PlacementError: numbers that do not go together; the message names them.
        ValueError: no module with experts, or one that is spread already.
        AgreementError: ranks with different placements.
    """
    ranks = ranks_of(mesh, expert_parallel)
    found = dict(expert_modules(model, of))
    if not found:
        raise ValueError(f"{type(model).__name__} has no module with experts; allowed: of=[modules that hold them]")
    for name, (module, _) in found.items():
        for layer in {layer_of(tensor) for _, tensor in _stacks(module, of)} - {None}:
            assert layer is not None
            if not layer.whole:
                raise ValueError(f"{name}: its experts are spread already, allowed: a model that holds every expert")
            unmark(layer)  # it was compiled with a mesh before
    placements = {
        name: placement_for(name, _given(placement, name), count, ranks.size) for name, (_, count) in found.items()
    }
    _check_names(placement, found)
    _check_equal(ranks, placements)
    layers = []
    for name, (module, _) in found.items():
        stacks = _cut(module, dict(_stacks(module, of)), placements[name].on_rank(ranks.rank))
        layers.append(_layer(model, name, module, stacks, placements[name], ranks, replicas))
    return ShardedExperts(tuple(layers), ranks)


def sharded_experts(model: nn.Module, mesh: Any, expert_parallel: str | None = None) -> ShardedExperts:
    """What `shard_experts` returned for a model, or would have for one that was read with `expert_mesh`.

    Raises:
        ValueError: its experts are not spread.
    """
    tensors = [*model.parameters(), *model.buffers()]
    found = {id(layer): layer for layer in map(layer_of, tensors) if layer is not None}
    if not found:
        raise ValueError(f"the experts of {type(model).__name__} are not spread, allowed: shard_experts first")
    return ShardedExperts(tuple(found.values()), ranks_of(mesh, expert_parallel))


def expert_modules(
    model: nn.Module, of: Sequence[nn.Module] | None = None
) -> Iterator[tuple[str, tuple[nn.Module, int]]]:
    """(name, (module, number of experts)) of every module that holds stacked experts."""
    for name, module in model.named_modules():
        if of is not None and not any(module is each for each in of):
            continue
        sizes = {tensor.shape[0] for _, tensor in _stacks(module, of)}
        if len(sizes) == 1 and len(list(_stacks(module, of))) >= 2 and (size := sizes.pop()) > 1:
            yield name, (module, size)


def _stacks(module: nn.Module, of: Sequence[nn.Module] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Buffers only of modules that were named: two caches of a batch look like two stacks of experts."""
    buffers = module.named_buffers(recurse=False) if of is not None else ()
    for name, tensor in (*module.named_parameters(recurse=False), *buffers):
        if tensor.dim() >= 3:
            yield name, tensor


def _given(placement: Placement | Mapping[str, Placement] | None, name: str) -> Placement | None:
    return placement.get(name) if isinstance(placement, Mapping) else placement


def placement_for(name: str, placement: Placement | None, experts: int, ranks: int) -> Placement:
    """The placement of a layer: the given one, if it fits the numbers, else a contiguous one.

    Raises:
        PlacementError: it does not fit, or experts do not divide among ranks.
    """
    if placement is None:
        return Placement.contiguous(experts, ranks)
    if not isinstance(placement, Placement):
        raise PlacementError(f"{name}: placement is {placement!r}, allowed: a Placement, or None")
    if (placement.experts, placement.ranks) != (experts, ranks):
        raise PlacementError(
            f"{name}: a placement of {placement.experts} experts on {placement.ranks} ranks, allowed: {experts} "
            f"experts on the mesh's {ranks} ranks"
        )
    return placement


def take_over(model: nn.Module, ranks: Ranks, placement: Placement) -> ShardedExperts:
    """As `shard_experts`, for a model that was made with this rank's experts only, `placement` in every layer."""
    layers = []
    for name, module in model.named_modules():
        stacks = [tensor for _, tensor in _stacks(module)]
        if len(stacks) >= 2 and {tensor.shape[0] for tensor in stacks} == {placement.slots_per_rank}:
            layers.append(_layer(model, name, module, stacks, placement, ranks, None))
    _check_equal(ranks, {layer.name: placement for layer in layers})
    return ShardedExperts(tuple(layers), ranks)


def _check_names(given: Any, found: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - set(found)) if isinstance(given, Mapping) else []
    if unknown:
        raise PlacementError(f"placements for {', '.join(unknown)}, allowed: {', '.join(found)}")


def _check_equal(ranks: Ranks, placements: Mapping[str, Placement]) -> None:
    group = compat.process_group(ranks.group)
    if dist.get_backend(group) == "fake":
        return
    facts = {f"the placement of {name}": placement.fingerprint for name, placement in placements.items()}
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, facts, group=group)
    if message := agreement.difference(everyone):
        raise agreement.AgreementError(message)


def _cut(module: nn.Module, stacks: Mapping[str, Tensor], held: Sequence[int]) -> list[Tensor]:
    """Leave these experts only in a module; what it then holds."""
    for key, tensor in stacks.items():
        rows = tensor.detach()[torch.tensor(held, device=tensor.device)]  # a copy, so that the whole stack is freed
        if isinstance(tensor, nn.Parameter):
            setattr(module, key, nn.Parameter(rows, requires_grad=False))
        else:
            module.register_buffer(key, rows, persistent=key not in module._non_persistent_buffers_set)
    return [getattr(module, key) for key in stacks]


def _layer(
    model: nn.Module, name: str, module: nn.Module, stacks: Sequence[Tensor], placement: Placement, ranks: Ranks,
    replicas: int | None,
) -> ExpertLayer:  # fmt: skip
    """The state of a module that holds this rank's experts only; prepares the module for that.

    It counts the experts that it holds, refuses to run eagerly, as do the modules that use it, and its state dict says
    which experts are in it.
    """
    for key, value in vars(module).items():  # such as num_experts, by which a module's forward sizes its groups
        if type(value) is int and value == placement.experts and "expert" in key:
            setattr(module, key, placement.slots_per_rank)
    users = [each for each in model.modules() if any(child is module for child in each.children())]
    for each in (module, *users):
        each.register_forward_pre_hook(_refuse_eager)
    module.register_state_dict_post_hook(_say_experts)
    module.register_load_state_dict_pre_hook(_check_experts)
    widest = min(placement.redundant + 1 if replicas is None else replicas, len(placement.slots))
    return ExpertLayer(name, placement, ranks.rank, stacks, False, widest, ranks.members)


def _refuse_eager(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{type(module).__name__} holds only this rank's experts, allowed: torch.compile(model, backend='dsv4', "
            "options={'mesh': ...})"
        )


_HELD = "held_experts"


def _held(module: nn.Module) -> tuple[int, ...] | None:
    layers = [layer_of(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
    return next((layer.held for layer in layers if layer is not None), None)


def _say_experts(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if (held := _held(module)) is not None:
        state[f"{prefix}{_HELD}"] = torch.tensor(held)


def _check_experts(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Raises ValueError where the weights to load are of other experts than the module's slots hold."""
    given, held = state.pop(f"{prefix}{_HELD}", None), _held(module)
    if given is None or held is None:
        return
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(f"{prefix.rstrip('.')}: load_state_dict(assign=True) on spread experts, allowed: assign=False")
    if tuple(given.tolist()) != held:
        raise ValueError(
            f"{prefix.rstrip('.')}: weights of experts {given.tolist()} for slots that hold {list(held)}, allowed: the "
            "same placement as when they were saved"
        )
