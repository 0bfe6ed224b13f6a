"""CuTe templates: what needs the compiler is skipped, with a reason, where nvidia-cutlass-dsl is not installed."""

from __future__ import annotations

import pytest

from dscompile.compat import has_extra


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if has_extra("gpu"):
        return
    missing = pytest.mark.skip(reason="nvidia-cutlass-dsl is not installed: pip install 'dscompile[gpu]'")
    for item in items:
        if "compiled_" in item.path.name and item.path.parent.name == "cute":
            item.add_marker(missing)
