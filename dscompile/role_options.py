"""The options that say which batches a graph serves, and what of a prompt it may leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dscompile.option_errors import OptionError, hint, listed, reject

if TYPE_CHECKING:
    from dscompile.options import Options

ROLES = ("prefill", "decode", "mixed")
ELISIONS = ("exact", "bounded")


def _one_of(allowed: tuple[str, ...]) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value in allowed):
            return value
        reject(name, value, f"None or one of {listed(allowed)}{hint(value, allowed)}")

    return check


def _tokens(name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        reject(name, value, "None or a number of tokens >= 1")
    return value


ROLE_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "role": _one_of(ROLES),
    "elide": _one_of(ELISIONS),
    "elide_tail": _tokens,
}


def check_roles(options: Options) -> None:
    """Raises OptionError for options that do not go together."""
    if options.elide is not None and options.role != "prefill":
        raise OptionError(
            f"option 'elide' is {options.elide!r} with the role {options.role!r}; allowed: the role 'prefill' (other "
            "batches need the logits of every token)"
        )
    if options.elide_tail is not None and options.elide != "bounded":
        raise OptionError(
            f"option 'elide_tail' is {options.elide_tail} with elide={options.elide!r}; allowed: None, or "
            "elide='bounded' (the exact form computes how many tokens it needs)"
        )
    if options.elide is not None and options.verify:
        raise OptionError(
            f"option 'verify' is True with elide={options.elide!r}; allowed: one of them (the graph before rewriting "
            "has logits for every token, so the two differ on purpose)"
        )
