"""Which config a call gets, and what a change of a kernel's source does to what was known about it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dscompile.lowering.template import triton_templates
from dscompile.targets import get_target
from dscompile.templates.triton import rms_norm as module
from dscompile.templates.triton.rms_norm import TEMPLATES
from dscompile.tuning import selection
from dscompile.tuning.database import Database, Record
from dscompile.tuning.selection import dtypes_of, key_of, select, source_hash

TEMPLATE, TARGET = TEMPLATES[0], get_target("sm_103a")
SIZES = {"N": 8, "D": 512, "x_bytes": 2, "weight_bytes": 4}
DTYPES = "bfloat16,float32"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Database]:
    """The user's database, and no other."""
    monkeypatch.setenv("DSCOMPILE_TUNING", str(tmp_path / "mine"))
    monkeypatch.setattr(selection, "shipped_paths", list)
    database = Database(tmp_path / "mine")
    cached = selection.databases
    cached.cache_clear()
    yield database
    cached.cache_clear()


def put(database: Database, config: str, time_us: float, kind: str = "modelled", triton: str = "") -> None:
    key = key_of(TEMPLATE, SIZES, DTYPES, TARGET)
    database.put([Record(replace(key, triton=triton or key.triton), config, time_us, kind)])


def chosen() -> tuple[str, str]:
    config, why = select(TEMPLATE, SIZES, DTYPES, TARGET)
    return str(config), why


def test_what_the_database_knows_is_taken(mine: Database) -> None:
    first, why = select(TEMPLATE, SIZES, DTYPES, TARGET)
    assert first == TEMPLATE.space(SIZES, TARGET)[0] and why == "first of the template"
    put(mine, "warps=8 stages=2", 3.0)
    config, why = select(TEMPLATE, {**SIZES, "N": 7}, DTYPES, TARGET)  # the same bucket
    assert str(config) == "warps=8 stages=2" and why == "modelled"
    put(mine, "warps=1 stages=2", 9.0, "measured")
    assert [str(part) for part in select(TEMPLATE, SIZES, DTYPES, TARGET)] == ["warps=1 stages=2", "measured"]
    for other in (({**SIZES, "D": 1024}, DTYPES, TARGET), (SIZES, "float16,float32", TARGET),
                  (SIZES, DTYPES, get_target("sm_90a"))):  # fmt: skip
        assert select(TEMPLATE, *other)[1] == "first of the template"


def test_a_config_that_is_no_longer_in_the_space_is_ignored(mine: Database) -> None:
    put(mine, "warps=64 stages=9", 1.0)
    assert select(TEMPLATE, SIZES, DTYPES, TARGET)[1] == "first of the template"


def test_measured_records_of_any_database_come_first(mine: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Database(None)
    put(shipped, "warps=2 stages=2", 5.0, "measured")
    put(mine, "warps=8 stages=2", 1.0)
    monkeypatch.setattr(selection, "databases", lambda: (mine, shipped))
    assert str(select(TEMPLATE, SIZES, DTYPES, TARGET)[0]) == "warps=2 stages=2"


def test_another_release_of_triton_is_the_second_choice(mine: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modelled with the nearest release, and said so; anything of this release comes first, however slow."""
    monkeypatch.setattr(selection.compat, "version_text", lambda name: "3.7.1")
    put(mine, "warps=2 stages=2", 1.0, "measured", "3.8.0")
    assert chosen()[1] == "first of the template"  # measured with another release: not asked
    put(mine, "warps=16 stages=2", 1.0, triton="3.9.0")
    assert chosen() == ("warps=16 stages=2", "modelled with Triton 3.9.0")
    shipped = Database(None)
    monkeypatch.setattr(selection, "databases", lambda: (mine, shipped))
    put(shipped, "warps=8 stages=2", 7.0, triton="3.8.0")
    put(shipped, "warps=4 stages=2", 6.0, triton="3.8.0+git1")
    assert chosen() == ("warps=4 stages=2", "modelled with Triton 3.8.0+git1")
    put(shipped, "warps=1 stages=2", 1.0, triton="unknown")  # no release: no distance to it
    assert chosen()[0] == "warps=4 stages=2"
    put(shipped, "warps=8 stages=2", 99.0)
    assert chosen() == ("warps=8 stages=2", "modelled")
    put(shipped, "warps=1 stages=2", 99.0, "measured")
    assert chosen() == ("warps=1 stages=2", "measured")


def test_the_nearest_release() -> None:
    """By number; of two as far away the newer. Other targets and sources stay what they are: unknown."""
    database, key = Database(None), key_of(TEMPLATE, SIZES, DTYPES, TARGET)
    for release, config in (("3.6.0", "a"), ("3.8.0", "b"), ("4.0.0", "c")):
        put(database, config, 5.0, triton=release)

    def nearest(**changes: str) -> str | None:
        record = database.nearest(replace(key, **changes))
        return None if record is None else record.config

    assert [nearest(triton=r) for r in ("3.5.0", "3.6.9", "3.7.0", "3.8.1", "3.9.0", "5.0")] == list("aabbbc")
    assert nearest(triton="3.8.0", target="sm_90a") is None and nearest(triton="3.8.0", source_hash="other") is None


def test_a_source_is_known_by_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's own module and the device functions that it calls; every template has a hash."""
    before = source_hash(TEMPLATE)
    real = selection.inspect.getsource
    monkeypatch.setattr(selection.inspect, "getsource", lambda m: real(m) + ("#" if m is module else ""))
    source_hash.cache_clear()
    assert source_hash(TEMPLATE) != before
    monkeypatch.undo()
    source_hash.cache_clear()
    templates = {t.name: t for found in triton_templates().values() for t in found}
    writer = templates["norm_rope_store"]
    names = {m.__name__.rsplit(".", 1)[1] for m in selection._sources(__import__("sys").modules[writer.fn.__module__])}
    assert {"store", "formats", "launching"} <= names and "sparse_attention" not in names
    assert len({source_hash(t) for t in templates.values()}) > 5


def test_dtypes() -> None:
    assert dtypes_of((torch.empty(1), None, 3, torch.empty(1, dtype=torch.uint8), "x")) == "float32,-,uint8"
