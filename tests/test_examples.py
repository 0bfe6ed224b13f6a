"""The examples run, and the demonstration fails where it should."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dscompile.report import GraphReport, Match, Report


@pytest.fixture(scope="module")
def quickstart(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", repo_root / "examples" / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module
    spec.loader.exec_module(module)
    return module


def graph(matches: int = 1) -> GraphReport:
    return GraphReport("graph", matches=[Match(f"layers.{i}", "norm", "rms_norm.fp32") for i in range(matches)])


def outcome(quickstart: ModuleType, eager: torch.Tensor, compiled: torch.Tensor, graphs: list[GraphReport]):
    runs = [[quickstart.Run(logits.argmax(-1), logits, [1.0, 0.1])] for logits in (eager, compiled)]
    return quickstart.Outcome("V4.1", Report(graphs), *runs, [1.0, 1.0])


def test_equal_tokens_and_matches_pass(quickstart: ModuleType):
    logits = torch.eye(4, 8)
    assert not [*quickstart.failures(outcome(quickstart, logits, logits + 1e-3, [graph(), graph()]), torch.float32)]


@pytest.mark.parametrize("graphs", [[], [graph()], [graph(), graph(0)]], ids=len)
def test_nothing_recognised_fails(quickstart: ModuleType, graphs: list[GraphReport]):
    logits = torch.eye(4, 8)
    (line,) = quickstart.failures(outcome(quickstart, logits, logits, graphs), torch.float32)
    assert "nothing was recognised" in line


def test_another_token_fails_unless_it_was_a_near_tie(quickstart: ModuleType):
    eager = torch.eye(4, 8)
    for gap, fails in ((0.5, True), (1e-4, False)):
        eager[2] = 0
        eager[2, 5], eager[2, 6] = 1.0, 1.0 - gap
        compiled = eager.clone()
        compiled[2, 6] = 2.0
        got = outcome(quickstart, eager, compiled, [graph(), graph()])
        assert bool([*quickstart.failures(got, torch.float32)]) == fails
        assert not [*quickstart.failures(got, torch.bfloat16)]


def test_logits_that_are_not_finite_fail(quickstart: ModuleType):
    logits = torch.eye(4, 8)
    broken = logits.clone()
    broken[3, 3] = float("inf")
    (line,) = quickstart.failures(outcome(quickstart, logits, broken, [graph(), graph()]), torch.bfloat16)
    assert "not finite" in line


@pytest.mark.slow
def test_quickstart(repo_root: Path, tmp_path: Path):
    command = [sys.executable, "examples/quickstart.py", "--tokens", "4", "--report", str(tmp_path / "coverage.json")]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "coverage.json").exists()
    for words in ("V4.1 prefill", "V4 decode", "attention", "speed-up", "4/4"):
        assert words in done.stdout


@pytest.mark.slow
def test_expert_parallel(repo_root: Path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "examples/expert_parallel.py", "--tokens", "4",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("V4.1: 8 layers of 16 experts, 8 on each of 2 ranks", "transformers V4", "balance", "[True, True]"):
        assert words in done.stdout


@pytest.mark.slow
def test_disaggregated(repo_root: Path):
    command = [sys.executable, "examples/disaggregated.py", "--requests", "12"]
    done = subprocess.run(
        command, cwd=repo_root, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("prefill: ", "decode: ", "bytes a prompt token", "elision (exact)", "tokens of all 12 requests equal",
                  "decode: can be captured"):  # fmt: skip
        assert words in done.stdout
