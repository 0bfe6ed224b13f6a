"""What is known of kernels that were compiled before, in this process or another, so that none is compiled twice.

Triton's cache keeps the code; this keeps what the code says, beside it, under the key of the request. Reading machine
code takes a quarter of a second a kernel, compiling one to three seconds, asking here a millisecond.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dscompile import compat
from dscompile.targets import Target
from dscompile.templates.triton.launching import Launch
from dscompile.tuning import disassembly
from dscompile.tuning.disassembly import Facts
from dscompile.tuning.offline import CompiledKernel, OfflineCompileError, Request, compile_request, described, requested

FOLDER = "dscompile-facts"  # in Triton's cache

# By key: what a kernel's file says, or why it cannot be compiled.
_seen: dict[str, dict[str, Any] | str] = {}


def of_launch(launch: Launch, target: Target, code: bool) -> tuple[CompiledKernel, Facts]:
    """The kernel of a launch and its facts; without `code` the kernel has no files if it is known already.

    Raises OfflineCompileError and ToolError.
    """
    request = requested(launch, target)
    known = _seen.get(request.key) or _read(request)
    if isinstance(known, str):
        raise OfflineCompileError(known)
    if known is None or code:
        try:
            kernel = compile_request(request)
        except OfflineCompileError as error:
            _seen[request.key] = str(error)
            raise
        facts = disassembly.read(kernel.cubin) if known is None else _facts(known)
        if known is None:
            known = {"facts": asdict(facts), "metadata": dict(kernel.metadata), "cache_key": kernel.cache_key}
            _write(request, known)
        _seen[request.key] = known
        return kernel, facts
    _seen[request.key] = known
    return described(request, known["metadata"], known["cache_key"], {}), _facts(known)


def _facts(known: dict[str, Any]) -> Facts:
    return Facts.from_data(known["facts"])


@functools.cache
def _reader() -> str:
    """Of the source that reads facts: another one may read other facts from the same code."""
    return hashlib.sha256(inspect.getsource(disassembly).encode()).hexdigest()[:12]


def _place(request: Request) -> Path:
    return compat.triton_cache() / FOLDER / f"{request.key}-{_reader()}.json"


def _read(request: Request) -> dict[str, Any] | None:
    """None also for a file that is damaged: it is then written anew."""
    try:
        known = json.loads(_place(request).read_text())
        _facts(known)
        return known if {"metadata", "cache_key"} <= set(known) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(request: Request, known: dict[str, Any]) -> None:
    place = _place(request)
    part = place.with_suffix(f".{uuid.uuid4().hex}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known))
        part.replace(place)
    except OSError:  # only a help for later runs; a full disk shows where it matters
        part.unlink(missing_ok=True)
