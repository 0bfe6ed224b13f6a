"""The records that every Triton template exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dscompile.targets import Target

Meta = Mapping[str, Any]
Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """One point of a template's config space.

    constants: what the kernels take as `tl.constexpr`, by name (tile sizes, splits, variants); hashable and ordered.
    """

    num_warps: int = 4
    num_stages: int = 2
    constants: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> int:
        return dict(self.constants)[name]

    def __str__(self) -> str:
        named = (f"{name}={value}" for name, value in self.constants)
        return " ".join((f"warps={self.num_warps}", f"stages={self.num_stages}", *named))


def config(num_warps: int = 4, num_stages: int = 2, **constants: int) -> Config:
    """`config(4, 2, BLOCK_N=64)`."""
    return Config(num_warps, num_stages, tuple(constants.items()))


def no_constraint(config: Config, sizes: Sizes, target: Target) -> str | None:
    return None


def always(meta: Meta) -> str | None:
    return None


@dataclass(frozen=True)
class TritonTemplate:
    """One way to run one op on a GPU.

    name: of the template; it becomes the custom op `dsv4_triton::<name>`.
    op: the vocabulary op that it implements, `dsv4::<op>`.
    fn: takes exactly the op's arguments, and `config=` and `target=` as keywords; allocates with `new_empty` and calls
        `launching.launch` only, so that it also runs on meta tensors, where launches are recorded instead.
    configs: (sizes, target) -> the config space, the one to take without any measurement first. `sizes` are those of
        the op's cost, see `dscompile.ops`.
    check: (config, sizes, target) -> why a config cannot be used there, or None; asked before anything is compiled.
    applies: the op's arguments by name (tensors or fakes) -> None if the template fits, else the reason.
    """

    name: str
    op: str
    fn: Callable[..., Any]
    configs: Callable[[Sizes, Target], Iterable[Config]]
    check: Callable[[Config, Sizes, Target], str | None] = no_constraint
    applies: Callable[[Meta], str | None] = always

    def space(self, sizes: Sizes, target: Target) -> list[Config]:
        """The configs that pass `check`, in order."""
        return [c for c in self.configs(sizes, target) if self.check(c, sizes, target) is None]
