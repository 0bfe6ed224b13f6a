"""The CPU benchmark's parts: its models, its worker processes, what it makes of their answers."""

import argparse
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table
from transformers.models.deepseek_v4 import DeepseekV4Config

from dscompile.models.deepseek_v41 import DeepseekV41Config


@pytest.fixture(scope="module")
def benchmarks(repo_root: Path):
    """The folder on the path, as when one of its scripts runs."""
    sys.path.insert(0, str(repo_root / "benchmarks"))
    yield repo_root / "benchmarks"
    sys.path.remove(str(repo_root / "benchmarks"))


@pytest.fixture(scope="module")
def cpu(benchmarks: Path) -> ModuleType:
    import cpu

    return cpu


@pytest.mark.parametrize("layers", [1, 2])
def test_v41_has_layers_of_every_kind(cpu: ModuleType, layers: int):
    config = DeepseekV41Config.miniature(**cpu.Setup("v41", "eager", layers=layers).sizes())
    kinds = Counter((config.kind(i), config.ratio(i)) for i in range(config.num_hidden_layers))
    at_least = {("window", 0): 2, ("full", 2): 2, ("reuse", 2): 2, ("full", 1): 1, ("reindex", 1): 2, ("reuse", 1): 2}
    assert all(kinds[kind] >= count for kind, count in at_least.items())
    assert config.candidate_source_layer_id is not None and config.uses_candidates(config.num_hidden_layers - 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_v4_has_layers_of_every_kind(cpu: ModuleType, layers: int):
    config = DeepseekV4Config(**cpu.Setup("v4", "eager", layers=layers).sizes())
    assert min(Counter(config.layer_types).values()) == 2 * layers and len(set(config.layer_types)) == 3
    assert set(config.mlp_layer_types) == {"hash_moe", "moe"}


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_two_workers_would_compute_the_same(cpu: ModuleType, model: str):
    import cpu_models

    setup = cpu.Setup(model, "eager", steps=2, tiny=True)
    with torch.no_grad():
        for case in cpu.cases([20], [40], [2]):
            first, second = (cpu_models.make_call(setup, case, m, m)() for m in map(cpu_models.build, (setup, setup)))
            assert first.isfinite().all() and first.equal(second)
            assert first.shape[0] == (20 if case.phase == "prefill" else 2 * setup.steps)


def test_a_worker_answers_reports_and_is_ended_when_late(cpu: ModuleType, tmp_path: Path):
    setup = cpu.Setup("v41", "eager", steps=2, tiny=True)
    worker = cpu.Worker(setup, tmp_path, tmp_path / "log")
    try:
        assert worker.ask("build")["parameters"] > 0
        case = cpu.Case("decode", 1, 40)
        assert worker.ask("prepare", case)["logits"].shape == (2, 64)
        assert worker.ask("repeat", case)["seconds"] > 0
        with pytest.raises(cpu.WorkerError, match="Error") as error:
            worker.ask("prepare", cpu.Case("decode", 1, -500))
        assert not error.value.gone
        with pytest.raises(cpu.WorkerError, match="did not finish in 0 s") as error:
            worker.ask("prepare", cpu.Case("prefill", 1, 512), timeout=0.0)
        assert error.value.gone
    finally:
        worker.end()
    with pytest.raises(cpu.WorkerError, match="the process ended"):
        worker.ask("repeat", case)


class Scripted:
    """A team whose workers follow a script: mode -> seconds of its repetitions, or the error of its preparation."""

    def __init__(self, script: dict) -> None:
        self.script, self.model, self.skipped, self.asked = script, "v4", {}, []
        self.options = argparse.Namespace(
            modes=[*script], repeats=4, case_seconds=100.0, timeout=1.0, stock_timeout=9.0
        )

    def ask(self, mode: str, command: str, case, timeout: float):
        self.asked.append((mode, command, timeout))
        if isinstance(self.script[mode], Exception):
            raise self.script[mode]
        if command == "prepare":
            return {"logits": np.eye(3), "first_call_seconds": 5.0}
        return {"seconds": self.script[mode].pop(0), "cpu_seconds": 1.0, "peak_bytes": 7}


def quiet(what: str, advance: int = 1) -> None: ...


def test_ratios_are_of_medians_taken_in_turn(cpu: ModuleType):
    team = Scripted({"eager": [8.0, 8, 9, 90], "stock": [4.0, 4, 4, 4], "dsv4": [2.0, 1, 3, 2]})
    result = cpu.run_case(team, cpu.Case("prefill", 1, 8), quiet)
    assert result["ratios"] == {"dsv4 vs stock": 2.0, "dsv4 vs eager": 4.25}
    assert result["modes"]["stock"]["cosine_mean"] == pytest.approx(1.0)
    turns = [mode for mode, command, _ in team.asked if command == "repeat"]
    assert turns[:6] == ["eager", "stock", "dsv4", "stock", "dsv4", "eager"]
    assert ("stock", "prepare", 9.0) in team.asked and ("dsv4", "prepare", 1.0) in team.asked


def test_a_late_compile_is_reported_and_not_tried_again(cpu: ModuleType):
    team = Scripted({"stock": cpu.WorkerError("did not finish in 9 s", gone=True), "dsv4": [2.0] * 8})
    for length, expected in ((8, "did not finish in 9 s"), (16, "not tried (prompt 8, batch 1 did not finish in 9 s)")):
        result = cpu.run_case(team, cpu.Case("prefill", 1, length), quiet)
        assert result["modes"]["stock"]["error"] == expected
        assert result["modes"]["dsv4"]["median_seconds"] == 2.0 and result["ratios"] == {}
    assert [mode for mode, command, _ in team.asked if command == "prepare"].count("stock") == 1


def test_agreement_sees_another_answer(cpu: ModuleType):
    a = np.eye(4, dtype=np.float32)
    assert cpu.agreement(a, a) == {"cosine_mean": 1.0, "cosine_min": 1.0, "same_token": 1.0}
    b = a.copy()
    b[0] = -a[0]
    assert cpu.agreement(a, b) == {"cosine_mean": 0.5, "cosine_min": -1.0, "same_token": 0.75}


def test_eager_alone_from_the_command_line(benchmarks: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    command = [sys.executable, "cpu.py", "--quick", "--models", "v41", "--modes", "eager", "--json", str(out)]
    done = subprocess.run(command, cwd=benchmarks, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [case["name"] for case in found["cases"]] == ["prompt 48, batch 1", "decode at 64, batch 1"]
    assert all(case["modes"]["eager"]["median_seconds"] > 0 for case in found["cases"])
    assert found["versions"]["torch"] == torch.__version__ and "Median times" in done.stdout


def test_expert_parallel_from_the_command_line(benchmarks: Path):
    done = subprocess.run([sys.executable, "ep.py", "--quick"], cwd=benchmarks, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(way in done.stdout for way in ("all-reduce", "exact", "padded", "exact fp8", "kB sent by a rank"))


def test_tables_show_errors_and_missing_numbers(cpu: ModuleType):
    import cpu_tables

    good = {"median_seconds": 0.5, "peak_bytes": 2e9, "first_call_seconds": 9.0, "backend_seconds": 6.0, "reports": []}
    case = {"model": "v4", "name": "prompt 8, batch 1", "phase": "prefill", "ratios": {"dsv4 vs eager": 2.0},
            "modes": {"eager": good, "stock": {"error": "did not finish in 9 s"}, "dsv4": good}}  # fmt: skip
    results = {"settings": {"modes": ["eager", "stock", "dsv4"], "steps": 2}, "cases": [case]}
    text = _text(cpu_tables.case_table(results))
    assert "2.00 x" in text and "> 9 s" in text and "500 ms" in text
    assert "2.0" in _text(cpu_tables.memory_table(results))
    assert "8.5" in _text(cpu_tables.compile_table(results))


def _text(table: Table) -> str:
    console = Console(width=240, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_gpu_script_runs_without_one(benchmarks: Path, tmp_path: Path):
    """Calls are found, kernels compiled, the file is written; nothing is timed."""
    command = [
        str(benchmarks / "device.sh"),
        "--dry-run",
        "--calls",
        "3",
        "--out",
        str(tmp_path),
        "--target",
        "sm_100a",
    ]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["dry_run"] and found["ceilings"] is None and found["target"] == "sm_100a"
    assert len(found["calls"]) == 3 and all(row["kernels"] for row in found["calls"])
    assert len(found["not_run"]) > 20


def test_the_gpu_script_says_that_it_needs_one(benchmarks: Path, tmp_path: Path):
    command = [sys.executable, "device.py", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=benchmarks, capture_output=True, text=True)
    if not torch.cuda.is_available():
        assert done.returncode == 2 and "use --dry-run" in done.stderr
    done = subprocess.run([*command, "--dry-run", "--target", "sm_1"], cwd=benchmarks, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown target 'sm_1'" in done.stderr


@pytest.mark.parametrize("op", ["sparse_attention", "sparse_attention_paged"])
@pytest.mark.parametrize("heads", [1, 4])
def test_flex_attention_computes_the_same(benchmarks: Path, op: str, heads: int):
    """Packed rows, a window that is not full, skipped rows and a sink; before the output is rotated back."""
    import flex

    from dscompile.ops import OPS

    torch.manual_seed(0)
    q, pool = torch.randn(2, 1, heads, 64), torch.ops.dsv4.quant_pack(torch.randn(20, 64), "fp8_g32_ue8m0")
    comp = torch.ops.dsv4.quant_pack(torch.randn(2, 9, 64), "fp4_g16_e4m3")
    index = torch.tensor([[[3, 8, -1, 0]], [[1, 1, 2, -1]]])
    slots = torch.randint(0, 20, (2, 6))
    slots[0, 0] = -1 if op.endswith("paged") else 0
    positions, start = torch.tensor([[7], [2]]), torch.tensor([2, -3])
    window = (pool, slots) if op.endswith("paged") else (pool[slots],)
    rest = (positions, start, 4, comp, index, None, torch.randn(heads), 0.3)
    want = OPS[op].reference(q, *window, *rest, None, None, False, "fp8_g32_ue8m0", "fp4_g16_e4m3")
    call = flex.flex_call(op, (q, *window, *rest, None, None, False, "fp8_g32_ue8m0", "fp4_g16_e4m3"), compiled=False)
    assert call is not None
    torch.testing.assert_close(call(), want, rtol=1e-4, atol=1e-4)
    two = torch.randn(2, 2, heads, 64)
    args = (two, *window, positions.repeat(1, 2), start, 4, None, None, None, None, 0.3, None, None, False)
    assert flex.flex_call(op, (*args, "fp8_g32_ue8m0", "none")) is None


@pytest.mark.parametrize("layers", [6, 10, 20, 40])
def test_elision_is_measured_on_the_releases_proportions(benchmarks: Path, layers: int):
    import elide

    config = DeepseekV41Config.miniature(**elide.sizes(layers, 64, 16, 1024))
    assert config.kv_source_layer_ids[-1] == layers // 2 and config.num_hidden_layers == layers
    names = [name for name, _ in elide.forms(16, layers)]
    assert names[:3] == ["all tokens", "exact", "bounded 16"]


def test_the_effect_of_an_approximation_on_logits(benchmarks: Path):
    import elide

    want = torch.randn(3, 50)
    assert elide.effect(want, want) == {"error": 0.0, "best": 1.0, "ten": 1.0}
    seen = elide.effect(want, -want)
    assert seen["error"] == pytest.approx(2.0) and seen["best"] == 0.0


def test_packed_and_padded_steps_are_of_the_same_size(benchmarks: Path, capsys: pytest.CaptureFixture[str]):
    import pack

    from dscompile.serving.prefill import PrefillLoop
    from support.serving import VOCAB, Bytes

    options = pack.parse(["--step", "64", "--rows", "2", "--tile", "8"])
    requests = pack.prompts(30, 60, VOCAB)
    assert {len(each.prompt) <= 60 for each in requests} == {True} and len({len(each.prompt) for each in requests}) > 9
    rows = PrefillLoop(Bytes(options.rows, 2, 40), options.step // options.rows)
    tiles = PrefillLoop(Bytes(options.step // options.tile, 8, 40), options.tile, packed=True)
    (want, _, steps), (got, _, fewer) = pack.run(rows, requests), pack.run(tiles, requests)
    assert got == want and len(want) == 30 and fewer < steps
    with pytest.raises(SystemExit):
        pack.parse(["--step", "64", "--tile", "7"])
    assert "--tile: 7, allowed: a divisor of the 64 tokens of a step" in capsys.readouterr().err
