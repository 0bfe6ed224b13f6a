"""The records that every CuTe template exports, and what they hand to the compiler.

Nothing here needs nvidia-cutlass-dsl; only `Request.entry` does, which is made when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dscompile.targets import Target
from dscompile.templates.triton.record import Config, Meta, Sizes, always, no_constraint

#: What is known about every kernel of this folder.
STATUS = "compiled only"


class UnsuitableError(ValueError):
    """A template was asked for something that its `applies`, or its config, rules out; the message is the reason."""


@dataclass(frozen=True)
class Request:
    """One kernel to compile: what stands between a template and a compiler.

    name: of the kernel. entry: gives (the function that `cute.compile` takes, its arguments); asks for the extra `gpu`.
    threads, shared_bytes: of a block. details: what the kernel was made for, by name; equal requests, equal code.
    """

    name: str
    entry: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    config: Config
    threads: int
    shared_bytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CuteTemplate:
    """One way to run one op, or a part of it, in CuTe DSL.

    op: the vocabulary op, `dsv4::<op>`. build: (the op's arguments by name, config, target) -> the kernels of a call,
    in order. Values of tensors are never looked at. The rest is as in a Triton template.
    """

    name: str
    op: str
    build: Callable[[Meta, Config, Target], tuple[Request, ...]]
    configs: Callable[[Sizes, Target], Iterable[Config]]
    check: Callable[[Config, Sizes, Target], str | None] = no_constraint
    applies: Callable[[Meta, Target], str | None] = lambda meta, target: always(meta)
    status: str = STATUS

    def requests(self, meta: Meta, config: Config, target: Target) -> tuple[Request, ...]:
        """The kernels of a call. Raises UnsuitableError where `applies` gives a reason."""
        if reason := self.applies(meta, target):
            raise UnsuitableError(f"{self.name}: {reason}")
        return self.build(meta, config, target)

    def space(self, sizes: Sizes, target: Target) -> list[Config]:
        """The configs that pass `check`, in order."""
        return [c for c in self.configs(sizes, target) if self.check(c, sizes, target) is None]
