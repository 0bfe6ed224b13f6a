"""What the machine code of a kernel says about it: registers, spills, tensor cores, width of memory accesses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dscompile import compat

# SASS mnemonics of products in tensor cores, and what they are
TENSOR_CORE = {
    "UTCOMMA": "tcgen05 block-scaled FP4", "UTCQMMA": "tcgen05 FP8/FP4 mixed", "UTCHMMA": "tcgen05 16-bit",
    "UTCIMMA": "tcgen05 integer", "HGMMA": "wgmma 16-bit", "QGMMA": "wgmma FP8", "IGMMA": "wgmma integer",
    "HMMA": "mma.sync 16-bit", "QMMA": "mma.sync FP8", "OMMA": "mma.sync FP4", "IMMA": "mma.sync integer",
}  # fmt: skip
_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}

_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\b")
_TO = re.compile(r"`\((\.L\w+)\)")


class ToolError(RuntimeError):
    """A tool of the CUDA binary utilities is missing or failed; the message names it and what to do."""


@dataclass(frozen=True)
class Facts:
    """Read from one cubin.

    stack_bytes: per thread, spills and local arrays. spills: instructions that access local memory.
    loads, stores: of global memory, {bytes per thread: instructions}. tensor_core: {mnemonic: instructions}.
    loop_instructions, loop_bytes: of `instructions`, and of what a thread loads (into registers or shared memory, TMA
    aside), the part that lies within a loop, that is before a branch back; inner loops count once. copied_bytes: by
    asynchronous copies of a thread.
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    spills: int
    instructions: int
    loads: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)
    tensor_core: dict[str, int] = field(default_factory=dict)
    tma: int = 0
    async_copies: int = 0
    copied_bytes: int = 0
    loop_instructions: int = 0
    loop_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """By all load instructions of a thread, each run once."""
        return sum(width * count for width, count in self.loads.items()) + self.copied_bytes

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Facts:
        """From `asdict`, also after it went through JSON, whose keys are text."""
        widths = {name: {int(width): n for width, n in data[name].items()} for name in ("loads", "stores")}
        return Facts(**{**data, **widths})

    def describe_tensor_core(self) -> str:
        """`UTCQMMA x 4 (tcgen05 FP8/FP4 mixed)`, or "none"."""
        found = (f"{name} x {count} ({TENSOR_CORE[name]})" for name, count in self.tensor_core.items())
        return ", ".join(found) or "none"


def read(cubin: bytes) -> Facts:
    """The facts of a cubin with one kernel. Raises ToolError."""
    with tempfile.TemporaryDirectory(prefix="dscompile-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "--dump-resource-usage", str(path))
        sass = _run("nvdisasm", "-c", "-ndf", str(path))  # the same text without an analysis that takes longer
    return parse(usage, sass)


def parse(usage: str, sass: str) -> Facts:
    """The facts from the text of `cuobjdump --dump-resource-usage` and of `nvdisasm -c`."""
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    if "REG" not in numbers:
        raise ToolError(f"cuobjdump reported no registers; its output was: {usage.strip()[:200]}")
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    tensor_core: Counter[str] = Counter()
    spills = tma = copies = copied = 0
    loaded: list[int] = []  # bytes, of every instruction
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(loaded)
            continue
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        name, *parts = found[1].split(".")
        width = next((_WIDTH[part] for part in parts if part in _WIDTH), 4)
        loaded.append(width if name in ("LDG", "LDGSTS") else 0)
        if name in ("LDG", "STG"):
            (loads if name == "LDG" else stores)[width] += 1
        elif name in ("LDL", "STL"):
            spills += 1
        elif name in ("UTMALDG", "UTMASTG"):
            tma += 1
        elif name in ("LDGSTS", "UBLKCP"):
            copies += 1
            copied += width if name == "LDGSTS" else 0
        elif name in TENSOR_CORE:
            tensor_core[name] += 1
        elif name == "BRA" and (to := _TO.search(line)) is not None:
            branches.append((len(loaded) - 1, to[1]))
    inside = {
        at for end, label in branches for at in range(labels.get(label, end), end + 1) if labels.get(label, end) < end
    }
    return Facts(
        registers=numbers["REG"], stack_bytes=numbers.get("STACK", 0), static_shared_bytes=numbers.get("SHARED", 0),
        spills=spills, instructions=len(loaded), loads=dict(sorted(loads.items())), stores=dict(sorted(stores.items())),
        tensor_core=dict(tensor_core), tma=tma, async_copies=copies, copied_bytes=copied,
        loop_instructions=len(inside), loop_bytes=sum(loaded[at] for at in inside),
    )  # fmt: skip


def _run(name: str, *arguments: str) -> str:
    try:
        tool, _ = compat.tool(name)
    except compat.ToolMissingError as error:
        raise ToolError(f"{error}; unset {compat.tool_variable(name)}, or install Triton again") from error
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=120)
    except OSError as error:
        raise ToolError(f"{name} ({tool}) cannot be started: {error}") from error
    if done.returncode:
        raise ToolError(f"{name} ({tool}) failed with {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout
