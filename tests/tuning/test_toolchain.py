"""What stands in the way of compiling at all is said once, with the tool, the override and what to do."""

import os
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from dscompile import compat
from dscompile.targets import get_target
from dscompile.templates.triton.record import config
from dscompile.templates.triton.rms_norm import TEMPLATES
from dscompile.tuning import build, toolchain
from dscompile.tuning.build import Job, compile_jobs
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.offline import OfflineCompileError, compile_launch, launches_of
from dscompile.tuning.toolchain import ToolchainError, require

SM103, SM90 = get_target("sm_103a"), get_target("sm_90a")
CALL = Call("rms_norm", (TensorSpec((8, 512), (512, 1), torch.bfloat16), None, 1e-6, "fp32"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    toolchain._problem.cache_clear()
    yield
    toolchain._problem.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def old_ptxas(path: Path) -> str:
    """One that says what ptxas of CUDA 12.8 says about an architecture that came later."""
    return script(
        path,
        'case "$1" in --version) echo "Cuda compilation tools, release 12.8, V12.8.93"; exit 0;; esac\n'
        "echo \"ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'\" >&2; exit 255",
    )


def variable(target: str) -> str:
    """The override that decides for a target in the installed release of Triton."""
    return compat.tool_variable(compat.ptxas_for({"sm_103a": 103, "sm_90a": 90}[target]))


def test_here_everything_works() -> None:
    for target in (SM90, get_target("sm_100a"), SM103):
        require(target)
    with pytest.raises(ToolchainError, match="'cpu' is no GPU"):
        require(get_target("cpu"))


def test_too_old_an_assembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Architecture, path, release, the override in force and the way out, in one line."""
    name, path = variable("sm_103a"), old_ptxas(tmp_path / "ptxas-old")
    monkeypatch.setenv(name, path)
    with pytest.raises(ToolchainError) as caught:
        require(SM103)
    said = str(caught.value)
    assert said == (
        f"sm_103a: {path} (CUDA 12.8, from {name}) cannot compile for it: ptxas fatal   : Value 'sm_103a' is not "
        f"defined for option 'gpu-name'; unset {name}, or let it name a ptxas of CUDA 12.9 or newer"
    )
    monkeypatch.delenv(name)
    require(SM103)  # the answer belongs to the override


def test_the_tool_that_triton_brings_may_be_too_old_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No override is blamed that is not set."""
    path = old_ptxas(tmp_path / "ptxas-old")
    monkeypatch.setattr(compat, "tool", lambda name: (path, "12.8"))
    with pytest.raises(ToolchainError, match=r"ptxas-old \(CUDA 12.8\) cannot compile.*install Triton again"):
        require(SM103)


@pytest.mark.parametrize("broken", ["/bin/false", "nowhere", "text"])
def test_a_broken_override_is_passed_over_with_one_warning(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Triton does, which says nothing; a file that cannot be started stops Triton, and so is an error."""
    name = variable("sm_103a")
    text = tmp_path / "ptxas.txt"
    text.write_text("no program")
    path = {"nowhere": str(tmp_path / "nowhere"), "text": str(text)}.get(broken, broken)
    monkeypatch.setenv(name, path)
    if broken == "text":
        with pytest.raises(ToolchainError, match=rf"sm_103a: ptxas.* does not run \({name}={path}.*unset {name}"):
            require(SM103)
        return
    with pytest.warns(UserWarning, match=f"{name}={path} is no tool that runs: Triton takes") as caught:
        require(SM103)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require(SM103)


def test_no_assembler_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation without the tools: where they were looked for, and what brings them back."""
    tool = type(triton.knobs.nvidia).__dict__["ptxas_blackwell" if "BLACKWELL" in variable("sm_103a") else "ptxas"]
    monkeypatch.setattr(tool, "default_path", str(tmp_path / "gone"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ToolchainError, match=r"sm_103a: ptxas.* does not run .*Cannot find.*install Triton again"):
        require(SM103)


def test_a_tool_that_hangs_or_makes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = variable("sm_103a")
    version = 'case "$1" in --version) echo "release 13.0, V13.0.1"; exit 0;; esac\n'
    monkeypatch.setenv(name, script(tmp_path / "a", version + "exit 0"))
    with pytest.raises(ToolchainError, match="it ended with 0 and made nothing"):
        require(SM103)
    real = toolchain.subprocess.run
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *a, **k: real(*a, **{**k, "timeout": 0.2}))
    monkeypatch.setenv(name, script(tmp_path / "b", version + "exec sleep 5"))
    with pytest.raises(ToolchainError, match="did not end within a minute"):
        require(SM103)


def test_no_reader_of_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cuobjdump", "nvdisasm"):
        tool = type(triton.knobs.nvidia).__dict__[name]
        with monkeypatch.context() as patch:
            patch.setattr(tool, "default_path", str(tmp_path / "gone"))
            toolchain._problem.cache_clear()
            with pytest.raises(ToolchainError, match=f"machine code cannot be read: {name} does not run"):
                require(SM90)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ToolchainError, match=r"cannot write to Triton's cache .*set TRITON_CACHE_DIR to a folder"):
        require(SM103)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_of_somebody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ToolchainError, match="Permission denied"):
        require(SM103)


@pytest.mark.parametrize("processes", [1, 2])
def test_many_jobs_are_one_error(processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not one for each kernel, and nothing is started."""
    monkeypatch.setenv(variable("sm_103a"), old_ptxas(tmp_path / "ptxas-old"))
    monkeypatch.setattr(build, "ProcessPoolExecutor", None)
    jobs = [Job(CALL, "rms_norm", config(warps, 2)) for warps in (1, 2, 4, 8)]
    with pytest.raises(ToolchainError, match="ptxas-old"):
        list(compile_jobs(jobs, SM103, processes))
    assert list(compile_jobs([], SM103, processes)) == []


def test_compiling_one_kernel_says_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Instead of Triton's own stack with the whole PTX."""
    monkeypatch.setenv(variable("sm_103a"), old_ptxas(tmp_path / "ptxas-old"))
    (launch,) = launches_of(TEMPLATES[0], CALL.meta_args(), config(), SM103)
    with pytest.raises(OfflineCompileError, match=r"sm_103a: .*ptxas-old \(CUDA 12.8"):
        compile_launch(launch, SM103)
    assert capfd.readouterr().out == ""


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    """And ends with status 2."""
    import subprocess

    code = (
        "from dscompile import workload_models; from dscompile.tuning.calls import Call, TensorSpec; import torch;"
        "spec = TensorSpec((8, 512), (512, 1), torch.bfloat16);"
        "workload_models.workload_calls = lambda *a: iter([[Call('rms_norm', (spec, None, 1e-6, 'fp32'))]]);"
        "from dscompile.cli import app; app()"
    )
    for command in ("build", "tune"):
        more = ["-o", str(tmp_path / "b")] if command == "build" else ["--database", str(tmp_path / "d")]
        done = subprocess.run(
            [sys.executable, "-c", code, command, "--model", "v41", "--target", "sm_103a", *more],
            capture_output=True, text=True, timeout=300,
            env={**os.environ, variable("sm_103a"): old_ptxas(tmp_path / "ptxas-old"), "TERM": "dumb"},
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        said = [line for line in done.stderr.splitlines() if "sm_103a" in line]
        assert len(said) == 1 and said[0].startswith("ToolchainError: sm_103a: ") and "Traceback" not in done.stderr
