"""The one place that knows how supported releases of torch, Triton and the extras differ.

Nothing is imported or looked up when this module loads: versions come from the installed packages' metadata on the
first question. A release difference is either a `Feature` (a name, a package and the first release that has it, asked
for with `has`) or a small function below that hides it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch._inductor.custom_graph_pass import CustomGraphPass

Version = tuple[int, int, int]

# What `pip install 'dscompile[EXTRA]'` brings, as the module to import and the distribution that holds it.
EXTRAS: dict[str, tuple[str, str]] = {
    "transformers": ("transformers", "transformers"),
    "gpu": ("cutlass", "nvidia-cutlass-dsl"),
}


class MissingExtraError(ImportError):
    """A feature was asked for whose optional dependency is not installed."""


def require_extra(extra: str) -> ModuleType:
    """The module that `extra` provides, imported.

    Raises `MissingExtraError` with one line that names the extra if its package is not installed, and `ValueError` if
    there is no such extra.
    """
    if extra not in EXTRAS:
        raise ValueError(f"unknown extra {extra!r}; dscompile has: {', '.join(sorted(EXTRAS))}")
    module, distribution = EXTRAS[extra]
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"this needs {distribution}, which is not installed: pip install 'dscompile[{extra}]'", name=module
        )
    return importlib.import_module(module)


def has_extra(extra: str) -> bool:
    """Whether `require_extra(extra)` would find its package; imports nothing. An unknown name is simply not there."""
    return extra in EXTRAS and importlib.util.find_spec(EXTRAS[extra][0]) is not None


def parse_version(text: str) -> Version:
    """(major, minor, patch) of a version such as `2.14.0a0+git1a2b`; what follows the numbers is ignored.

    A pre-release therefore counts as its release. Raises `ValueError` if the text does not start with a number.
    """
    match = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", text.strip())
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    major, minor, patch = (int(part or 0) for part in match.groups())
    return major, minor, patch


@functools.cache
def version_text(distribution: str) -> str | None:
    """The version of an installed distribution as it names itself (with `+cpu` and the like); None if not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version(distribution: str) -> Version | None:
    """`parse_version` of an installed distribution; None if it is not installed."""
    text = version_text(distribution)
    return None if text is None else parse_version(text)


@dataclass(frozen=True)
class Feature:
    """Something that a package has only from a release on (seen working or failing in the releases around it)."""

    distribution: str
    since: Version
    note: str


FEATURES: dict[str, Feature] = {
    "torch.graph_pass_list": Feature("torch", (2, 13, 0), "Inductor takes several custom graph passes, not one"),
    "torch.compile_region_name": Feature("torch", (2, 13, 0), "compile_fx names the region it compiles"),
    "torch.aot_compile": Feature("torch", (2, 13, 0), "a compiled function has aot_compile without a setting"),
    "torch.default_backend": Feature("torch", (2, 13, 0), "torch.compiler.set_default_backend"),
    "torch.precompile": Feature("torch", (2, 14, 0), "torch.compiler.precompile"),
    "torch.e4m3_cast_saturates": Feature("torch", (2, 13, 0), "fp32 to float8_e4m3fn clips to 448 instead of NaN"),
    "torch.scaled_mm_rowwise_cpu": Feature("torch", (2, 13, 0), "row-wise _scaled_mm on the CPU"),
    "triton.gluon": Feature("triton", (3, 8, 0), "Gluon compiles ahead of time, with mbarriers and async TMA loads"),
    "triton.gluon_two_cta": Feature("triton", (3, 9, 0), "Gluon with two_ctas: cta_group::2"),
    "triton.nvfp4_on_hopper": Feature("triton", (3, 8, 0), "dot_scaled with E4M3 scales compiles for sm_90a"),
    "triton.interpreted_dot_scaled": Feature("triton", (3, 8, 0), "the interpreter runs dot_scaled"),
}


def has(feature: str) -> bool:
    """Whether the installed releases have `feature`, a key of `FEATURES`; False where the package is missing."""
    if feature not in FEATURES:
        raise ValueError(f"unknown feature {feature!r}; known: {', '.join(sorted(FEATURES))}")
    wanted = FEATURES[feature]
    installed = version(wanted.distribution)
    return installed is not None and installed >= wanted.since


def register_fake(library: torch.library.Library, op: str, fake: Callable[..., Any]) -> None:
    """Give `op` (`namespace::name`) its fake kernel, replacing one that is there already.

    torch 2.11 refuses the replacement unless told otherwise; later releases allow it.
    """
    import torch

    torch.library.register_fake(op, fake, lib=library, allow_override=True)


def graph_passes(passes: Sequence[CustomGraphPass]) -> Any:
    """`passes` in the form that Inductor's custom pass settings take: None for none, else run in the given order.

    Releases before 2.13 take a single pass, so several are wrapped into one whose `uuid` covers them all.
    """
    if not passes:
        return None
    if len(passes) == 1:
        return passes[0]
    return list(passes) if has("torch.graph_pass_list") else _one_pass(tuple(passes))


def _one_pass(passes: tuple[CustomGraphPass, ...]) -> CustomGraphPass:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Sequential(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in passes:
                each(graph)

        def uuid(self) -> Any | None:
            ids = tuple(each.uuid() for each in passes)
            return None if None in ids else ids  # one pass that refuses caching refuses it for all

    return Sequential()


def compile_fx(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    config_patches: dict[str, Any] | None = None,
    region_name: str | None = None,
) -> Callable[..., Any]:
    """Inductor's `compile_fx`; `region_name` is dropped by releases that do not know it. Takes over `module`."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    extra: dict[str, Any] = {}
    if region_name is not None and has("torch.compile_region_name"):
        extra["compile_region_name"] = region_name
    compiled = inductor_compile_fx(module, list(example_inputs), config_patches=config_patches, **extra)
    assert callable(compiled)
    return compiled


def triton_source(
    kernel: Any, gpu: Any, arguments: dict[str, Any], constants: dict[str, Any], options: dict[str, Any]
) -> Any:
    """The `ASTSource` that Triton itself would compile if it started `kernel` with these arguments on `gpu`.

    Which arguments become constants and which say that they are divisible by 16 decides about the code and about the
    name of its cache entry, and is a private matter of each release; so its own functions are asked.

    Args:
        kernel: a `triton.jit` function; `gpu`: a `GPUTarget`.
        arguments: parameters that are no constexpr; tensors of any device, of which only dtype and offset are used.
    """
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {name: _pointer(value) for name, value in arguments.items()}
    bound, specialization, rest = bind(**given, **constants, **options)
    _, signature, constexprs, attributes = kernel._pack_args(
        backend, {**constants, **options}, bound, specialization, rest
    )
    return ASTSource(kernel, signature, constexprs, attributes)


class _Pointer:
    """What Triton asks of a tensor, without one: the type, and where it starts behind an aligned address."""

    def __init__(self, dtype: torch.dtype, offset: int) -> None:
        self.dtype, self._offset = dtype, offset

    def data_ptr(self) -> int:
        return self._offset


def _pointer(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return _Pointer(value.dtype, int(value.storage_offset()) * value.element_size())


# Tools of the CUDA binary utilities that Triton carries and finds: assemblers, and what reads their output.
PTXAS = ("ptxas", "ptxas_blackwell")
READERS = ("cuobjdump", "nvdisasm")


class ToolMissingError(RuntimeError):
    """Triton finds no such tool that runs; the message names it and where it was looked for."""


def tool(name: str) -> tuple[str, str]:
    """(path, CUDA release) of a tool as Triton finds it: an override that runs, else its own."""
    import triton

    try:
        found = getattr(triton.knobs.nvidia, name)
        return str(found.path), str(found.version)
    except (RuntimeError, OSError) as error:  # "Cannot find ptxas", or the override cannot be started
        override = tool_override(name)
        own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name.replace("_", "-")
        places = [f"{tool_variable(name)}={override}"] if override is not None else []
        raise ToolMissingError(
            f"{name.replace('_', '-')} does not run ({', '.join([*places, str(own)])}: {error})"
        ) from error


def tool_variable(name: str) -> str:
    """The environment variable that overrides a tool."""
    return f"TRITON_{name.upper()}_PATH"


def tool_override(name: str) -> str | None:
    """What the variable says, None if it is not set."""
    return os.environ.get(tool_variable(name)) or None


def ptxas_for(arch: int) -> str:
    """Which of `PTXAS` this release of Triton assembles with for an architecture such as 103."""
    from triton.backends.nvidia import compiler

    try:
        path = str(compiler.get_ptxas(arch).path)
        return "ptxas_blackwell" if path == tool("ptxas_blackwell")[0] else "ptxas"
    except ToolMissingError:
        return "ptxas"
    except (RuntimeError, OSError) as error:  # the one it asked for does not run
        given = tool_override("ptxas_blackwell")
        named = "blackwell" in str(error) or (given is not None and given in str(error))
        return "ptxas_blackwell" if named else "ptxas"


def ptx_version(arch: int) -> int:
    """The version of PTX that Triton writes for an architecture, 94 for 9.4."""
    from triton.backends.nvidia import compiler

    return int(compiler.ptx_get_version(tool(ptxas_for(arch))[1]))


def triton_cache() -> Path:
    """The folder of Triton's cache of compiled kernels."""
    import triton

    return Path(os.fspath(triton.knobs.cache.dir))


def process_group(name: str) -> Any:
    """The process group of a name (`ProcessGroup.group_name`). RuntimeError if there is none."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def group_store(group: Any) -> Any:
    """The key-value store that the ranks of a group met at."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def allow_data_dependent_shapes(shape_env: Any) -> None:
    """Let operators whose number of rows depends on values be traced in a shape environment that exists already."""
    shape_env.settings = replace(shape_env.settings, allow_dynamic_output_shape_ops=True)
