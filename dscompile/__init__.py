"""dscompile: a torch.compile backend that recognises DeepSeek-V4 and V4.1 mathematics.

`torch.compile(model, backend="dsv4")` needs no import of this package. What is here is for looking inside:
`explain`, `collect`, `last_report`, `mark_regions` and `Options`; and `shard_experts` and `mark_batch` for experts
spread over ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dscompile.distributed.sharding import shard_experts
    from dscompile.explaining import explain
    from dscompile.halves import mark_batch
    from dscompile.options import Options
    from dscompile.regions import mark_regions
    from dscompile.report import Report, collect, last_report

__all__ = ["Options", "Report", "collect", "explain", "last_report", "mark_batch", "mark_regions", "shard_experts"]

_HOME = {
    "Options": "options",
    "Report": "report",
    "collect": "report",
    "explain": "explaining",
    "last_report": "report",
    "mark_batch": "halves",
    "mark_regions": "regions",
    "shard_experts": "distributed.sharding",
}


def __getattr__(name: str) -> Any:
    """Loads what it hands out: importing the package alone does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'dscompile' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dscompile.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
