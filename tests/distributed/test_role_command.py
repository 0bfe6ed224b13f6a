"""`dscompile plan --roles`: tables, JSON, options that cannot be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dscompile.cli import app

K = 1024


def run(*arguments: str, status: int = 0, columns: str | None = "240") -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": columns, "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


def test_the_command() -> None:
    said = run("--roles")
    assert "modelled" in said and "5 x DEP8" in said and "64.4K" in said and "hand-over bytes = rows" in said
    found = json.loads(run("--roles", "--json", "--input", "32k", "--hit", "0.5", "--per-user", "50"))
    assert found["status"] == "modelled" and found["new_tokens"] == 16 * K and len(found["published"]) == 4
    assert {(each["role"], each["ranks"]) for each in found["instances"]} == {
        *(("prefill", n) for n in (2, 4, 8)), *(("decode", n) for n in (8, 16, 32, 64))
    }  # fmt: skip
    first = found["instances"][0]
    assert sum(part["flops"] for part in first["parts"].values()) == pytest.approx(first["step"]["flops"])
    box = run("--roles", "--cluster", "hgx-h200")
    assert "prefill DEP2: weights do not fit" in box and "no pair of instances fits on hgx-h200 (8 GPUs)" in box
    assert "Published" not in box and "1 x DEP4" in run(
        "--roles", "--cluster", "hgx-h200", "--prefill", "4", "--decode", "4"
    )


@pytest.mark.parametrize("columns", ["80", None])
def test_no_number_is_cut_off(columns: str | None) -> None:
    """Wider than the 80 columns that a pipe seems to have."""
    said = run("--roles", columns=columns)
    assert "…" not in said and "186,558" in said and "1,072.3 1,098,028 9,882,256" in said and "14,906" in said
    assert "…" not in run(columns="40") and "weights" in run(columns="40")


@pytest.mark.parametrize(("gpus", "ranks"), [(1, []), (3, [2]), (4, [2, 4])])
def test_small_clusters(tmp_path: Path, gpus: int, ranks: list[int]) -> None:
    """Defaults of both roles end at the GPUs that there are; what was asked for does not."""
    file = tmp_path / "c.yaml"
    file.write_text(f"target: sm_103a\ngpus: {gpus}\n")
    found = json.loads(run("--roles", "--cluster", str(file), "--json"))
    assert [each["ranks"] for each in found["instances"]] == ranks
    assert f"no pair of instances fits on c ({gpus} GPUs)" in run("--roles", "--cluster", str(file))
    assert f"8 ranks on c, allowed: 1 to {gpus}" in run("--roles", "--cluster", str(file), "--prefill", "8", status=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--roles", "--ranks", "8"), "--ranks 8 with --roles, allowed: --prefill and --decode"),
        (("--input", "8k"), "--input 8k, allowed: only with --roles"),
        (("--per-user", "8"), "--per-user 8.0, allowed: only with --roles"),
        (("--roles", "--batch", "8,9"), "batch: '8,9' with --roles, allowed: one size"),
        (("--roles", "--model", "v4-flash"), "model 'v4-flash' with --roles, allowed: a DeepSeek-V4.1"),
        (("--roles", "--batch", "8", "--per-user", "9"), "allowed: either a batch or per_user"),
        (("--roles", "--input", "1m"), "input + output: 1048576 + 1024, allowed: <= 1048576"),
        (("--roles", "--decode", "128"), "128 ranks on gb300-nvl72, allowed: 1 to 72"),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, ...], words: str) -> None:
    if "v4-flash" in arguments:
        pytest.importorskip("transformers")
    assert words in run(*arguments, status=2)
