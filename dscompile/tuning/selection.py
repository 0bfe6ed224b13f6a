"""Which config a call gets: from the databases if they know it, else the one that the template names first."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from dscompile import compat
from dscompile.ops import NAMESPACE
from dscompile.targets import Target
from dscompile.templates.triton.record import Config, TritonTemplate
from dscompile.tuning.database import Database, Key, Record, bucket, distance, shipped_paths, user_path


def key_of(template: TritonTemplate, sizes: Mapping[str, Any], dtypes: str, target: Target, driver: str = "") -> Key:
    """What records of this call are filed under."""
    op = template.op.removeprefix(f"{NAMESPACE}::")
    version = compat.version_text("triton") or ""
    return Key(template.name, source_hash(template), op, bucket(sizes), dtypes, target.name, version, driver)


def dtypes_of(args: tuple[Any, ...]) -> str:
    """Of the arguments that are tensors or None, in order; "-" for None."""
    shown = (a for a in args if a is None or isinstance(a, torch.Tensor))
    return ",".join("-" if a is None else str(a.dtype).removeprefix("torch.") for a in shown)


@functools.cache
def source_hash(template: TritonTemplate) -> str:
    """Of the template's module and of every module of the package that it takes functions from."""
    modules = sorted(_sources(sys.modules[template.fn.__module__]), key=lambda module: module.__name__)
    text = "\n".join(inspect.getsource(module) for module in modules)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sources(module: ModuleType) -> set[ModuleType]:
    package = module.__name__.rsplit(".", 1)[0]
    found: set[ModuleType] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found.add(current)
        for value in vars(current).values():
            home = getattr(value, "__module__", None) or getattr(getattr(value, "fn", None), "__module__", None)
            if isinstance(home, str) and home.startswith(f"{package}."):
                todo.append(sys.modules[home])
    return found


@functools.cache
def databases() -> tuple[Database, ...]:
    """The user's, then the shipped ones; opened at the first question."""
    found = [Database(user_path())] if user_path().is_file() else []
    for path in shipped_paths():
        database = Database(None)
        database.load(path)
        found.append(database)
    return tuple(found)


def records_fingerprint(target: Target) -> str:
    """16 hex digits over every record for a target: processes with equal ones choose the same configs."""
    lines = sorted(str(record) for database in databases() for record in database.records(target=target.name))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def best_record(key: Key) -> Record | None:
    """A measured record of any database before a modelled one; the user's before the shipped.

    Where no database has one for this key, a modelled one of another release of Triton: shipped records are made with
    one release, and the order of configs seldom changes between them. Its key says which.
    """
    found = [record for database in databases() if (record := database.best(key)) is not None]
    if found:
        return min(found, key=lambda record: record.kind != "measured")
    others = [record for database in databases() if (record := database.nearest(key)) is not None]
    return min(others, key=lambda record: distance(record.key, key) or (0, 0), default=None)


def select(
    template: TritonTemplate, sizes: Mapping[str, Any], dtypes: str, target: Target
) -> tuple[Config | None, str]:
    """(config, where it is from). None if no config passes the template's checks."""
    space = template.space(sizes, target)
    if not space:
        return None, "no config passes its checks"
    key = key_of(template, sizes, dtypes, target)
    record = best_record(key)
    if record is not None:
        for config in space:
            if str(config) == record.config:
                return config, _where(record, key)
    return space[0], "first of the template"


def _where(record: Record, key: Key) -> str:
    """`measured`, `modelled`, or `modelled with Triton 3.9.0` of a record made with another release."""
    return record.kind if record.key.triton == key.triton else f"{record.kind} with Triton {record.key.triton}"
