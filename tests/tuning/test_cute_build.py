"""Kernels in CuTe DSL in a bundle: which calls they fit, what is written, and what is shown."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dscompile import compat, workload_models
from dscompile.cli import app
from dscompile.formats import FORMATS
from dscompile.targets import get_target
from dscompile.tuning.bundle import Bundle
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.cute_build import columns_of, compile_cute, cute_templates, plan_cute

TARGET = get_target("sm_103a")
WINDOW = FORMATS["fp8_g32_ue8m0"]
needs_cute = pytest.mark.skipif(not compat.has_extra("gpu"), reason="nvidia-cutlass-dsl is not installed")


def dense(dtype: torch.dtype, *shape: int) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype, device="meta"))


def rows(count: int, angles: torch.dtype = torch.float32) -> Call:
    """Window rows of the released V4.1."""
    pool = dense(torch.uint8, 128 * count + 1, WINDOW.row_bytes(512))
    angle = dense(angles, count, 32)
    args = (pool, dense(torch.bfloat16, count, 512), dense(torch.float32, 512), angle, angle, dense(torch.int64, count))
    return Call("norm_rope_store", (*args, 1e-20, WINDOW.name), 40)


NORM = Call("rms_norm", (dense(torch.bfloat16, 8, 1024), None, 1e-6, "fp32"), 3)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "240", "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*rest: Any) -> Iterator[list[Call]]:
        yield [NORM, rows(8), rows(16)]

    monkeypatch.setattr(workload_models, "workload_calls", found)


def test_templates_are_found_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"dsv4::norm_rope_store", "dsv4::experts_packed", "dsv4::sparse_attention"} <= set(cute_templates())


@needs_cute
def test_only_what_fits_is_planned() -> None:
    jobs, refused = plan_cute([NORM, rows(8), rows(16)], TARGET, False)
    assert [(job.template.name, job.call.args[1].shape) for job in jobs] == [
        ("norm_rope_store", (8, 512)), ("norm_rope_store", (16, 512)),
    ]  # fmt: skip
    assert refused == {}
    jobs, refused = plan_cute([rows(8, torch.bfloat16)], TARGET, False)
    assert jobs == [] and set(refused) == {"norm_rope_store"} and refused["norm_rope_store"]


@needs_cute
def test_equal_requests_are_compiled_once() -> None:
    jobs, _ = plan_cute([rows(8), rows(16)], TARGET, False)
    first, second = (result for result in compile_cute(jobs, TARGET))
    assert isinstance(first, list) and isinstance(second, list)
    assert first[0].kernel is second[0].kernel and first[0].facts.registers > 16
    assert first[0].tensor_memory_columns == 0


@needs_cute
def test_build_and_inspect(calls: None, tmp_path: Path) -> None:
    """The same columns as for Triton's; nothing is put where a process would start it."""
    said = run("build", "--model", "v41", "--target", "sm_103a", "--cute", "--jobs", "1", "-o", str(tmp_path / "b"))
    assert "kernels for sm_103a" in said
    everything = json.loads(run("inspect", str(tmp_path / "b"), "--json"))
    written = [row for row in everything if row["kernel"] == "norm_rope_store (CuTe)"]
    assert len(written) == 2 and {row["count"] for row in written} == {40}
    assert set(written[0]) == set(everything[0]) and written[0]["spills"] == 0 and written[0]["regs"] > 16
    assert written[0]["grid"] == "-" and written[0]["blocks/SM"] >= 1 and "16B" in written[0]["loads"]
    table = run("inspect", str(tmp_path / "b"))
    assert "CuTe: compiled only" in table
    bundle = Bundle.load(tmp_path / "b")
    (entry,) = [entry for entry in bundle.kernels.values() if entry.compiler == "cute"]
    folder = tmp_path / "b" / "kernels" / entry.key
    assert {path.name for path in folder.iterdir()} == {"norm_rope_store.cubin", "norm_rope_store.ptx"}
    assert ".target sm_103a" in (folder / "norm_rope_store.ptx").read_text()
    assert bundle.install(tmp_path / "cache") == len(bundle.kernels) - 1


def test_without_the_extra_one_line_says_so(calls: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is captured or compiled; builds without --cute do not ask for it."""
    monkeypatch.setattr(compat, "EXTRAS", {"gpu": ("no_such_module", "nvidia-cutlass-dsl")})
    options = ["build", "--model", "v41", "--target", "sm_103a", "--jobs", "1", "-o", str(tmp_path / "b")]
    said = run(*options, "--cute", status=2)
    assert "nvidia-cutlass-dsl" in said and "pip install 'dscompile[gpu]'" in said
    assert len(said.strip().splitlines()) == 1 and not (tmp_path / "b").exists()
    run(*options)


def test_columns_of_tensor_memory() -> None:
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 "
    assert columns_of("") == 0
    assert columns_of(f"{alloc}[%r1], 256;\n") == 256
    assert columns_of(f"mov.b32 %r7, 128;\n{alloc}[%r1], %r7;\n{alloc}[%r2], 64;") == 192
