"""Kernels run in Triton's interpreter: a process of its own, because Triton decides at import what a kernel is."""

import pytest
import torch

from dscompile.targets import Target, get_target
from support import triton_interpreter

triton_interpreter.install()


@pytest.fixture(params=["sm_90a", "sm_103a"])
def target(request: pytest.FixtureRequest) -> Target:
    """The variants of a template that differ between targets all run in the interpreter."""
    return get_target(request.param)


@pytest.fixture(autouse=True)
def inference() -> None:
    torch.set_grad_enabled(False)
