"""From a recorded launch to the machine code of a target, without a GPU or a driver."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dscompile import compat
from dscompile.targets import Target
from dscompile.templates.triton.launching import OPTIONS, Launch, record_launches
from dscompile.templates.triton.record import Config, TritonTemplate
from dscompile.tuning import toolchain


class OfflineCompileError(RuntimeError):
    """A kernel could not be compiled for a target; the message names kernel, target, config and cause."""


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one launch; can be sent between processes.

    key: sha256 over source, signature, constants, options, target and compiler; equal keys mean equal code.
    types, constants: of the kernel's parameters. metadata: what Triton needs in order to load it, as JSON values.
    cache_key: the name of Triton's own cache entry; cache_files: what the entry holds, by name.
    """

    name: str
    key: str
    target: str
    config: Config
    types: Mapping[str, str] = field(repr=False)
    constants: Mapping[str, Any] = field(repr=False)
    source: str = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)
    cache_key: str = field(repr=False)
    cache_files: Mapping[str, bytes] = field(repr=False)

    @property
    def cubin(self) -> bytes:
        return self.cache_files[f"{self.name}.cubin"]

    @property
    def ptx(self) -> str:
        return self.cache_files[f"{self.name}.ptx"].decode()

    @property
    def shared_bytes(self) -> int:
        return int(self.metadata["shared"])

    @property
    def tensor_memory_columns(self) -> int:
        return int(self.metadata.get("tmem_size") or 0)

    @property
    def warps(self) -> int:
        return int(self.metadata["num_warps"])


def traced(
    template: TritonTemplate, args: tuple[Any, ...], config: Config, target: Target
) -> tuple[list[Launch], tuple[Any, ...]]:
    """The kernels that a call of the template would start, and its results. args: the op's, with meta tensors."""
    with record_launches() as launches:
        result = template.fn(*args, config=config, target=target)
    return launches, result if isinstance(result, tuple) else (result,)


def launches_of(template: TritonTemplate, args: tuple[Any, ...], config: Config, target: Target) -> list[Launch]:
    """The kernels that a call of the template would start. args: those of the op, with meta tensors."""
    return traced(template, args, config, target)[0]


def compile_launch(launch: Launch, target: Target) -> CompiledKernel:
    """Compile one recorded launch.

    Raises OfflineCompileError; also if this process runs kernels in Triton's interpreter, where nothing compiles.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if target.capability is None:
        raise OfflineCompileError(f"target {target.name!r} is no GPU")
    if triton.knobs.runtime.interpret:
        raise OfflineCompileError("TRITON_INTERPRET is set: kernels of this process run in the interpreter")
    try:
        toolchain.require(target)
    except toolchain.ToolchainError as error:
        raise OfflineCompileError(str(error)) from error
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages, **OPTIONS}
    major, minor = target.capability
    gpu = GPUTarget("cuda", 10 * major + minor, 32)
    try:
        source = compat.triton_source(launch.kernel, gpu, launch.arguments, launch.constants, options)
        compiled = triton.compile(source, target=gpu, options=options)
    except Exception as error:  # Triton raises its own, LLVM's and subprocess errors
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f"{launch.name} for {target.name} ({launch.config}, {_shown(launch.constants)})"
        raise OfflineCompileError(f"cannot compile {where}: {type(error).__name__}: {cause}") from error
    metadata = compiled.metadata._asdict()
    text = f"{source.hash()}-{sorted(options.items())}-{target.name}-{compat.version_text('triton')}"
    files = {
        f"{launch.name}.json": json.dumps(metadata, default=vars).encode(),
        f"{launch.name}.cubin": bytes(compiled.asm["cubin"]),
        f"{launch.name}.ptx": compiled.asm["ptx"].encode(),
    }
    return CompiledKernel(
        launch.name, hashlib.sha256(text.encode()).hexdigest(), target.name, launch.config, source.signature,
        {launch.kernel.arg_names[path[0]]: value for path, value in source.constants.items()},
        launch.kernel.src, {k: v for k, v in metadata.items() if _plain(v)}, _entry_name(compiled.hash), files,
    )  # fmt: skip


def _entry_name(digest: str) -> str:
    """The folder of an entry in Triton's cache."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple)


def _shown(constants: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())
