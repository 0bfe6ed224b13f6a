"""What would be recognised in a model, without waiting for Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dscompile.report import Report, collect


def explain(
    model: Callable[..., Any],
    *example_inputs: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compiles and runs `model(*example_inputs, **kwargs)` once and says what was recognised, layer by layer.

    The call really happens: what the model writes to (caches) is written. It runs without gradients, and without
    Inductor unless `options` says `{"inductor": True}`.

    Args:
        model: a module or function; it is compiled from scratch whatever was compiled before.
        options: fields of `dscompile.options.Options`.
        dynamic: as for `torch.compile`.

    Returns:
        The report; `print` it, or see `Report.to_json`, `to_html`, `write`, `counts` and `misses`.

    Raises:
        What the backend raises: `OptionError`, and `StrictError` with `options={"strict": True}`.
    """
    from dscompile.backend import dsv4

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return dsv4(gm, inputs, options={"inductor": False, **(options or {})})

    torch._dynamo.reset()
    try:
        with collect() as report, torch.no_grad():
            torch.compile(model, backend=backend, dynamic=dynamic)(*example_inputs, **kwargs)
    finally:
        torch._dynamo.reset()
    return report
