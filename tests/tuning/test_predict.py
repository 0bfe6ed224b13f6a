"""The model of how long a call takes: worked by hand where it is simple, and the order that it must give."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dscompile.targets import get_target
from dscompile.templates.triton.record import config
from dscompile.tuning.build import Built, Job, compile_job
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.disassembly import Facts
from dscompile.tuning.offline import CompiledKernel
from dscompile.tuning.predict import LATENCY_US, LAUNCH_US, issued, predict, trips

TARGET = get_target("sm_103a")


def norm(rows: int, width: int) -> Call:
    return Call("rms_norm", (TensorSpec((rows, width), (width, 1), torch.bfloat16), None, 1e-6, "fp32"))


def built(call: Call, grid: tuple[int, ...], facts: dict[str, Any] | None = None, **more: Any) -> Built:
    warps = more.pop("warps", 4)
    kernel = CompiledKernel(
        "k", "0", TARGET.name, config(warps), {}, {}, "", {"shared": more.pop("shared", 0), "num_warps": warps}, "", {}
    )
    given = {"registers": 32, "stack_bytes": 0, "static_shared_bytes": 0, "spills": 0, "instructions": 100}
    return Built(
        Job(call, "rms_norm", config(warps)),
        kernel,
        Facts(**{**given, "loads": {16: 8}, **(facts or {})}),
        grid,
        **more,
    )


def test_much_traffic_takes_its_time_at_the_memorys_rate() -> None:
    call = norm(1 << 16, 8192)
    got = predict([built(call, (1 << 16,))], TARGET)
    floor = 2 * (1 << 16) * 8192 * 2 / 8e12 * 1e6
    assert got.bound == "memory" and floor + LAUNCH_US <= got.time_us <= 1.05 * floor + LAUNCH_US


def test_little_work_takes_the_latency() -> None:
    got = predict([built(norm(1, 64), (1,), {"instructions": 10})], TARGET)
    assert got.bound == "latency" and got.time_us == LATENCY_US + LAUNCH_US


def test_few_loads_in_flight_cannot_keep_the_memory_busy() -> None:
    call = norm(1 << 12, 8192)
    wide, narrow = (predict([built(call, (1 << 12,), {"loads": {width: 1}})], TARGET) for width in (16, 1))
    assert narrow.time_us > 3 * wide.time_us


def test_a_wave_that_is_nearly_empty_counts_whole() -> None:
    processors = int(TARGET.sm_count.value or 0)
    full, over = (predict([built(norm(1 << 12, 8192), (blocks,), shared=200 * 1024)], TARGET)
                  for blocks in (processors, processors + 1))  # fmt: skip
    assert over.time_us - LAUNCH_US == pytest.approx(2 * (full.time_us - LAUNCH_US), rel=0.02)


def test_scratch_and_more_kernels_cost() -> None:
    call = norm(256, 8192)
    one = predict([built(call, (256,))], TARGET)
    split = predict(
        [built(call, (256,), scratch_bytes=1 << 24), built(call, (256,), main=False, scratch_bytes=1 << 24)], TARGET
    )
    assert split.time_us > one.time_us + LAUNCH_US + 2 * (1 << 24) / 8e12 * 1e6 * 0.99


def test_what_does_not_fit_has_no_time() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        predict([built(norm(8, 64), (8,), {"registers": 255}, warps=16)], TARGET)


def test_compiled_kernels_have_a_time_and_say_which_arguments_are_theirs() -> None:
    call = norm(256, 5120)
    kernels = compile_job(Job(call, "rms_norm", config(4)), TARGET)
    (kernel,) = kernels
    assert kernel.main and kernel.scratch_bytes == 0
    assert predict(kernels, TARGET).time_us >= LAUNCH_US
    assert predict([replace(kernel, scratch_bytes=1 << 30)], TARGET).time_us > 100


def test_loops_run_until_the_bytes_are_read() -> None:
    """By hand: 128 threads, 16 bytes before the loop and 32 in each round, rows of 16 KiB."""
    looping = {"instructions": 100, "loop_instructions": 40, "loads": {16: 3}, "loop_bytes": 32}
    call = norm(64, 8192)
    kernel = built(call, (64,), looping)
    assert trips(kernel) == pytest.approx((8192 * 2 - 128 * 16) / (128 * 32))
    assert issued(kernel) == pytest.approx((100 + (trips(kernel) - 1) * 40) * 4 * 64)
    assert trips(built(norm(64, 64), (64,), looping)) == 1.0
    assert trips(built(call, (64,), {**looping, "loop_bytes": 0})) == 1.0  # cannot be told
    assert trips(built(call, (0,), looping)) == 1.0
    assert trips(replace(kernel, main=False)) == 1.0
    rounds = predict([built(call, (64,), {**looping, "instructions": 10**6, "loop_instructions": 10**6})], TARGET)
    once = predict([built(call, (64,), {**looping, "instructions": 10**6})], TARGET)
    assert rounds.bound == once.bound == "issue" and rounds.time_us > 2 * once.time_us
