"""The group of ranks that share experts: from a DeviceMesh or a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


class MeshError(ValueError):
    """A mesh or group that experts cannot be spread over; the message names it and what is allowed."""


@dataclass(frozen=True)
class Ranks:
    """A process group as plain data: its name, its size, this rank's place in it, its members' global ranks."""

    group: str
    size: int
    rank: int
    members: tuple[int, ...]


def ranks_of(mesh: Any, dim: str | None = None) -> Ranks:
    """mesh: a DeviceMesh or a ProcessGroup. dim: the mesh's dimension that experts are spread over; needed where it has
    several.

    Raises:
        MeshError: torch.distributed is not initialised; not a mesh or group; a dimension that is missing or none of
            the mesh's; a group that this process is not in.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not (dist.is_available() and dist.is_initialized()):
        raise MeshError(
            "experts cannot be spread before torch.distributed is initialised; allowed: after "
            "torch.distributed.init_process_group"
        )
    if isinstance(mesh, DeviceMesh):
        group = _group_of_mesh(mesh, dim)
    elif isinstance(mesh, dist.ProcessGroup):
        if dim is not None:
            raise MeshError(f"dimension {dim!r} of a process group, allowed: None, or a DeviceMesh that has it")
        group = mesh
    else:
        raise MeshError(f"mesh is {mesh!r} ({type(mesh).__name__}), allowed: a DeviceMesh or a ProcessGroup")
    members = dist.get_process_group_ranks(group)
    if dist.get_rank() not in members:
        raise MeshError(f"rank {dist.get_rank()} is not in the group of ranks {members}, allowed: one that is")
    return Ranks(str(group.group_name), len(members), dist.get_rank(group), tuple(members))


def _group_of_mesh(mesh: Any, dim: str | None) -> Any:
    names = mesh.mesh_dim_names or ()
    if dim is None:
        if mesh.ndim > 1:
            raise MeshError(f"a mesh with dimensions {_named(mesh)} and none chosen, allowed: the name of one")
        return mesh.get_group()
    if dim not in names:
        raise MeshError(f"dimension {dim!r} of a mesh with dimensions {_named(mesh)}, allowed: one of them")
    return mesh.get_group(dim)


def _named(mesh: Any) -> str:
    return ", ".join(mesh.mesh_dim_names) if mesh.mesh_dim_names else f"without names, {list(mesh.shape)}"
