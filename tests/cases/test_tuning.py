"""R25: a config is found by running a kernel many times, and what it updates in place must not show it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dscompile.lowering.template import triton_templates
from dscompile.ops import OPS
from dscompile.targets import get_target
from dscompile.templates.triton.record import config
from dscompile.tuning import measure
from dscompile.tuning.build import Job
from dscompile.tuning.calls import Call, TensorSpec
from dscompile.tuning.database import Database
from dscompile.tuning.inputs import make_inputs
from dscompile.tuning.measure import Measurer, check
from dscompile.tuning.tune import tune_measured

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = get_target("sm_103a")


def store(rows: int) -> Call:
    """Rows into a ring, in place."""
    pool, new = TensorSpec((33, 8), (8, 1), torch.float32), TensorSpec((rows, 8), (8, 1), torch.float32)
    return Call("store_rows", (pool, new, TensorSpec((rows,), (1,), torch.int64)))


def test_checking_a_config_leaves_the_cache_as_it_was() -> None:
    args = make_inputs(store(4))
    before = args[0].clone()
    for _ in range(3):
        check("store_rows", lambda given: OPS["store_rows"].reference(*given), args)
    assert torch.equal(args[0], before)


def test_a_config_that_reads_what_it_wrote_never_wins() -> None:
    """It adds to the row instead of replacing it: right on a fresh ring of zeros alone, wrong from then on."""

    def accumulate(given: tuple[Any, ...]) -> Any:
        pool, new, slots = given
        pool[slots] = pool[slots] + new
        return None

    with pytest.raises(measure.WrongResultError, match="store_rows: value"):
        check("store_rows", accumulate, make_inputs(store(4)))


def test_measuring_gets_arguments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is run how often, it is on tensors that no model holds: each job makes its own, and none is returned."""
    seen: list[tuple[Any, ...]] = []

    def time_it(self: Measurer, run: Any, copies: list[tuple[Any, ...]]) -> float:
        seen.extend(copies)
        assert len({copy[0].data_ptr() for copy in copies}) == len(copies) >= 2
        return 1.0

    monkeypatch.setattr(Measurer, "_time", time_it)
    monkeypatch.setattr(measure, "check", lambda *rest: None)
    job, database = Job(store(4), "store_rows", config(4)), Database(None)
    measurer = Measurer(TARGET, torch.device("cpu"))
    outcomes = list(tune_measured([job, job], TARGET, database, "580", "none", measurer))
    assert all(outcome.record is not None for outcome in outcomes)
    assert len({copy[0].data_ptr() for copy in seen}) == len(seen)


def test_nothing_is_tuned_while_a_model_runs() -> None:
    """The first call of a kernel is like the tenth: which config it gets is looked up, and no kernel tunes itself."""
    assert triton_templates()
    for path in sorted((ROOT / "templates").rglob("*.py")):
        text = path.read_text()
        assert "autotune" not in text and "do_bench" not in text, path
