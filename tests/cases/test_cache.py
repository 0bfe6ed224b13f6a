"""R24: compiled code that is kept on disk is used again for the same settings and for no others.

Every run is a process of its own, all of them with one cache folder, and must equal its own eager model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "support" / "compile_once.py"
# Of the model's fields, what a kernel or a pass could take for granted.
CHANGES: list[dict[str, Any]] = [
    {"index_topk": 4}, {"sliding_window": 16}, {"swiglu_limit": 1.0}, {"routed_scaling_factor": 2.5},
    {"rms_norm_eps": 1e-2}, {"num_experts_per_tok": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """run(fields, options): what one process reports; its result is that of its own eager model."""
    cache = tmp_path_factory.mktemp("inductor")

    def one(fields: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
        command = [sys.executable, str(SCRIPT), json.dumps(fields), json.dumps(options or {})]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert result["error"] < 1e-4, (fields, result)
        return result

    return one


def test_used_again_by_another_process(run: Callable[..., dict[str, Any]]) -> None:
    fields = {"layer_types": ["sliding_attention"]}  # the one with the least to compile
    first, second = run(fields), run(fields)
    assert (first["hits"], first["misses"]) == (0, 1)
    assert (second["hits"], second["misses"]) == (1, 0)
    assert first["logits"] == second["logits"]


@pytest.mark.slow
def test_every_setting_is_part_of_the_key(run: Callable[..., dict[str, Any]]) -> None:
    base = run({})
    for fields in CHANGES:
        changed = run(fields)
        assert changed["misses"] == 1 and changed["logits"] != base["logits"], fields
        assert run(fields)["hits"] == 1, fields
    assert run({})["hits"] == 1  # nothing has taken its place


@pytest.mark.slow
def test_options_count_and_their_order_does_not(run: Callable[..., dict[str, Any]]) -> None:
    run({})
    switched = [("disable", ["share"]), ("inductor_options", {"cpp.threads": 1, "epilogue_fusion": False})]
    assert run({}, dict(switched))["misses"] == 1
    inner = {"epilogue_fusion": False, "cpp.threads": 1}
    assert run({}, {"inductor_options": inner, "disable": ["share"]})["hits"] == 1
    assert run({}, {"disable": ["experts"]})["misses"] == 1
