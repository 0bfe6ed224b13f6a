"""Orders of configs compared: the coefficient by hand, and what becomes of a call's configs."""

import pytest
import torch

from dscompile.targets import get_target
from dscompile.templates.triton.record import config
from dscompile.tuning.agreement import FACTS, agreements, kendall
from dscompile.tuning.build import Built, Job
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.disassembly import Facts
from dscompile.tuning.offline import CompiledKernel

TARGET = get_target("sm_103a")


def test_kendall() -> None:
    assert kendall([1, 2, 3], [10, 20, 30]) == 1.0 and kendall([1, 2, 3], [3, 2, 1]) == -1.0
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall([1, 2, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)  # two of three pairs, one tie on one side
    assert kendall([1, 1], [1, 2]) is None and kendall([], []) is None
    with pytest.raises(ValueError, match="lists of 1 and 2 numbers"):
        kendall([1], [1, 2])


def test_configs_of_a_call() -> None:
    """More instructions, more time; too few configs, or ones that do not fit, are left out."""

    def job(rows: int, warps: int, instructions: int, registers: int = 32) -> list[Built]:
        call = Call("rms_norm", (TensorSpec((rows, 512), (512, 1), torch.bfloat16), None, 1e-6, "fp32"))
        kernel = CompiledKernel(
            "k", "0", TARGET.name, config(warps), {}, {}, "", {"shared": 0, "num_warps": warps}, "", {}
        )
        facts = Facts(registers, 0, 0, 0, instructions, loads={16: 4}, loop_instructions=9)
        return [Built(Job(call, "rms_norm", config(warps)), kernel, facts, (rows,))]

    results = [job(1 << 14, warps, 10**6 // warps**2) for warps in (1, 2, 4, 8)]
    (found,) = agreements([*results, job(1 << 14, 16, 1, registers=255), job(8, 4, 10), []], TARGET)
    assert (found.template, found.configs, found.loops) == ("rms_norm", 4, 4)
    assert set(found.tau) == set(FACTS) and found.tau["instructions"] == 1.0
    assert found.tau["spills"] is None and found.tau["tensor core"] is None
    assert set(found.bounds) == {"issue"} and found.spread > 4
