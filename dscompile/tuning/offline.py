"""From a recorded launch to the machine code of a target, without a GPU or a driver."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dscompile import compat
from dscompile.targets import Target
from dscompile.templates.triton.launching import OPTIONS, Launch, record_launches
from dscompile.templates.triton.record import Config, TritonTemplate


class OfflineCompileError(RuntimeError):
    """A kernel could not be compiled for a target; the message names kernel, target, config and cause."""


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one launch.

    key: sha256 over source, signature, constants, options, target and compiler; equal keys mean equal code.
    metadata: what Triton needs in order to load it, as JSON values.
    """

    name: str
    key: str
    target: str
    launch: Launch = field(repr=False)
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    source: str = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)

    @property
    def shared_bytes(self) -> int:
        return int(self.metadata["shared"])

    @property
    def tensor_memory_columns(self) -> int:
        return int(self.metadata.get("tmem_size") or 0)

    @property
    def warps(self) -> int:
        return int(self.metadata["num_warps"])


def launches_of(template: TritonTemplate, args: tuple[Any, ...], config: Config, target: Target) -> list[Launch]:
    """The kernels that a call of the template would start. args: those of the op, with meta tensors."""
    with record_launches() as launches:
        template.fn(*args, config=config, target=target)
    return launches


def compile_launch(launch: Launch, target: Target) -> CompiledKernel:
    """Compile one recorded launch.

    Raises OfflineCompileError; also if this process runs kernels in Triton's interpreter, where nothing compiles.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target.capability is None:
        raise OfflineCompileError(f"target {target.name!r} is no GPU")
    if triton.knobs.runtime.interpret:
        raise OfflineCompileError("TRITON_INTERPRET is set: kernels of this process run in the interpreter")
    types, constants, attributes = launch.signature()
    source = ASTSource(launch.kernel, types, constants, attributes)
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages, **OPTIONS}
    major, minor = target.capability
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    except Exception as error:  # Triton raises its own, LLVM's and subprocess errors
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f"{launch.name} for {target.name} ({launch.config}, {_shown(constants)})"
        raise OfflineCompileError(f"cannot compile {where}: {type(error).__name__}: {cause}") from error
    cubin, metadata = bytes(compiled.asm["cubin"]), compiled.metadata._asdict()
    text = f"{source.hash()}-{sorted(options.items())}-{target.name}-{compat.version_text('triton')}"
    return CompiledKernel(
        launch.name, hashlib.sha256(text.encode()).hexdigest(), target.name, launch, cubin, compiled.asm["ptx"],
        launch.kernel.src, {k: v for k, v in metadata.items() if _plain(v)},
    )  # fmt: skip


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple)


def _shown(constants: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())
