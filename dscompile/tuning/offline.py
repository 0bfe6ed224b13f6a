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
    cache_key: the name of Triton's own cache entry; cache_files: what the entry holds, by name; nothing where only the
    facts were asked for.
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


@dataclass(frozen=True)
class Request:
    """A launch as Triton would compile it. key: of `CompiledKernel`; known before anything is compiled."""

    launch: Launch
    target: Target
    source: Any
    gpu: Any
    options: Mapping[str, Any]
    key: str


def requested(launch: Launch, target: Target) -> Request:
    """What would be compiled for one recorded launch. Milliseconds.

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
    arch = 10 * target.capability[0] + target.capability[1]
    gpu = GPUTarget("cuda", arch, 32)
    try:
        source = compat.triton_source(launch.kernel, gpu, launch.arguments, launch.constants, options)
        assembler = compat.tool(compat.ptxas_for(arch))[1]
        text = f"{source.hash()}-{sorted(options.items())}-{target.name}-{compat.version_text('triton')}-{assembler}"
    except Exception as error:
        raise _failure(launch, target, error) from error
    return Request(launch, target, source, gpu, options, hashlib.sha256(text.encode()).hexdigest())


def compile_request(request: Request) -> CompiledKernel:
    """Compile it, or take it from Triton's cache. Raises OfflineCompileError."""
    import triton

    try:
        compiled = triton.compile(request.source, target=request.gpu, options=dict(request.options))
    except Exception as error:  # Triton raises its own, LLVM's and subprocess errors
        raise _failure(request.launch, request.target, error) from error
    metadata, name = compiled.metadata._asdict(), request.launch.name
    files = {
        f"{name}.json": json.dumps(metadata, default=vars).encode(),
        f"{name}.cubin": bytes(compiled.asm["cubin"]),
        f"{name}.ptx": compiled.asm["ptx"].encode(),
    }
    plain = {key: value for key, value in metadata.items() if _plain(value)}
    return described(request, plain, _entry_name(compiled.hash), files)


def described(
    request: Request, metadata: Mapping[str, Any], cache_key: str, files: Mapping[str, bytes]
) -> CompiledKernel:
    """The kernel of a request, from what compiling it gave."""
    launch, source = request.launch, request.source
    constants = {launch.kernel.arg_names[path[0]]: value for path, value in source.constants.items()}
    return CompiledKernel(
        launch.name, request.key, request.target.name, launch.config, source.signature, constants, launch.kernel.src,
        metadata, cache_key, files,
    )  # fmt: skip


def compile_launch(launch: Launch, target: Target) -> CompiledKernel:
    """Compile one recorded launch; raises as `requested` and `compile_request` do."""
    return compile_request(requested(launch, target))


def _failure(launch: Launch, target: Target, error: Exception) -> OfflineCompileError:
    constants = " ".join(f"{name}={value}" for name, value in launch.constants.items())
    cause = (str(error).strip().splitlines() or [""])[0]
    said = f"{type(error).__name__}: {cause}".rstrip(": ")
    return OfflineCompileError(f"cannot compile {launch.name} for {target.name} ({launch.config}, {constants}): {said}")


def _entry_name(digest: str) -> str:
    """The folder of an entry in Triton's cache."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple)
