"""Whether this process can compile for a target at all: asked once, before the first kernel, and answered in one line.

Triton itself finds out kernel by kernel, prints the whole PTX each time, and takes its own tool without a word where an
override (`TRITON_PTXAS_PATH` and its like) names something that does not run.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
import warnings
from pathlib import Path

from dscompile import compat
from dscompile.targets import Target

# Needs nothing but the architecture and the version of PTX.
_PTX = ".version {major}.{minor}\n.target {target}\n.address_size 64\n.visible .entry nothing() {{ ret; }}\n"


class ToolchainError(RuntimeError):
    """Nothing can be compiled for a target here; the message names architecture, tool, override and what to do."""


def require(target: Target) -> None:
    """Raises ToolchainError if kernels for `target` cannot be compiled, read and kept in Triton's cache.

    An override that Triton passes over is a warning, once.
    """
    if target.capability is None:
        raise ToolchainError(f"target {target.name!r} is no GPU")
    cache = compat.triton_cache()
    overrides = tuple(compat.tool_override(tool) for tool in (*compat.PTXAS, *compat.READERS))
    problem = _problem(target, cache, overrides)
    if problem:
        raise ToolchainError(problem)


@functools.cache
def _problem(target: Target, cache: Path, overrides: tuple[str | None, ...]) -> str | None:
    """The arguments are what the answer depends on; of `overrides` only that they may have changed."""
    return _assembler(target) or _readers() or _cache(cache)


def _assembler(target: Target) -> str | None:
    assert target.capability is not None
    arch = 10 * target.capability[0] + target.capability[1]
    name = compat.ptxas_for(arch)
    variable, override = compat.tool_variable(name), compat.tool_override(name)
    try:
        path, version = compat.tool(name)
    except compat.ToolMissingError as error:
        return f"{target.name}: {error}; {_mend(variable, override)}"
    if override is not None and Path(override) != Path(path):
        _warn_of(variable, override, path)
        override = None
    where = f"{path} (CUDA {version}" + (f", from {variable})" if override else ")")
    said = _assembles(path, target, compat.ptx_version(arch))
    if said is None:
        return None
    return f"{target.name}: {where} cannot compile for it: {said}; {_mend(variable, override)}"


def _assembles(path: str, target: Target, ptx: int) -> str | None:
    """None, or what the tool says."""
    with tempfile.TemporaryDirectory(prefix="dscompile-") as folder:
        source, cubin = Path(folder) / "nothing.ptx", Path(folder) / "nothing.cubin"
        source.write_text(_PTX.format(major=ptx // 10, minor=ptx % 10, target=target.name))
        command = [path, f"--gpu-name={target.name}", str(source), "-o", str(cubin)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return "it did not end within a minute"
        except OSError as error:
            return str(error)
        if done.returncode == 0 and cubin.is_file():
            return None
        lines = (done.stderr + done.stdout).strip().splitlines()
        return lines[0].strip() if lines else f"it ended with {done.returncode} and made nothing"


def _mend(variable: str, override: str | None) -> str:
    if override is not None:
        return f"unset {variable}, or let it name a ptxas of CUDA 12.9 or newer"
    triton = compat.version_text("triton")
    return f"install Triton again ({triton}; its wheel carries one), or set {variable} to a ptxas of CUDA 12.9 or newer"


def _warn_of(variable: str, override: str, path: str) -> None:
    warnings.warn(
        f"{variable}={override} is no tool that runs: Triton takes {path} instead; unset it or mend it", stacklevel=5
    )


def _readers() -> str | None:
    for name in compat.READERS:
        variable, override = compat.tool_variable(name), compat.tool_override(name)
        try:
            path, _ = compat.tool(name)
        except compat.ToolMissingError as error:
            return f"machine code cannot be read: {error}; unset {variable}, or install Triton again"
        if override is not None and Path(override) != Path(path):
            _warn_of(variable, override, path)
    return None


def _cache(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"cannot write to Triton's cache {folder}: {error.strerror}; set TRITON_CACHE_DIR to a folder you own"
