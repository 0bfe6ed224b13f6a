"""The options for experts that are spread over ranks: their checks, and what they mean together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dscompile.option_errors import OptionError, hint, listed, reject

if TYPE_CHECKING:
    from dscompile.distributed.mesh import Ranks
    from dscompile.options import Options

FORMS = ("exact", "padded")
OVERFLOWS = ("error", "exact")
PAYLOADS = ("auto", "plain", "fp8")
_NEED_MESH = {
    "expert_parallel": None, "expert_exchange": None, "expert_capacity": None, "expert_overflow": "error",
    "expert_payload": "auto", "expert_transport": "collectives", "expert_load": False,
    "micro_batches": 1,
}  # fmt: skip


def _mesh(name: str, value: Any) -> Any:
    if value is None:
        return None
    from dscompile.distributed.mesh import MeshError, ranks_of

    try:
        several = getattr(value, "ndim", 1) > 1  # which dimension, is another option's to say
        ranks_of(value, value.mesh_dim_names[0] if several and value.mesh_dim_names else None)
    except MeshError as error:
        raise OptionError(f"option {name!r}: {error}") from None
    return value


def _text(name: str, value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else reject(name, value, "a name, or None")


def _one_of(allowed: tuple[str, ...], none: bool = False) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if (none and value is None) or (isinstance(value, str) and value in allowed):
            return value
        reject(name, value, f"{'None or ' if none else ''}one of {listed(allowed)}{hint(value, allowed)}")

    return check


def _capacity(name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        reject(name, value, "None or a whole number >= 1")
    return value


def _transport(name: str, value: Any) -> str:
    from dscompile.distributed.transports import TRANSPORTS

    found: str = _one_of(TRANSPORTS)(name, value)
    return found


def _flag(name: str, value: Any) -> bool:
    return value if isinstance(value, bool) else reject(name, value, "True or False")


def _halves(name: str, value: Any) -> int:
    return value if type(value) is int and value in (1, 2) else reject(name, value, "1 or 2")


EXPERT_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "mesh": _mesh,
    "expert_parallel": _text,
    "expert_exchange": _one_of(FORMS, none=True),
    "expert_capacity": _capacity,
    "expert_overflow": _one_of(OVERFLOWS),
    "expert_payload": _one_of(PAYLOADS),
    "expert_transport": _transport,
    "expert_load": _flag,
    "micro_batches": _halves,
}


def check_experts(options: Options) -> None:
    """Raises OptionError for options that do not go together."""
    if options.mesh is None:
        for name, default in _NEED_MESH.items():
            if getattr(options, name) != default:
                reject(name, getattr(options, name), f"{default!r} without the option 'mesh'")
        return
    expert_ranks(options)
    if options.verify:
        raise OptionError(
            "option 'verify' is True with the option 'mesh'; allowed: one of them (the graph before rewriting has just "
            "this rank's experts, so there is nothing to compare with)"
        )
    if options.micro_batches == 2 and options.elide is not None:
        reject("micro_batches", 2, f"1 with the option 'elide' ({options.elide!r})")
    padded = form_of(options) == "padded"
    if not padded and options.expert_transport == "symmetric":
        raise OptionError(
            "option 'expert_transport' is 'symmetric' for an exact exchange; allowed: expert_exchange='padded', or "
            "another transport"
        )
    if padded and options.expert_capacity is None:
        raise OptionError(
            "option 'expert_capacity' is None for a padded exchange; allowed: the most tokens that a rank has in a step"
        )
    if not padded and (options.expert_capacity is not None or options.expert_overflow != "error"):
        raise OptionError(
            f"option 'expert_capacity' is {options.expert_capacity} and 'expert_overflow' {options.expert_overflow!r} "
            "for an exact exchange; allowed: None and 'error', or expert_exchange='padded'"
        )


def expert_ranks(options: Options) -> Ranks:
    """The group of ranks; OptionError if mesh and dimension do not go together."""
    from dscompile.distributed.mesh import MeshError, ranks_of

    try:
        return ranks_of(options.mesh, options.expert_parallel)
    except MeshError as error:
        raise OptionError(f"option 'expert_parallel': {error}") from None


def form_of(options: Options) -> str:
    """ "exact" or "padded": as asked for, else as the role wants it."""
    if options.expert_exchange is not None:
        return options.expert_exchange
    return "padded" if getattr(options, "role", None) == "decode" else "exact"


def expert_ranks_key(value: Any) -> list[Any] | None:
    """What of a mesh or process group changes what is compiled, as data; None for any other value."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(value, DeviceMesh):
        return [value.mesh.tolist(), list(value.mesh_dim_names or ()), dist.get_rank()]
    if isinstance(value, dist.ProcessGroup):
        return [dist.get_process_group_ranks(value), dist.get_rank()]
    return None
