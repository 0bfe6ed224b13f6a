"""The offline compiler: the target that was asked for, or a message that names kernel, target and cause."""

from types import SimpleNamespace

import pytest
import torch

from dscompile.targets import TARGETS
from dscompile.templates.cute import experts
from dscompile.templates.cute.record import Request
from dscompile.templates.triton.record import config
from dscompile.tuning.cute_offline import compile_request
from dscompile.tuning.offline import OfflineCompileError


def test_code_for_another_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlass import cute

    other = SimpleNamespace(__ptx__=".version 9.4\n.target sm_100a\n", __cubin__=b"")
    monkeypatch.setattr(cute, "compile", lambda *args, **kwargs: other)
    request = Request("rows", lambda: (print, ()), config(1, 1), 32)
    with pytest.raises(OfflineCompileError, match="rows: compiled for sm_100a instead of sm_103a"):
        compile_request(request, TARGETS["sm_103a"])


def test_a_failure_names_kernel_target_and_config() -> None:
    def entry() -> tuple:
        raise RuntimeError("no such layout\nand more")

    with pytest.raises(OfflineCompileError) as caught:
        compile_request(Request("rows", entry, config(2, 1), 64), TARGETS["sm_103a"])
    assert str(caught.value) == "cannot compile rows for sm_103a (warps=2 stages=1): RuntimeError: no such layout"


def test_block_scaled_products_do_not_compile_for_hopper() -> None:
    """`applies` refuses before; this is what the compiler says."""
    meta = {
        "x": torch.empty(8, 512, dtype=torch.bfloat16, device="meta"), "limit": 10.0, "weight_format": "e2m1_1x32",
        "w13": torch.empty(4, 512, 256, dtype=torch.uint8, device="meta"),
    }  # fmt: skip
    _, up, _ = experts.TEMPLATES[0].requests(meta, config(6, 2, BLOCK_T=32), TARGETS["sm_103a"])
    with pytest.raises(OfflineCompileError, match="cannot compile experts_up for sm_90a"):
        compile_request(up, TARGETS["sm_90a"])
