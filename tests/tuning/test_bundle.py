"""Bundles: what is in them, and that a machine with a GPU compiles nothing that is."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from dscompile.targets import get_target
from dscompile.templates.triton.record import config
from dscompile.tuning.build import Failure, Job, compile_job, compile_jobs, first_only, plan
from dscompile.tuning.bundle import Bundle, BundleError
from dscompile.tuning.calls import Call, TensorSpec, merged

TARGET = get_target("sm_103a")


def norm(rows: int, width: int, dtype: torch.dtype = torch.bfloat16, count: int = 1) -> Call:
    x = TensorSpec((rows, width), (width, 1), dtype)
    return Call("rms_norm", (x, TensorSpec((width,), (1,), torch.float32), 1e-20, "fp32"), count)


CALLS = [norm(8, 5120, count=3), norm(8, 5120, count=2), norm(256, 5120), norm(8, 512), norm(2, 70000)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle")
    made = Bundle(folder, TARGET.name, {"model": "test"}, triton=__import__("triton").__version__)
    jobs, failures = plan(merged(CALLS), TARGET, first_only)
    for _, result in compile_jobs(jobs, TARGET, 1):
        assert not isinstance(result, Failure), result
        made.add(result)
    for failure in failures:
        made.fail(failure)
    made.save()
    return made


def test_equal_calls_are_one_and_equal_kernels_are_stored_once(bundle: Bundle) -> None:
    assert [call.count for call in merged(CALLS)] == [5, 1, 1, 1]
    assert sorted(len(entry.uses) for entry in bundle.kernels.values()) == [1, 2]  # 8 and 256 rows are one kernel
    shared = max(bundle.kernels.values(), key=lambda entry: len(entry.uses))
    assert [(use.grid, use.count) for use in shared.uses] == [((8,), 5), ((256,), 1)]
    assert shared.uses[0].read_bytes == 8 * 5120 * 2 + 5120 * 4


def test_what_has_no_kernel_is_listed_with_its_reason(bundle: Bundle) -> None:
    (failure,) = bundle.failures
    assert "70000" in failure["call"] and "allowed: 1 to 65536" in failure["reason"]


def test_reading_gives_back_what_was_written(bundle: Bundle) -> None:
    again = Bundle.load(bundle.folder)
    assert again.kernels == bundle.kernels and again.failures == bundle.failures
    assert (again.target, again.workload, again.triton) == (bundle.target, bundle.workload, bundle.triton)


def test_sources_say_where_they_come_from(bundle: Bundle) -> None:
    for entry in bundle.kernels.values():
        text = (bundle.folder / "kernels" / entry.key / f"{entry.name}.py").read_text()
        assert "# template  rms_norm" in text and "# target    sm_103a" in text and "def rms_norm_kernel(" in text
        assert "bfloat16[" in text and "D=" in text


def _start(capability: tuple[int, int], cache: str, rows: int, width: int, answers: Any) -> None:
    """In a process of its own: start the kernel as a GPU machine would, up to the launch."""
    import triton

    from dscompile.templates.triton.rms_norm import rms_norm_kernel
    from support import driver_stub

    triton.knobs.cache.dir = cache
    driver_stub.install(capability)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    x = torch.empty(rows, width, dtype=torch.bfloat16)
    rms_norm_kernel.warmup(
        x, torch.empty(width), torch.empty_like(x), width, 1e-20, D=width,
        BLOCK_D=triton.next_power_of_2(width), MODE=0, grid=(rows,), num_warps=8 if width > 2048 else 4, num_stages=2,
        enable_fp_fusion=False,
    )  # fmt: skip
    answers.put(hits)


@pytest.mark.parametrize(("width", "known"), [(5120, True), (512, True), (1024, False)])
def test_a_gpu_machine_finds_the_kernels(bundle: Bundle, tmp_path: Path, width: int, known: bool) -> None:
    """Triton's own launch asks the cache for exactly the entries that were made offline."""
    assert bundle.install(tmp_path) == len(bundle.kernels)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_start, args=(TARGET.capability, str(tmp_path), 8, width, answers))
    process.start()
    assert answers.get(timeout=300) == [known]
    process.join()


def test_installing_again_changes_nothing(bundle: Bundle, tmp_path: Path) -> None:
    assert bundle.install(tmp_path) == 2 and bundle.install(tmp_path) == 0
    (next(tmp_path.glob("*/__grp__*"))).unlink()  # as an interrupted installation leaves it
    assert bundle.install(tmp_path) == 1


def test_what_cannot_be_used_says_what_to_do(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no manifest.json; make one with `dscompile build`"):
        Bundle.load(tmp_path)
    other = Bundle(bundle.folder, bundle.target, {}, "3.5.0", kernels=bundle.kernels)
    with pytest.raises(BundleError, match="built with Triton 3.5.0"):
        other.install(tmp_path)
    moved = Bundle(tmp_path / "elsewhere", bundle.target, {}, bundle.triton, kernels=bundle.kernels)
    with pytest.raises(BundleError, match="lacks .*elsewhere.*build it again"):
        moved.install(tmp_path / "cache")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle.load(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(BundleError, match="format 0, this version reads 1"):
        Bundle.load(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BundleError, match="cannot write"):
        Bundle(blocked / "x", "sm_103a", {}, bundle.triton).save()


def test_processes_compile_side_by_side_and_failures_are_results() -> None:
    call = norm(8, 256)
    jobs = [Job(call, "rms_norm", config(warps)) for warps in (1, 2, 4)]
    results = dict(compile_jobs([*jobs, Job(call, "rms_norm", config(3))], TARGET, 2))
    assert all(isinstance(results[job], list) for job in jobs)
    failure = next(result for job, result in results.items() if job.config.num_warps == 3)
    assert isinstance(failure, Failure) and "rms_norm_kernel for sm_103a" in failure.reason
    alone = compile_job(jobs[0], TARGET)
    assert results[jobs[0]][0].kernel.key == alone[0].kernel.key
