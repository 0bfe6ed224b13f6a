"""A folder of compiled kernels: made without a GPU, taken to machines that have one.

    manifest.json                 what was built for, and every kernel with its facts
    kernels/<key>/<name>.cubin    machine code, .ptx, .json (Triton's metadata) and .py (source, with its provenance)

`install` puts Triton's kernels where Triton looks before it compiles, so that a process on the GPU machine starts them
without a compiler. Kernels in CuTe DSL have .cubin and .ptx only. Machine code is named by what it was made from: equal
kernels of many calls are stored once.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dscompile import __version__, compat
from dscompile.templates.triton.record import Config
from dscompile.tuning.build import Built, Failure
from dscompile.tuning.calls import Call
from dscompile.tuning.disassembly import Facts

if TYPE_CHECKING:
    from dscompile.tuning.cute_build import BuiltCute

MANIFEST = "manifest.json"
FORMAT = 1


class BundleError(RuntimeError):
    """A bundle cannot be read, written or used here; the message names it and says what to do."""


@dataclass(frozen=True)
class Use:
    """A launch of a kernel in the workload. count: launches per step."""

    call: str
    template: str
    config: str
    grid: tuple[int, ...]
    count: int
    sizes: dict[str, Any] = field(default_factory=dict)
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    flops: float = 0.0


@dataclass
class Entry:
    """One kernel of a bundle. compiler: "triton", or "cute" for what is compiled only, so never installed."""

    name: str
    key: str
    cache_key: str
    warps: int
    shared_bytes: int
    tensor_memory_columns: int
    facts: Facts
    uses: list[Use] = field(default_factory=list)
    compiler: str = "triton"


@dataclass
class Bundle:
    """A bundle in memory; `folder` is where its kernels are."""

    folder: Path
    target: str
    workload: dict[str, Any]
    triton: str
    version: str = __version__
    kernels: dict[str, Entry] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)

    # Making one

    def claim(self) -> None:
        """See that the folder can be written, before there is work to lose. Raises BundleError."""
        probe = self.folder / f".{uuid.uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BundleError(f"cannot write to {self.folder}: {error.strerror}; choose another folder") from error

    def add(self, built: Iterable[Built]) -> None:
        """Take in the kernels of a job; the files of a kernel that is there already are not written again."""
        for each in built:
            kernel = each.kernel
            if kernel.key not in self.kernels:
                self._write(each)
                self.kernels[kernel.key] = Entry(
                    kernel.name, kernel.key, kernel.cache_key, kernel.warps, kernel.shared_bytes,
                    kernel.tensor_memory_columns, each.facts,
                )  # fmt: skip
            self.kernels[kernel.key].uses.append(_use(each.job.call, each.job.template, each.job.config, each.grid))

    def add_cute(self, built: Iterable[BuiltCute]) -> None:
        """Take in the kernels of a job in CuTe DSL: PTX and cubin, to be looked at."""
        for each in built:
            kernel = each.kernel
            if kernel.key not in self.kernels:
                self._write_files(kernel.key, {f"{kernel.name}.cubin": kernel.cubin, f"{kernel.name}.ptx": kernel.ptx})
                self.kernels[kernel.key] = Entry(
                    kernel.name, kernel.key, "", -(-kernel.threads // 32), kernel.shared_bytes,
                    each.tensor_memory_columns, each.facts, compiler="cute",
                )  # fmt: skip
            self.kernels[kernel.key].uses.append(_use(each.job.call, each.job.template.name, each.job.config, ()))

    def fail(self, failure: Failure) -> None:
        self.failures.append({"call": str(failure.call), "template": failure.template, "reason": failure.reason})

    def _write(self, built: Built) -> None:
        kernel = built.kernel
        self._write_files(kernel.key, {**kernel.cache_files, f"{kernel.name}.py": _readable(built)})

    def _write_files(self, key: str, files: Mapping[str, bytes | str]) -> None:
        folder = self.folder / "kernels" / key
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
        except OSError as error:
            raise BundleError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error

    def save(self) -> None:
        """Write the manifest, whole or not at all."""
        content = {
            "format": FORMAT, "dscompile": self.version, "triton": self.triton, "target": self.target,
            "workload": self.workload, "kernels": [asdict(entry) for entry in self.kernels.values()],
            "failures": self.failures,
        }  # fmt: skip
        path = self.folder / MANIFEST
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(content, indent=1))
            part.replace(path)
        except OSError as error:
            raise BundleError(f"cannot write {path}: {error.strerror}; choose another folder") from error

    # Using one

    @staticmethod
    def load(folder: str | Path) -> Bundle:
        """Read the manifest of `folder`. Raises BundleError."""
        path = Path(folder) / MANIFEST
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}; make one with `dscompile build`") from None
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} cannot be read: {error}") from error
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise BundleError(f"{path} has format {found!r}, this version reads {FORMAT}: build it again")
        try:
            return Bundle._from_data(Path(folder), content)
        except (KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{path} is damaged ({type(error).__name__}: {error}): build it again") from error

    @staticmethod
    def _from_data(folder: Path, content: dict[str, Any]) -> Bundle:
        bundle = Bundle(
            folder, content["target"], content["workload"], content["triton"], content["dscompile"],
            failures=content["failures"],
        )  # fmt: skip
        for entry in content["kernels"]:
            facts = Facts.from_data(entry.pop("facts"))
            uses = [Use(**{**use, "grid": tuple(use["grid"])}) for use in entry.pop("uses")]
            bundle.kernels[entry["key"]] = Entry(**entry, facts=facts, uses=uses)
        return bundle

    def install(self, cache: str | Path | None = None) -> int:
        """Put the kernels into Triton's cache, by default this user's; returns how many were not there yet.

        Raises BundleError: another version of Triton than the bundle was made with (its cache entries have other
        names), missing files, or a cache that cannot be written.
        """
        here = compat.version_text("triton")
        if here != self.triton:
            raise BundleError(
                f"{self.folder} was built with Triton {self.triton} and this is {here}: build it again with {here}"
            )
        root = Path(cache) if cache is not None else compat.triton_cache()
        entries = (entry for entry in self.kernels.values() if entry.compiler == "triton")
        return sum(self._install(entry, root / entry.cache_key) for entry in entries)

    def _install(self, entry: Entry, place: Path) -> bool:
        group = f"__grp__{entry.name}.json"
        if (place / group).is_file():
            return False
        source = self.folder / "kernels" / entry.key
        names = [f"{entry.name}.{kind}" for kind in ("json", "cubin", "ptx")]
        part = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
        try:
            part.mkdir(parents=True)
            for name in names:
                shutil.copyfile(source / name, part / name)
            paths = {name: str(place / name) for name in names}
            (part / group).write_text(json.dumps({"child_paths": paths}))
            if place.exists():  # an entry without its group file is an interrupted one
                shutil.rmtree(place)
            part.replace(place)
        except FileNotFoundError as error:
            raise BundleError(f"{self.folder} lacks {error.filename}: build it again") from error
        except OSError as error:
            if (place / group).is_file():  # another process was quicker
                return False
            raise BundleError(
                f"cannot write to {place}: {error.strerror}; set TRITON_CACHE_DIR to a folder you own"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return True


def _use(call: Call, template: str, config: Config, grid: tuple[int, ...]) -> Use:
    cost = call.cost().numbers()
    return Use(
        str(call), template, str(config), grid, call.count, call.sizes(), cost["read_bytes"], cost["write_bytes"],
        cost["flops"],
    )  # fmt: skip


def _readable(built: Built) -> str:
    """The kernel's source under a header that says where it comes from."""
    kernel, job = built.kernel, built.job
    lines = [
        f"kernel    {kernel.name}",
        f"template  {job.template} (dscompile {__version__}, Triton {compat.version_text('triton')})",
        f"target    {kernel.target}",
        f"config    {job.config}",
        f"op        {job.call}",
        f"types     {_pairs(kernel.types)}",
        f"constants {_pairs(kernel.constants)}",
        f"facts     {built.facts.registers} registers, {kernel.shared_bytes} bytes shared",
    ]
    return "".join(f"# {line}\n" for line in lines) + "\n" + kernel.source


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != "constexpr")
