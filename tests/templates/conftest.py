"""Running a template with its way back to the reference closed, so that a test cannot pass by comparing a thing with
itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dscompile.ops import OPS
from dscompile.templates.cpu import (
    compress,
    engram,
    experts,
    gather,
    hc,
    index_topk,
    linear,
    native,
    norm,
    router,
    rows,
)
from dscompile.templates.cpu import sparse_attention as attention

MODULES = (attention, compress, engram, experts, gather, hc, index_topk, linear, norm, router, rows)


class Closed(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise AssertionError(f"the template of {name} fell back to the reference")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`fast(template, *args)`: the result of the kernel itself; a fall back fails the test."""
    if native.compiler() is None:
        pytest.skip("no C++ compiler")

    def run(template: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, "OPS", Closed())
            return template(*args)

    return run


@pytest.fixture
def reference() -> Callable[..., Any]:
    """`reference(name, *args)`: what the op means."""
    return lambda name, *args: OPS[name].reference(*args)


@pytest.fixture
def check(fast: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`check(template, *args)`: the kernel equals the reference within the rounding of the coarsest argument."""

    def run(template: Callable[..., Any], *args: Any, name: str | None = None, **tolerance: float) -> Any:
        got, want = fast(template, *args), reference(name or template.__name__, *args)
        dtypes = [a if isinstance(a, torch.dtype) else getattr(a, "dtype", None) for a in args]
        coarsest = max((TOLERANCE[d] for d in dtypes if d in TOLERANCE), key=lambda limit: limit["rtol"])
        for have, need in zip(as_tuple(got), as_tuple(want), strict=True):
            limits = tolerance or (coarsest if need.dtype in TOLERANCE else {"rtol": 0, "atol": 0})
            torch.testing.assert_close(have, need, equal_nan=True, **limits)
            assert have.is_contiguous() or have.numel() == 0
        return got

    return run


# A result may be rounded the other way where fp32 sums differ in their last bits: two steps of its dtype.
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
