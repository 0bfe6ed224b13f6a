"""What the cases share: models compiled with the backend `dsv4`, graphs run without Inductor, reports kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dscompile.report import Report, collect


class Compiled:
    """`model` compiled with `backend="dsv4"`; `report` holds every graph that came of it, in order.

    The rewritten and lowered graphs run operation by operation: Inductor is switched off unless `options` says so.
    """

    def __init__(self, model: Callable[..., Any], dynamic: bool | None, options: dict[str, Any]) -> None:
        self.report = Report()
        self._run = torch.compile(model, backend="dsv4", dynamic=dynamic, options={"inductor": False, **options})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with collect() as report:
            try:
                return self._run(*args, **kwargs)
            finally:
                self.report.graphs += report.graphs

    @property
    def counts(self) -> dict[str, int]:
        """Matches per family in the latest graph."""
        return self.report.counts()


@pytest.fixture(scope="session")
def dsv4() -> Callable[..., Compiled]:
    """dsv4(model, dynamic=None, **options) compiles with the backend."""

    def compiled(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Compiled:
        return Compiled(model, dynamic, options)

    return compiled


@pytest.fixture(autouse=True)
def inference() -> Any:
    """Tests run without gradients unless they say otherwise."""
    with torch.no_grad():
        yield
