"""From a request of a CuTe template to the machine code of a target, without a GPU or a driver."""

from __future__ import annotations

import hashlib
import re
import tempfile
from dataclasses import dataclass, field
from typing import Any

from dscompile import compat
from dscompile.targets import Target
from dscompile.templates.cute.record import Request
from dscompile.tuning.offline import OfflineCompileError


@dataclass(frozen=True)
class CompiledCute:
    """Machine code of one kernel. key: sha256 of the PTX, the target and the compiler's release."""

    name: str
    key: str
    target: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    threads: int = 0
    shared_bytes: int = 0


def compile_request(request: Request, target: Target) -> CompiledCute:
    """Compile one kernel; nothing is written outside a folder that is removed again.

    Raises `compat.MissingExtraError` without nvidia-cutlass-dsl, and OfflineCompileError with kernel, target and cause.
    """
    if target.capability is None:
        raise OfflineCompileError(f"target {target.name!r} is no GPU")
    compat.require_extra("gpu")
    from cutlass import cute

    with tempfile.TemporaryDirectory(prefix="dscompile-") as folder:
        # Without an architecture the compiler takes sm_100a and says nothing.
        options = f"--gpu-arch {target.name} --keep-ptx --keep-cubin --dump-dir {folder}"
        try:
            function, arguments = request.entry()
            compiled = cute.compile(function, *arguments, options=options)
            ptx, cubin = _text(compiled.__ptx__), bytes(compiled.__cubin__)
        except compat.MissingExtraError:
            raise
        except Exception as error:  # the DSL's own, MLIR's and those of ptxas
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
            where = f"{request.name} for {target.name} ({request.config})"
            raise OfflineCompileError(f"cannot compile {where}: {type(error).__name__}: {cause}") from error
    found = re.search(r"^\.target\s+(\w+)", ptx, re.M)
    if found is None or found[1] != target.name:
        got = "no target" if found is None else found[1]
        raise OfflineCompileError(f"{request.name}: compiled for {got} instead of {target.name}")
    text = f"{ptx}-{target.name}-{compat.version_text('nvidia-cutlass-dsl')}"
    key = hashlib.sha256(text.encode()).hexdigest()
    return CompiledCute(request.name, key, target.name, ptx, cubin, request.threads, request.shared_bytes)


def _text(ptx: Any) -> str:
    return ptx.decode() if isinstance(ptx, bytes) else str(ptx)
