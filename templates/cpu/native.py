"""Generated C++: render a jinja text, compile it with the machine's compiler, load it, keep it on disk.

A library is compiled at its first use (one to a few seconds) and found again by the hash of its text, the compiler,
the flags and the CPU. The functions have a plain C interface and are called through ctypes with data pointers, so no
torch headers are compiled. Without a compiler every caller falls back to its PyTorch form; one warning says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCE_DIR = Path(__file__).resolve().parent / "cxx"

# Rounding must be that of single operations (quantisation and RoPE are compared bit for bit with PyTorch), so products
# and sums are not contracted; the inner loops that want a fused multiply-add ask for it by name.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)

ELEMENT = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
"""The dtypes that kernels are generated for, by their name in C++."""

_lock = threading.RLock()
_loaded: dict[tuple[str, tuple[tuple[str, Any], ...]], ctypes.CDLL | None] = {}
_missing: str | None = None


class NativeError(RuntimeError):
    """A C++ text of this package did not compile; the message holds the compiler's own words."""


@functools.cache
def compiler() -> str | None:
    """Path or name of the C++ compiler that Inductor would use; None if there is none."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        found: str = get_cpp_compiler()
    except Exception:
        return None
    return found if shutil.which(found) else None


@functools.cache
def machine() -> str:
    """What `-march=native` depends on: architecture, CPU features and the compiler's version."""
    features = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                features = line
                break
    except OSError:
        features = platform.processor()
    cxx = compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout if cxx else ""
    return f"{platform.machine()}|{features}|{version}"


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(loader=FileSystemLoader(SOURCE_DIR), undefined=StrictUndefined, keep_trailing_newline=True)


def render(source: str, **values: Any) -> str:
    """The C++ text of `cxx/<source>.cpp.jinja` with `values` filled in."""
    text: str = _environment().get_template(f"{source}.cpp.jinja").render(**values)
    return text


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "dsv4_cpu"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build(text: str) -> Path:
    """Compile C++ `text` into a shared library and return its path; a library that is there already is reused.

    Raises `NativeError` if there is no compiler or if it refuses the text.
    """
    cxx = compiler()
    if cxx is None:
        raise NativeError("no C++ compiler found (set CXX or install g++)")
    key = hashlib.sha256("\0".join((text, cxx, machine(), *FLAGS)).encode()).hexdigest()[:24]
    library = _folder() / f"{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        source, built = Path(scratch) / f"{key}.cpp", Path(scratch) / f"{key}.so"
        source.write_text(text)
        run = subprocess.run([cxx, *FLAGS, str(source), "-o", str(built)], capture_output=True, text=True)
        if run.returncode:
            raise NativeError(f"{cxx} failed on generated C++:\n{run.stderr[-4000:]}")
        shutil.copy(source, library.with_suffix(".cpp"))
        os.replace(built, library)  # atomic: several processes may build the same text
    return library


def load(source: str, **values: Any) -> ctypes.CDLL | None:
    """The library of `cxx/<source>.cpp.jinja`, compiled if need be; None (after one warning) if it cannot be had."""
    global _missing
    key = (source, tuple(sorted(values.items())))
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key in _loaded:
            return _loaded[key]
        library: ctypes.CDLL | None = None
        try:
            library = ctypes.CDLL(str(build(render(source, **values))))
        except (NativeError, OSError) as error:
            if _missing is None:
                _missing = str(error)
                warnings.warn(f"dscompile runs its CPU kernels in plain PyTorch: {error}", stacklevel=2)
        _loaded[key] = library
        return library


Kernel = Callable[..., int]
_C_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_functions: dict[tuple[Any, ...], Kernel | None] = {}


def function(source: str, name: str, signature: str, dtype: torch.dtype, **values: Any) -> Kernel | None:
    """The C function `name` of `cxx/<source>.cpp.jinja` for elements of `dtype`; None where nothing can be compiled.

    signature: one letter an argument: p = data pointer, bytes or None, q = int64, i = int, f = float.
    """
    key = (source, name, dtype, *values.values())
    try:
        return _functions[key]
    except KeyError:
        library = load(source, type=ELEMENT[dtype], **values)
        found: Any = None
        if library is not None:
            found = getattr(library, name)
            found.argtypes = [_C_TYPES[letter] for letter in signature]
            found.restype = ctypes.c_int
        _functions[key] = found
        return found  # type: ignore[no-any-return]


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The data pointer of an optional tensor."""
    return None if tensor is None else tensor.data_ptr()


def plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` contiguous and of `dtype`; itself if it is both already."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def angles(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """cos and sin as a kernel for elements of `dtype` reads them: contiguous; and 1 if fp32, 0 if of `dtype`."""
    kept = dtype if cos.dtype == sin.dtype == dtype else torch.float32
    return plain(cos, kept), plain(sin, kept), int(kept == torch.float32)


def threads() -> int:
    """How many threads a kernel may use: PyTorch's own number."""
    return torch.get_num_threads()
