"""What the command line prints of errors: one line where the user can mend them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import typer
from rich.console import Console

err = Console(stderr=True)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Prints what the user can mend (a wrong option, a missing extra, a strict miss) without a stack, exit status 2."""
    try:
        yield
    except Exception as error:
        for cause in causes(error):
            if type(cause).__module__.startswith("dscompile."):
                err.print(
                    f"{type(cause).__name__}: {cause}", style="red", markup=False, highlight=False, soft_wrap=True
                )
                raise typer.Exit(2) from None
        raise


class ModelFailure(RuntimeError):
    """The user's model raised while it was captured or run."""


@contextlib.contextmanager
def failures_of_the_model(subject: str) -> Iterator[None]:
    """One line for what the model itself raises; DSCOMPILE_TRACEBACK=1 shows the whole stack."""
    before = logging.root.manager.disable
    if not os.environ.get("DSCOMPILE_TRACEBACK"):
        logging.disable(logging.ERROR)  # torch logs a stack of its own before it raises
    try:
        yield
    except Exception as error:
        ours = any(type(cause).__module__.startswith("dscompile.") for cause in causes(error))
        if ours or os.environ.get("DSCOMPILE_TRACEBACK"):
            raise
        places = [line.strip() for line in str(error).splitlines() if line.strip().startswith("File ")]
        cause = [*causes(error)][-1]
        said = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}".rstrip(": ")
        hint = "run it eagerly to find out more, or set DSCOMPILE_TRACEBACK=1 for the whole stack"
        where = f" ({places[-1]})" if places else ""
        raise ModelFailure(f"{subject} failed when it was called{where}: {said}; {hint}") from error
    finally:
        logging.disable(before)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from; Dynamo wraps what a backend raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
