"""What a user can choose with `torch.compile(model, backend="dsv4", options={...})`: one frozen, validated record."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dscompile import __version__
from dscompile.expert_options import EXPERT_CHECKS, check_experts, expert_ranks_key
from dscompile.option_errors import OptionError, hint, listed, reject
from dscompile.role_options import ROLE_CHECKS, check_roles
from dscompile.targets import TARGETS

# Where output goes does not change what is compiled, so it stays out of the cache key. A new field is in it by default.
_OUTPUT_ONLY = {"keyed": False}


@dataclass(frozen=True)
class Options:
    """The backend's options. Every way of making one validates it.

    target: a name in `dscompile.targets.TARGETS`; None takes the device of the graph's tensors.
    strict: raise where something that resembles DeepSeek mathematics, or a family that the model must have, was not
        recognised, instead of leaving it as it is.
    disable: names of passes to skip; order and repetition do not matter.
    dump_dir: folder for the graph before and after every pass and their differences; None writes nothing.
    inductor: compile the rewritten graph with Inductor; False runs it eagerly, operation by operation.
    verify: on its first call, run every rewritten graph beside the original one and raise if they differ.
    share: compute what several layers have in common once.
    lower: replace operations by the target's kernels; False runs their plain reference.
    report: file for the coverage report, written after every compiled graph; `.json` and `.html` choose the form, any
        other ending gives text.
    role: which batches the graphs serve: "prefill", "decode", "mixed", or None for not said.
    elide: for the role "prefill", run only the tokens that the last logits and the caches need: "exact" gives the same
        result, "bounded" the approximation that engines use; None runs all.
    elide_tail: tokens of each prompt that "bounded" keeps; None takes the width of the attention window.
    mesh: a DeviceMesh or process group over whose ranks the experts are spread; None keeps them on every rank.
    expert_parallel: the dimension of the mesh; needed where it has several.
    expert_exchange: "exact" (rows as many as are needed; the host waits for counts) or "padded" (room for
        `expert_capacity` rows between any two ranks; nothing waits). None: "padded" in the role "decode", else "exact".
    expert_capacity: tokens that a rank may have in a step, the same number on every rank; for "padded".
    expert_overflow: "error", or "exact" to take the exact form in steps that have more rows than the capacity.
    expert_payload: "plain" sends rows as they are, "fp8" as E4M3 with a scale for 32 values; "auto" is "fp8" where the
        experts round their inputs to it anyway.
    expert_transport: a name in `dscompile.distributed.transports.TRANSPORTS`.
    expert_load: count the tokens of every expert, for balancing.
    micro_batches: 2 cuts the batch into halves, one of which computes while the other's tokens travel; 1 does not.
    inductor_options: settings for Inductor (names of `torch._inductor.config`), as `torch.compile(options=...)` takes
        them with the default backend.
    """

    target: str | None = None
    strict: bool = False
    disable: tuple[str, ...] = ()
    dump_dir: str | None = field(default=None, metadata=_OUTPUT_ONLY)
    inductor: bool = True
    verify: bool = False
    share: bool = True
    lower: bool = True
    report: str | None = field(default=None, metadata=_OUTPUT_ONLY)
    role: str | None = None
    elide: str | None = None
    elide_tail: int | None = None
    mesh: Any = None
    expert_parallel: str | None = None
    expert_exchange: str | None = None
    expert_capacity: int | None = None
    expert_overflow: str = "error"
    expert_payload: str = "auto"
    expert_transport: str = "collectives"
    expert_load: bool = False
    micro_batches: int = 1
    inductor_options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            object.__setattr__(self, each.name, _CHECKS[each.name](each.name, value))
        if self.inductor_options and not self.inductor:
            raise OptionError(
                f"option 'inductor_options' is {self.inductor_options!r} but Inductor is switched off; "
                "allowed with 'inductor': False: no Inductor options and no mode other than 'default'"
            )
        check_experts(self)
        check_roles(self)

    @classmethod
    def from_user(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Options from what `torch.compile` hands to a backend.

        Args:
            options: field names and values; None and {} give the defaults.
            mode: one of `torch.compile`'s modes. Its Inductor settings apply below explicit `inductor_options`.

        Raises:
            OptionError: an unknown name, a value that is not allowed, an unknown mode.
        """
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options is {options!r}; allowed: a dict with names out of {listed(_NAMES)}, or None")
        given = dict(options or {})
        for name, value in given.items():
            if name not in _NAMES:
                raise OptionError(
                    f"unknown option {name!r} (value {value!r}){hint(name, _NAMES)}; allowed: {listed(_NAMES)}"
                )
        if mode is not None and (preset := _mode_settings(mode)):
            given["inductor_options"] = {**preset, **_inductor("inductor_options", given.get("inductor_options", {}))}
        return cls(**given)

    def check_passes(self, known: Collection[str]) -> None:
        """Raises `OptionError` if `disable` names a pass that is not in `known`."""
        for name in self.disable:
            if name not in known:
                raise OptionError(
                    f"option 'disable' names an unknown pass {name!r}{hint(name, known)}; allowed: {listed(known)}"
                )

    def cache_key(self) -> str:
        """A hash over every field that can change what is compiled, and this package's version.

        Equal options give the same key in every process, whatever order they were given in. A value without a stable
        form (a plain function inside `inductor_options`) gives a key that no other process will ever produce.
        """
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get("keyed", True)}
        text = json.dumps([__version__, _canonical(content)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _flag(name: str, value: Any) -> bool:
    return value if isinstance(value, bool) else reject(name, value, "True or False")


def _path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        reject(name, value, "a path, or None")
    return str(os.fspath(value))


def _target(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value in TARGETS):
        reject(name, value, f"None or one of {listed([*TARGETS])}{hint(value, [*TARGETS])}")
    return value


def _pass_names(name: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(n, str) and n for n in names):
        reject(name, value, "a pass name, or a list, tuple or set of them")
    return tuple(sorted(set(names)))


def _inductor(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        reject(name, value, "a dict of names in torch._inductor.config and their values")
    if not value:
        return {}
    known = _inductor_settings()
    settings = {}
    for key, setting in value.items():
        plain = str(key).replace("-", "_")  # as torch.compile accepts them
        if plain not in known:
            raise OptionError(
                f"option {name!r} has an unknown setting {key!r} (value {setting!r}){hint(plain, known)}"
                "; allowed: what torch._inductor.list_options() lists"
            )
        settings[plain] = copy.copy(setting)
    return settings


@functools.cache
def _inductor_settings() -> frozenset[str]:
    import torch._inductor

    return frozenset(torch._inductor.list_options())


def _mode_settings(mode: str) -> dict[str, Any]:
    import torch._inductor

    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    if mode not in modes:
        raise OptionError(f"unknown mode {mode!r}{hint(mode, modes)}; allowed: {listed(modes)}")
    return dict(torch._inductor.list_mode_options(mode))


_CHECKS: dict[str, Any] = {
    "target": _target,
    "strict": _flag,
    "disable": _pass_names,
    "dump_dir": _path,
    "inductor": _flag,
    "verify": _flag,
    "share": _flag,
    "lower": _flag,
    "report": _path,
    **ROLE_CHECKS,
    **EXPERT_CHECKS,
    "inductor_options": _inductor,
}
_NAMES: tuple[str, ...] = tuple(each.name for each in fields(Options))


def _canonical(value: Any) -> Any:
    """`value` as JSON data that differs whenever the value or its type does, and never depends on order or address."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return [type(value).__name__, repr(value)]
    if isinstance(value, Mapping):
        pairs = ([_canonical(key), _canonical(item)] for key, item in value.items())
        return ["dict", sorted(pairs, key=json.dumps)]
    if isinstance(value, set | frozenset):
        return ["set", sorted((_canonical(item) for item in value), key=json.dumps)]
    if isinstance(value, list | tuple):
        return ["list", [_canonical(item) for item in value]]
    if (ranks := expert_ranks_key(value)) is not None:
        return ["ranks", *ranks]
    # Inductor's custom passes identify themselves; None there means "do not cache".
    identity = value.uuid() if callable(getattr(value, "uuid", None)) else None
    if identity is not None:
        return [f"{type(value).__module__}.{type(value).__qualname__}", _canonical(identity)]
    return [_process_token(), id(value)]


@functools.cache
def _process_token() -> str:
    return secrets.token_hex(16)
