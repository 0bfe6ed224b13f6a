"""The drawing of a schedule, and the command that shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from dscompile.cli import app
from dscompile.passes.timeline import Cover, Row, Schedule
from dscompile.report import GraphReport, Report
from dscompile.timelines import as_text, draw

USER_FILE = """
import torch
import dscompile
from tests.support.expert_blocks import Blocks, tokens

def blocks():
    model = Blocks(2)
    return model, (tokens(model.config, 0, (1, 3), torch.float32),)

def batch():
    model = Blocks(2)
    x = tokens(model.config, 0, (4, 3), torch.float32)
    dscompile.mark_batch(x)
    return model, (x,)

def plain():
    return torch.sin, (torch.ones(3),)
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path, str(repo_root)])
    path = tmp_path / "users_experts.py"
    path.write_text(USER_FILE)
    return path


def explain(*arguments: str, status: int = 0) -> str:
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *arguments])
    assert found.exit_code == status, (found.output, found.exception)
    assert not dist.is_initialized()
    return found.stdout if status == 0 else found.output


def test_the_command_draws_what_runs_while_tokens_travel(user_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "drawn.txt"
    explain(f"{user_file}:blocks", "--schedule", "--ranks", "4", "--output", str(output))
    text = output.read_text()
    assert "> dispatch layers.1" in text and "< combine layers.0" in text and "NOTHING RUNS MEANWHILE" in text
    assert "4 exchanges, 2 with nothing that runs meanwhile" in text
    data = json.loads(explain(f"{user_file}:blocks", "--schedule", "--ranks", "2", "--format", "json"))
    assert len(data["graphs"][0]["schedule"]["covers"]) == 4
    assert "4 slots" not in data["graphs"][0]["exchanges"][0] and "2 ranks" in data["graphs"][0]["exchanges"][0]


def test_the_command_draws_two_halves(user_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "drawn.txt"  # as wide as it needs to be, whatever the terminal
    explain(f"{user_file}:batch", "--schedule", "--micro-batches", "2", "--output", str(output))
    text = output.read_text()
    assert "half 1 computes" in text and "< combine layers.0, half 1" in text and "NOTHING" not in text
    said = explain(f"{user_file}:batch", "--micro-batches", "2", status=2)
    assert "'micro_batches' is 2" in said and "without the option 'mesh'" in said


def test_a_model_without_experts_has_no_schedule(user_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "drawn.txt"
    explain(f"{user_file}:plain", "--schedule", "--output", str(output))
    assert "no exchanges" in output.read_text()


def test_ranks_that_do_not_divide_the_experts_are_refused_in_one_line(user_file: Path) -> None:
    said = explain(f"{user_file}:blocks", "--schedule", "--ranks", "3", status=2)
    assert "16 experts" in said and "3 ranks" in said and len(said.strip().splitlines()) == 1


def test_two_halves_have_a_column_each() -> None:
    rows = [
        Row(0, "start", "layers.0", "dispatch"),
        Row(1, "work", "layers.0", "attention", ("dispatch layers.0",)),
        Row(0, "wait", "layers.0", "dispatch", ("dispatch layers.0",)),
        Row(1, "start", "layers.0", "dispatch"),
        Row(1, "wait", "layers.0", "dispatch", ("dispatch layers.0",)),
    ]
    covers = [Cover("dispatch layers.0", 0, 0, 2, (1,)), Cover("dispatch layers.0", 1, 3, 4, ())]
    lines = as_text(draw(Report([GraphReport("graph", schedule=Schedule(2, rows, covers))]))).splitlines()
    head = next(line for line in lines if "half 0 computes" in line)
    work = next(line for line in lines if "attention" in line)
    assert work.index("layers.0: attention") == head.index("half 1 computes")
    assert any("< dispatch layers.0, half 0" in line and "rows 1" in line for line in lines)
    assert any("< dispatch layers.0, half 1" in line and "NOTHING" in line for line in lines)
    assert lines[-2].strip() == "2 exchanges, 2 halves of the batch, 1 with nothing that runs meanwhile"
