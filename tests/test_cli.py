"""The command line, in process; the backend behind `explain` has its own tests."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dscompile import compat
from dscompile.cli import app
from dscompile.formats import FORMATS
from dscompile.subjects import SubjectError, load_call
from dscompile.targets import TARGETS

USER_FILE = """
import torch
import helper

def norm(x, w):
    f = x.float()
    return w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

def example():
    return norm, (torch.ones(3, helper.DIM), torch.ones(helper.DIM))

def keywords():
    return norm, [torch.ones(3, 16)], {"w": torch.ones(16)}

def wrong():
    return norm

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "helper.py").write_text("DIM = 16\n")
    path = tmp_path / "users_model.py"
    path.write_text(USER_FILE)
    return path


def run(*arguments: str, status: int = 0) -> str:
    # A wide terminal: names must not be cut in what tests read.
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout if status == 0 else result.output


def test_help_names_every_command():
    text = run("--help")
    for command in ("explain", "formats", "targets", "env", "build", "inspect"):
        assert command in text


def test_formats_lists_every_format_with_its_bytes():
    rows = {row["format"]: row for row in json.loads(run("formats", "--json"))}
    assert set(rows) == set(FORMATS)
    assert rows["fp8_g32_ue8m0"]["row_bytes"] == {"128": 132, "512": 528}
    assert rows["fp4_g16_e4m3"]["row_bytes"]["512"] == 288
    assert rows["fp4_g32_ue8m0"]["row_bytes"]["128"] == 68


def test_formats_marks_widths_that_do_not_divide():
    rows = {row["format"]: row for row in json.loads(run("formats", "--dim", "48", "--json"))}
    assert rows["fp8_g32_ue8m0"]["row_bytes"] == {"48": None}
    assert rows["bf16"]["row_bytes"] == {"48": 96}


def test_tables_show_the_same_names():
    text = run("formats")
    assert all(name in text for name in FORMATS) and "528" in text
    text = run("targets")
    assert all(name in text for name in TARGETS) and "unconfirmed" in text


def test_targets_json_has_value_status_and_source():
    data = json.loads(run("targets", "--json"))
    assert list(data) == list(TARGETS)
    constant = data["sm_103a"]["hbm_bytes_per_s"]
    assert constant == vars(TARGETS["sm_103a"].hbm_bytes_per_s)


def test_env_shows_versions_and_features():
    data = json.loads(run("env", "--json"))
    assert data["torch"] == torch.__version__
    assert data["features"] == {name: compat.has(name) for name in compat.FEATURES}
    assert "Environment" in run("env")


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("v5", ["'v5'", "v41", "v4", "path/file.py:function"]),
        ("no/such/file.py:make", ["'no/such/file.py'"]),
        (":make", ["':make'"]),
    ],
)
def test_explain_refuses_what_it_cannot_find_in_one_line(subject: str, words: list[str]):
    text = run("explain", subject, status=2)
    assert len(text.strip().splitlines()) == 1
    assert all(word in text for word in words)


def test_explain_refuses_wrong_options_before_it_builds_anything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dscompile.subjects.load_call", lambda *args: pytest.fail("built the model first"))
    assert "'sm_99'" in run("explain", "v4", "--target", "sm_99", status=2)


def test_subject_functions(user_file: Path):
    function, args, kwargs = load_call(f"{user_file}:example", 8)
    assert function(*args, **kwargs).shape == (3, 16)
    function, args, kwargs = load_call(f"{user_file}:keywords", 8)
    assert list(kwargs) == ["w"] and function(*args, **kwargs).shape == (3, 16)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "has no function 'missing'"),
        ("NOT_A_FUNCTION", "has no function 'NOT_A_FUNCTION'"),
        ("wrong", r"returned function; it must return \(callable, args\)"),
    ],
)
def test_subject_functions_that_do_not_fit(user_file: Path, name: str, words: str):
    with pytest.raises(SubjectError, match=words):
        load_call(f"{user_file}:{name}", 8)


@pytest.mark.parametrize(
    ("text", "function", "words"),
    [
        ("def f(:\n", "f", ["cannot be imported (line 1)", "SyntaxError"]),
        ("\nimport nothing_of_this_name\n", "f", ["(line 2)", "nothing_of_this_name"]),
        ("def f():\n    return 1 / 0\n", "f", ["f() failed (line 2)", "division by zero"]),
        ("def f(x):\n    return x\n", "f", ["f() failed", "positional argument: 'x'"]),
        (
            "import torch\ndef f():\n    return torch.nn.Linear(3, 4), (torch.ones(2, 5),)\n",
            "f",
            ["failed when it was called", "linear.py", "2, 5", "DSCOMPILE_TRACEBACK"],
        ),
    ],
)
def test_explain_says_in_one_line_what_is_wrong_with_a_users_file(
    tmp_path: Path, text: str, function: str, words: list[str]
):
    path = tmp_path / "broken.py"
    path.write_text(text)
    said = run("explain", f"{path}:{function}", status=2).strip()
    assert len(said.splitlines()) == 1
    assert all(word in said for word in words), said


def test_explain_compiles_a_users_function(user_file: Path, tmp_path: Path):
    data = json.loads(run("explain", f"{user_file}:example", "--format", "json"))
    (graph,) = data["graphs"]
    assert graph["counts"] == {"norm": 1}
    output = tmp_path / "reports" / "report.html"
    run("explain", f"{user_file}:example", "--format", "html", "--output", str(output))
    assert output.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("subject", ["v4", "v41"])
def test_miniatures_run_in_eager(subject: str):
    function, args, kwargs = load_call(subject, 9)
    with torch.no_grad():
        result = function(*args, **kwargs)
    logits = result if isinstance(result, torch.Tensor) else result.logits
    assert logits.shape[:2] == (1, 9) and logits.isfinite().all()
