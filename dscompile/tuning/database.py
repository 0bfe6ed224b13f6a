"""Which config of a template is best for a call: an SQLite file of the user's, and read-only files that are shipped.

A record says how it came about: "measured" on a device, or "modelled" from the compiled code. A measured record always
beats a modelled one, whatever the times say.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs

from dscompile import compat

KINDS = ("measured", "modelled")
SCHEMA = 1
SUFFIX = ".sqlite3"  # a damaged file of another name may be no database at all, and is left alone

# Sizes that grow with batch and context: calls that differ in them only within a factor of two share a record.
GROWING = frozenset(("N", "B", "T", "S", "C", "M", "P", "scored"))


class DatabaseError(RuntimeError):
    """A tuning database or an exported file cannot be used; the message names it."""


@dataclass(frozen=True)
class Key:
    """What a record is for.

    template, source_hash: which kernel source. sizes: of the op's cost, as a bucket, see `bucket`. dtypes: of the
    tensor arguments, in order. triton, driver: versions; driver "" for what was modelled.
    """

    template: str
    source_hash: str
    op: str
    sizes: str
    dtypes: str
    target: str
    triton: str
    driver: str = ""


@dataclass(frozen=True)
class Record:
    """A config with its time. device: its name if measured; when: seconds since 1970."""

    key: Key
    config: str
    time_us: float
    kind: str
    device: str = ""
    when: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, allowed: {', '.join(KINDS)}")
        if not self.time_us > 0:
            raise ValueError(f"time_us is {self.time_us!r}, allowed: > 0")


_KEY = tuple(f.name for f in fields(Key))
_REST = ("config", "time_us", "kind", "device", "when")
_COLUMNS = ", ".join(f'"{name}"' for name in (*_KEY, *_REST))


def bucket(sizes: Mapping[str, Any]) -> str:
    """Sizes as text: the growing ones rounded up to a power of two, the others exact. 0 stays 0."""
    found: dict[str, Any] = {}
    for name, value in sizes.items():
        found[name] = 1 << (int(value) - 1).bit_length() if name in GROWING and value > 0 else value
    return json.dumps(found, sort_keys=True)


def user_path() -> Path:
    """Where the user's database is: $DSCOMPILE_TUNING, or a file in the user's data folder."""
    given = os.environ.get("DSCOMPILE_TUNING")
    return Path(given) if given else Path(platformdirs.user_data_path("dscompile")) / "tuning.sqlite3"


def shipped_paths() -> list[Path]:
    """The databases that come with the package."""
    return sorted((Path(__file__).parent / "shipped").glob("*.jsonl"))


def distance(one: Key, other: Key) -> tuple[int, int] | None:
    """How far apart the releases of Triton of two keys are, to be compared only; the newer of two is the closer.

    None where one of them names no release.
    """
    try:
        a, b = (compat.parse_version(key.triton) for key in (one, other))
    except ValueError:
        return None
    number = [(major * 1000 + minor) * 1000 + patch for major, minor, patch in (a, b)]
    return abs(number[0] - number[1]), -number[0]


class Database:
    """A file of records, safe to use from many processes and threads; `path` None is one in memory."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._lock = threading.RLock()
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return _prepared(_connect(":memory:"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return _prepared(_connect(self.path))
        except (sqlite3.DatabaseError, OSError) as error:
            if _damaged(error) and self.path.suffix == SUFFIX:
                return self._set_aside(error)
            warnings.warn(
                f"the tuning database {self.path} cannot be used ({error}); this process keeps its results in memory. "
                "Set DSCOMPILE_TUNING to a file that you can write",
                stacklevel=4,
            )
            return _prepared(_connect(":memory:"))

    def _set_aside(self, error: Exception) -> sqlite3.Connection:
        assert self.path is not None
        aside = self.path.with_name(f"{self.path.name}.corrupt-{int(time.time())}")
        self.path.replace(aside)
        for extra in ("-wal", "-shm"):
            self.path.with_name(self.path.name + extra).unlink(missing_ok=True)
        warnings.warn(
            f"the tuning database {self.path} is damaged ({error}): it was moved to {aside}, a new one begins",
            stacklevel=5,
        )
        return _prepared(_connect(self.path))

    def close(self) -> None:
        self._connection.close()

    def put(self, records: Iterable[Record]) -> None:
        """Add records. One for the same key, config, kind and device replaces the older one."""
        rows = [_row(record) for record in records]
        marks = ", ".join("?" * (len(_KEY) + len(_REST)))
        with self._lock, self._connection as connection:
            connection.executemany(f"INSERT OR REPLACE INTO records ({_COLUMNS}) VALUES ({marks})", rows)

    def records(self, **where: str) -> Iterator[Record]:
        """Every record whose columns have these values, the quickest first. ValueError for an unknown column."""
        for name in where:
            if name not in (*_KEY, *_REST):
                raise ValueError(f"unknown column {name!r}; allowed: {', '.join((*_KEY, *_REST))}")
        condition = " AND ".join(f'"{name}" = ?' for name in where) or "1"
        query = f"SELECT {_COLUMNS} FROM records WHERE {condition} ORDER BY time_us, config"
        for row in self._rows(query, tuple(where.values())):
            yield Record(Key(*row[: len(_KEY)]), *row[len(_KEY) :])

    def _rows(self, query: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """All at once, so that no other thread comes in between. A file that turns out to be damaged is replaced."""
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                if self.path is None or not _damaged(error):
                    raise
                self._connection.close()
                own = self.path.suffix == SUFFIX
                self._connection = self._set_aside(error) if own else _prepared(_connect(":memory:"))
                return []

    def best(self, key: Key) -> Record | None:
        """The quickest config: measured under any driver before modelled."""
        given = {name: value for name, value in asdict(key).items() if name != "driver"}
        for kind in KINDS:
            for record in self.records(**given, kind=kind):
                return record
        return None

    def nearest(self, key: Key) -> Record | None:
        """The quickest modelled config for what differs from `key` only in Triton's release: of the release closest by.

        What was measured with another release says nothing certain about this one's code, so it is not asked.
        """
        given = {name: value for name, value in asdict(key).items() if name not in ("driver", "triton")}
        found = [record for record in self.records(**given, kind="modelled") if distance(record.key, key) is not None]
        return min(found, key=lambda record: distance(record.key, key) or (0, 0), default=None)

    def known(self, key: Key, kind: str) -> set[str]:
        """Configs that have a record of that kind under exactly this key: what an interrupted run need not repeat."""
        return {record.config for record in self.records(**asdict(key), kind=kind)}

    # Files

    def export(self, path: str | Path, best: bool = False) -> int:
        """Write every record as a line of JSON; returns how many. best: of each key only the quickest of each kind."""
        found = list(self.records())
        if best:
            found = list({(record.key, record.kind): record for record in reversed(found)}.values())
        lines = [json.dumps(asdict(record), sort_keys=True) for record in found]
        try:
            Path(path).write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
        except OSError as error:
            raise DatabaseError(f"cannot write {path}: {error.strerror}") from error
        return len(lines)

    def load(self, path: str | Path) -> int:
        """Add the records of an exported file. Raises DatabaseError that names the line; nothing is added then."""
        found = list(read_lines(path))
        self.put(found)
        return len(found)

    def merge(self, other: Database) -> int:
        """Add what `other` has: of two records for the same thing the newer stays."""
        mine = {(r.key, r.config, r.kind, r.device): r.when for r in self.records()}
        new = [r for r in other.records() if r.when >= mine.get((r.key, r.config, r.kind, r.device), -1.0)]
        self.put(new)
        return len(new)


def read_lines(path: str | Path) -> Iterator[Record]:
    """The records of an exported file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DatabaseError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DatabaseError(f"{path} is no file of tuning records: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            yield Record(Key(**content.pop("key")), **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DatabaseError(f"{path}, line {number} is no tuning record: {error}") from error


def _row(record: Record) -> tuple[Any, ...]:
    return (*(getattr(record.key, name) for name in _KEY), *(getattr(record, name) for name in _REST))


def _connect(path: str | Path) -> sqlite3.Connection:
    """Other threads may use it; `Database` lets one at a time."""
    return sqlite3.connect(path, timeout=60, check_same_thread=False)


def _damaged(error: Exception) -> bool:
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    text = {"time_us": "REAL", "when": "REAL"}
    columns = ", ".join(f'"{name}" {text.get(name, "TEXT")} NOT NULL' for name in (*_KEY, *_REST))
    unique = ", ".join(f'"{name}"' for name in (*_KEY, "config", "kind", "device"))
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA):
        raise sqlite3.OperationalError(f"made by another version of dscompile (schema {version}, this one {SCHEMA})")
    there = {row[1] for row in connection.execute("PRAGMA table_info(records)")}
    if there and there != {*_KEY, *_REST}:
        raise sqlite3.OperationalError(f"its table records has the columns {', '.join(sorted(there))}")
    with contextlib.suppress(sqlite3.OperationalError):  # some network file systems have no shared memory
        connection.execute("PRAGMA journal_mode = WAL")
    with connection:
        connection.execute(f"CREATE TABLE IF NOT EXISTS records ({columns}, PRIMARY KEY ({unique}))")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
    return connection
