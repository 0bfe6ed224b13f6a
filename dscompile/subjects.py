"""Finding what the command line should compile: a built-in miniature or a function in the user's file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from dscompile.miniatures import MINIATURES, Call

_RETURNS = "it must return (callable, args) or (callable, args, kwargs)"


class SubjectError(ValueError):
    """The text names nothing that can be compiled; the message says what was looked for and what is allowed."""


def load_call(subject: str, tokens: int) -> Call:
    """What `subject` stands for: the name of a miniature, or `path/file.py:function`.

    The function is called without arguments; its file's folder is put on `sys.path` first, as Python does for scripts.
    """
    if subject in MINIATURES:
        return MINIATURES[subject](tokens)
    path_text, colon, name = subject.rpartition(":")
    if not colon or not path_text or not name.isidentifier():
        raise SubjectError(f"cannot compile {subject!r}; allowed: {', '.join(MINIATURES)} or path/file.py:function")
    path = Path(path_text)
    if not path.is_file():
        raise SubjectError(f"no file {path_text!r} (of {subject!r})")
    function = getattr(_load_file(path), name, None)
    if not callable(function):
        raise SubjectError(f"{path_text} has no function {name!r}")
    return _as_call(function(), subject)


def _load_file(path: Path) -> Any:
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SubjectError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickling look their module up
    spec.loader.exec_module(module)
    return module


def _as_call(result: Any, subject: str) -> Call:
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise SubjectError(f"{subject} returned {type(result).__name__}; {_RETURNS}")
    function, args, kwargs = (*result, {}) if len(result) == 2 else result
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise SubjectError(f"{subject} returned args of type {type(args).__name__}; {_RETURNS}")
    return function, tuple(args), kwargs
