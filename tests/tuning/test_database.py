"""The tuning database: what is found, what survives damage, other processes and other files."""

import json
import multiprocessing
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dscompile.tuning.database import Database, DatabaseError, Key, Record, bucket, shipped_paths, user_path

KEY = Key("rms_norm", "abc", "rms_norm", bucket({"N": 8, "D": 512}), "bfloat16", "sm_103a", "3.9.0")


def record(config: str, time_us: float, kind: str = "modelled", key: Key = KEY, **rest: object) -> Record:
    return Record(key, config, time_us, kind, **rest)  # type: ignore[arg-type]


def test_the_quickest_wins_and_measured_beats_modelled(tmp_path: Path) -> None:
    database = Database(tmp_path / "t.sqlite3")
    assert database.best(KEY) is None
    database.put([record("a", 3.0), record("b", 2.0)])
    assert database.best(KEY) == record("b", 2.0)
    database.put([record("c", 9.0, "measured", replace(KEY, driver="580.1"), device="H200")])
    best = database.best(KEY)
    assert best is not None and best.config == "c"
    for name in ("template", "source_hash", "op", "sizes", "dtypes", "target", "triton"):
        assert database.best(replace(KEY, **{name: "other"})) is None


def test_a_newer_record_takes_the_place_of_an_older(tmp_path: Path) -> None:
    database = Database(tmp_path / "t.sqlite3")
    database.put([record("a", 3.0, when=1.0)])
    database.put([record("a", 5.0, when=2.0)])
    assert [r.time_us for r in database.records()] == [5.0]
    assert database.known(KEY, "modelled") == {"a"} and database.known(KEY, "measured") == set()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_buckets(n: int, m: int) -> None:
    """Sizes within a power of two share one, widths never do."""
    same = (n == m) or (n > 0 and m > 0 and (n - 1).bit_length() == (m - 1).bit_length())
    assert (bucket({"N": n, "D": 512}) == bucket({"D": 512, "N": m})) == same
    assert (bucket({"D": n}) == bucket({"D": m})) == (n == m)


def _write(path: str, number: int) -> None:
    database = Database(path)
    for step in range(20):
        database.put([record(f"{number}-{step}", 1.0 + step)])


def test_many_processes_write_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "t.sqlite3")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write, args=(path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list(Database(path).records())) == 80


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite3"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.warns(UserWarning, match=r"t\.sqlite3 is damaged .* it was moved to .*corrupt-"):
        database = Database(path)
    database.put([record("a", 1.0)])
    assert len(list(tmp_path.glob("*.corrupt-*"))) == 1
    assert Database(path).best(KEY) == record("a", 1.0)


def test_a_file_that_cannot_be_opened_leaves_results_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be used.*DSCOMPILE_TUNING"):
        database = Database(tmp_path / "file" / "t.sqlite3")
    database.put([record("a", 1.0)])
    assert database.best(KEY) is not None
    newer = sqlite3.connect(tmp_path / "newer.sqlite3")
    newer.execute("PRAGMA user_version = 99")
    newer.commit()
    newer.close()
    with pytest.warns(UserWarning, match="made by another version.*schema 99"):
        Database(tmp_path / "newer.sqlite3")
    assert sqlite3.connect(tmp_path / "newer.sqlite3").execute("PRAGMA user_version").fetchone() == (99,)


def test_files_and_other_databases(tmp_path: Path) -> None:
    one, two = Database(tmp_path / "1"), Database(tmp_path / "2")
    one.put([record("a", 1.0, when=5.0), record("b", 2.0)])
    two.put([record("a", 9.0, when=4.0), record("c", 3.0)])
    assert one.merge(two) == 1  # what is older does not come back
    assert {(r.config, r.time_us) for r in one.records()} == {("a", 1.0), ("b", 2.0), ("c", 3.0)}
    assert one.export(tmp_path / "all.jsonl") == 3
    fresh = Database(None)
    assert fresh.load(tmp_path / "all.jsonl") == 3
    assert list(fresh.records()) == list(one.records())
    assert one.export(tmp_path / "best.jsonl", best=True) == 1
    best = Database(None)
    best.load(tmp_path / "best.jsonl")
    assert list(best.records()) == [next(one.records())]


@pytest.mark.parametrize("line", ["{", "[]", '{"key": {}}', json.dumps({"key": {"x": 1}, "config": "a"})])
def test_files_with_something_else_are_refused_whole(tmp_path: Path, line: str) -> None:
    good, path = Database(None), tmp_path / "bad.jsonl"
    good.put([record("a", 1.0)])
    good.export(path)
    path.write_text(path.read_text() + line + "\n")
    database = Database(None)
    with pytest.raises(DatabaseError, match=r"bad\.jsonl, line 2 is no tuning record"):
        database.load(path)
    assert list(database.records()) == []
    with pytest.raises(DatabaseError, match="cannot read"):
        database.load(tmp_path / "none")


def test_records_say_what_they_are() -> None:
    with pytest.raises(ValueError, match="kind is 'guessed', allowed: measured, modelled"):
        record("a", 1.0, "guessed")
    with pytest.raises(ValueError, match="time_us is nan"):
        record("a", float("nan"))
    with pytest.raises(ValueError, match="unknown column 'speed'"):
        list(Database(None).records(speed="1"))


def test_the_users_file_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSCOMPILE_TUNING", str(tmp_path / "mine"))
    assert user_path() == tmp_path / "mine"
    monkeypatch.delenv("DSCOMPILE_TUNING")
    assert user_path().name == "tuning.sqlite3"
    assert all(path.suffix == ".jsonl" for path in shipped_paths())


def test_threads_share_a_database(tmp_path: Path) -> None:
    database = Database(tmp_path / "shared.sqlite3")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: database.put([record(f"c{n}", 1.0 + n)]), range(40)))
        counts = list(pool.map(lambda _: len(list(database.records())), range(8)))
    assert counts == [40] * 8


def test_damage_that_shows_late_is_set_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "late.sqlite3"
    first = Database(path)
    first.put([record(f"c{n}", 1.0) for n in range(200)])
    first._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    first.close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\x55" * (len(content) - 4096))
    database = Database(path)
    with pytest.warns(UserWarning, match="is damaged"):
        assert list(database.records()) == []
    database.put([record("a", 1.0)])
    assert len(list(database.records())) == 1 and list(tmp_path.glob("late.sqlite3.corrupt-*"))


def test_other_people_s_files_are_left_alone(tmp_path: Path) -> None:
    """A table of another kind, and a file that has not even the name of a database."""
    foreign = sqlite3.connect(tmp_path / "foreign.sqlite3")
    foreign.execute("CREATE TABLE records (title TEXT)")
    foreign.commit()
    foreign.close()
    (tmp_path / "letter.txt").write_text("Dear reader, " * 500)
    for name, words in (("foreign.sqlite3", "has the columns title"), ("letter.txt", "cannot be used")):
        before = (tmp_path / name).read_bytes()
        with pytest.warns(UserWarning, match=words):
            database = Database(tmp_path / name)
        database.put([record("a", 1.0)])
        assert len(list(database.records())) == 1 and (tmp_path / name).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign.sqlite3", "letter.txt"]


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatabaseError, match=r"bytes\.jsonl is no file of tuning records"):
        Database(None).load(tmp_path / "bytes.jsonl")
    with pytest.raises(DatabaseError, match="cannot write"):
        Database(None).export(tmp_path / "none" / "x.jsonl")
