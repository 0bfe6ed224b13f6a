"""`dscompile build` and `dscompile inspect`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dscompile import compat, workload_models
from dscompile.cli import app
from dscompile.kernel_options import SizeError, sizes
from dscompile.targets import get_target
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.occupancy import occupancy


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "240", "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


def norm(rows: int, width: int) -> Call:
    return Call("rms_norm", (TensorSpec((rows, width), (width, 1), torch.bfloat16), None, 1e-6, "fp32"), 3)


@pytest.fixture
def two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the capture of a model: a call that has a kernel, and one that no template fits."""

    def calls(config: Any, target: str, role: str, shapes: list[tuple[int, int]], *rest: int) -> Iterator[list[Call]]:
        for batch, _ in shapes:
            yield [norm(batch, 1024), norm(batch, 70000)]

    monkeypatch.setattr(workload_models, "workload_calls", calls)


def test_build_and_inspect(two_calls: None, tmp_path: Path) -> None:
    said = run("build", "--model", "v41", "--target", "sm_100a", "--batch", "8,16", "-o", str(tmp_path / "b"))
    assert "1 kernels for sm_100a" in said and "70000" in said and "allowed: 1 to 65536" in said
    (row, other) = json.loads(run("inspect", str(tmp_path / "b"), "--json"))
    assert (row["kernel"], row["op"], row["grid"], row["count"]) == ("rms_norm_kernel", "rms_norm", "8", 3)
    assert other["grid"] == "16" and row["spills"] == 0 and row["loads"].startswith("16B")
    assert row["bound by"] == "memory" and row["floor us"] == pytest.approx(2 * 8 * 1024 * 2 / 8e12 * 1e6, rel=1e-3)
    assert row["blocks/SM"] >= 1 and row["limit"]
    text = run("inspect", str(tmp_path / "b"), "--markdown")
    assert text.startswith("| kernel | op |") and text.count("rms_norm_kernel") == 1  # both uses are one kernel
    table = run("inspect", str(tmp_path / "b"))
    assert "compiled only" in table and "modelled" in table and "rms_norm_kernel" in table


def test_every_config_on_request(two_calls: None, tmp_path: Path) -> None:
    run("build", "--model", "v41", "--target", "sm_100a", "-o", str(tmp_path / "b"), "--every-config", "--jobs", "1")
    rows = json.loads(run("inspect", str(tmp_path / "b"), "--json"))
    assert len(rows) == 5 and len({row["config"] for row in rows}) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "v5"], "'v5' is no file or folder; allowed: v41, v4-flash, v41-miniature, v4-miniature"),
        (["--target", "sm_99"], "unknown target 'sm_99'"),
        (["--target", "cpu"], "'cpu' has no kernels to build; allowed: sm_90a, sm_100a, sm_103a"),
        (["--batch", "8,x"], "size 'x' in '8,x'"),
        (["--context", "0"], "size '0'"),
    ],
)
def test_build_refuses_in_one_line(two_calls: None, tmp_path: Path, arguments: list[str], words: str) -> None:
    given = {"--model": "v41", "--target": "sm_100a", "--output": str(tmp_path / "b")}
    given |= dict([arguments])
    said = run("build", *(part for pair in given.items() for part in pair), status=2)
    assert words in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "holds no configuration"), ('{"model_type": "llama"}', "model_type 'llama', allowed: deepseek_v4, "),
        ('{"model_type": "deepseek_v41", "hidden_size": "abc"}', "is no configuration of DeepSeek-V4.1: "),
    ],
)  # fmt: skip
def test_other_configurations_are_refused_in_one_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    said = run("build", "--model", str(tmp_path), "--target", "sm_100a", "-o", str(tmp_path / "b"), status=2)
    assert words in said and len(said.strip().splitlines()) == 1


def test_sizes_that_a_model_cannot_have(tmp_path: Path) -> None:
    options = ("--model", "v41-miniature", "--target", "sm_100a", "--context", "10m", "-o", str(tmp_path / "b"))
    said = run("build", *options, status=2)
    assert "max_tokens: 10485760, allowed: <= max_position_embeddings" in said
    assert "Traceback" not in said


def test_places_that_cannot_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ("--model", "v41", "--target", "sm_100a")
    for place in ("file", "file/below"):
        said = run("build", *options, "-o", str(tmp_path / place), status=2)
        assert "choose another folder" in said and len(said.strip().splitlines()) == 1
    said = run("tune", *options, "--export", str(tmp_path / "none" / "x.jsonl"), status=2)
    assert "there is no folder" in said


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 1}', '{"format": 1, "target": "sm_90a", "kernels": [1]}'])
def test_damaged_bundles_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    said = run("inspect", str(tmp_path), status=2)
    assert "build it again" in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["build", "tune"])
def test_a_model_of_transformers_needs_transformers(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it is named or a file; the message says what to install."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    monkeypatch.setattr(compat, "EXTRAS", {"transformers": ("no_such_module", "transformers")})
    more = ["-o", str(tmp_path / "b")] if command == "build" else ["--database", str(tmp_path / "d")]
    for model in ("v4-flash", "v4-miniature", str(tmp_path)):
        said = run(command, "--model", model, "--target", "sm_100a", *more, status=2)
        assert "pip install 'dscompile[transformers]'" in said and len(said.strip().splitlines()) == 1


def test_tune_takes_the_same_options(two_calls: None, tmp_path: Path) -> None:
    """Without a GPU of the target: modelled. What is known is not done again."""
    options = ["--model", "v4-miniature", "--target", "sm_100a", "--jobs", "1", "--database", str(tmp_path / "d")]
    said = run("tune", *options, "--export", str(tmp_path / "records"))
    assert "5 configs modelled for sm_100a" in said and "70000" in said
    assert len((tmp_path / "records").read_text().splitlines()) == 5
    assert "0 configs modelled" in run("tune", *options)


def test_inspect_refuses_what_is_no_bundle(tmp_path: Path) -> None:
    assert "make one with `dscompile build`" in run("inspect", str(tmp_path), status=2)


def test_sizes() -> None:
    assert sizes("8, 16,2k,1M") == [8, 16, 2048, 1 << 20]
    for text in ("", "8,", "-1", "1.5k", "k"):
        with pytest.raises(SizeError):
            sizes(text)


def test_occupancy() -> None:
    """Worked by hand: registers in units of 256 a warp, a KiB of shared memory for each block."""
    target = get_target("sm_103a")
    assert occupancy(target, 4, 32, 0).limit == "warps" and occupancy(target, 4, 32, 0).blocks == 16
    registers = occupancy(target, 8, 255, 0)
    assert (registers.blocks, registers.limit, registers.share) == (1, "registers", 8 / 64)
    shared = occupancy(target, 4, 32, 100 * 1024)
    assert (shared.blocks, shared.limit) == (2, "shared memory")
    assert occupancy(target, 1, 16, 0).limit == "blocks" and occupancy(target, 1, 16, 0).blocks == 32
    assert occupancy(target, 4, 64, 0, 256).limit == "tensor memory"
    with pytest.raises(ValueError, match="does not fit on sm_103a"):
        occupancy(target, 16, 255, 0)
    with pytest.raises(ValueError, match="'cpu'"):
        occupancy(get_target("cpu"), 4, 32, 0)


@pytest.mark.slow
def test_every_call_of_a_whole_model_has_a_kernel(tmp_path: Path) -> None:
    """Of the miniatures of V4.1 and V4, prefilling and decoding."""
    for model, role, more in (
        ("v41-miniature", "decode", []), ("v41-miniature", "prefill", ["--tokens", "24"]),
        ("v4-miniature", "decode", []), ("v4-miniature", "prefill", ["--tokens", "24"]),
    ):  # fmt: skip
        folder = tmp_path / model / role
        run(
            "build", "--model", model, "--target", "sm_103a", "--batch", "2", "--context", "64", "-o",
            str(folder), "--role", role, *more,
        )  # fmt: skip
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["failures"] == [] and len(manifest["kernels"]) > 10
