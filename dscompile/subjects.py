"""Finding what the command line should compile: a built-in miniature or a function in the user's file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
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
    try:
        return _as_call(function(), subject)
    except SubjectError:
        raise
    except Exception as error:
        raise SubjectError(f"{name}() failed{_where(error, path)}: {_said(error)}") from error


def _load_file(path: Path) -> Any:
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SubjectError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickling look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SubjectError(f"{path} cannot be imported{_where(error, path)}: {_said(error)}") from error
    return module


def _where(error: BaseException, path: Path) -> str:
    """` (line 7)`: the last line of the user's file on the way to the error; nothing if it is not on it."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f" (line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    return f" (line {frames[-1].lineno})" if frames else ""


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _as_call(result: Any, subject: str) -> Call:
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise SubjectError(f"{subject} returned {type(result).__name__}; {_RETURNS}")
    function, args, kwargs = (*result, {}) if len(result) == 2 else result
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise SubjectError(f"{subject} returned args of type {type(args).__name__}; {_RETURNS}")
    return function, tuple(args), kwargs
