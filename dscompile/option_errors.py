"""How options say that a value is not allowed."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any, NoReturn


class OptionError(ValueError):
    """An unknown option or a value that is not allowed. The message names the option, the value and what is allowed."""


def reject(name: str, value: Any, allowed: str) -> NoReturn:
    raise OptionError(f"option {name!r} is {value!r} ({type(value).__name__}); allowed: {allowed}")


def listed(names: Collection[str]) -> str:
    return ", ".join(names) if names else "(none)"


def hint(name: Any, known: Collection[str]) -> str:
    """The closest known name, as the middle of an error message; nothing if none is close."""
    close = difflib.get_close_matches(str(name), [*known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}" if close else ""
