"""A kernel is compiled and read once, whatever asks for it how often."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dscompile import compat
from dscompile.targets import get_target
from dscompile.templates.triton.launching import Launch
from dscompile.templates.triton.record import Config, config
from dscompile.templates.triton.rms_norm import TEMPLATES
from dscompile.tuning import build, disassembly, known_facts
from dscompile.tuning.build import Job, compile_job, compile_jobs
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.offline import OfflineCompileError, Request, launches_of, requested

TARGET = get_target("sm_103a")


def norm(rows: int, width: int = 512) -> Call:
    return Call("rms_norm", (TensorSpec((rows, width), (width, 1), torch.bfloat16), None, 1e-6, "fp32"))


def launch(call: Call, chosen: Config) -> Launch:
    return launches_of(TEMPLATES[0], call.meta_args(), chosen, TARGET)[0]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What was done, "compile" or "read", in order; the cache is empty at first."""
    done: list[str] = []
    real_compile, real_read = known_facts.compile_request, disassembly.read
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(known_facts, "_seen", {})
    monkeypatch.setattr(known_facts, "compile_request", lambda r: done.append("compile") or real_compile(r))  # type: ignore[func-returns-value]
    monkeypatch.setattr(disassembly, "read", lambda cubin: done.append("read") or real_read(cubin))  # type: ignore[func-returns-value]
    yield done


def test_one_compile_for_all_batch_sizes(counted: list[str], tmp_path: Path) -> None:
    """In this process, and in the next, which finds the facts on disk; code is fetched if it is wanted."""
    jobs = [Job(norm(rows), "rms_norm", config(4)) for rows in (8, 16, 32)]
    first = [compile_job(job, TARGET, code=False)[0] for job in jobs]
    assert counted == ["compile", "read"]
    assert [b.grid for b in first] == [(8,), (16,), (32,)] and first[1].facts == first[0].facts
    assert first[0].kernel.cache_files and not first[1].kernel.cache_files
    known_facts._seen.clear()
    (again,) = compile_job(jobs[2], TARGET, code=False)
    assert counted == ["compile", "read"] and again == first[2]
    (whole,) = compile_job(jobs[2], TARGET)
    assert counted == ["compile", "read", "compile"] and whole.kernel.cubin == first[0].kernel.cubin
    assert whole.kernel.key == again.kernel.key and whole.kernel.warps == again.kernel.warps
    assert whole.kernel.shared_bytes == again.kernel.shared_bytes


def test_another_config_is_another_kernel(counted: list[str]) -> None:
    for chosen in (config(4), config(8), config(4)):
        known_facts.of_launch(launch(norm(8), chosen), TARGET, code=False)
    assert counted == ["compile", "read"] * 2


def test_damage_and_other_readers_are_found_out(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = launch(norm(8), config(4))
    _, facts = known_facts.of_launch(asked, TARGET, code=False)
    (place,) = (tmp_path / known_facts.FOLDER).iterdir()
    whole = place.read_text()
    for text in ("", "{", "[]", "{}", json.dumps({**json.loads(whole), "facts": {"registers": 1}})):
        place.write_text(text)
        known_facts._seen.clear()
        counted.clear()
        assert known_facts.of_launch(asked, TARGET, code=False)[1] == facts and counted == ["compile", "read"]
        assert place.read_text() == whole
    known_facts._seen.clear()
    counted.clear()
    monkeypatch.setattr(known_facts, "_reader", lambda: "other")
    known_facts.of_launch(asked, TARGET, code=False)
    assert counted == ["compile", "read"]


def test_another_assembler_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = launch(norm(8), config(4))
    key = requested(asked, TARGET).key
    path, release = compat.tool(compat.ptxas_for(103))
    real = compat.tool
    monkeypatch.setattr(compat, "tool", lambda name: (path, "99.9") if "ptxas" in name else real(name))
    assert requested(asked, TARGET).key != key


def test_a_failure_is_remembered_for_this_process(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request) -> None:
        counted.append("compile")
        raise OfflineCompileError("too large")

    monkeypatch.setattr(known_facts, "compile_request", fail)
    for _ in range(2):
        with pytest.raises(OfflineCompileError, match="too large"):
            known_facts.of_launch(launch(norm(8), config(4)), TARGET, code=False)
    assert counted == ["compile"]


def test_jobs_that_share_a_kernel_go_to_one_process() -> None:
    """And every job has its result, in whatever order they come."""
    calls = [norm(rows, width) for width in (256, 512) for rows in (8, 16)]
    jobs = [Job(call, "rms_norm", config(warps)) for call in calls for warps in (1, 2)]
    assert len({build._kernel_of(job) for job in jobs}) == 4
    results = dict(compile_jobs(jobs, TARGET, 2, code=False))
    assert set(results) == set(jobs)
    for job, result in results.items():
        assert isinstance(result, list) and result[0].job == job and result[0].grid == (job.call.args[0].shape[0],)
