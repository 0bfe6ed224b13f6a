"""Stores under functionalisation: the pool is written in place, once, and never copied."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

import dscompile.ops  # noqa: F401
from dscompile.ops import OPS

FORMAT = "fp8_g32_ue8m0"


def step(pool: Tensor, plain: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
    """Two stores into one pool, one through a view of the other, each read afterwards."""
    rows = torch.ops.dsv4.norm_rope_store(pool, x, weight, cos, sin, slots, 1e-6, FORMAT)
    torch.ops.dsv4.store_rows(plain[1], x * 2, slots)
    torch.ops.dsv4.store_rows(pool, rows, slots + 4)
    return torch.ops.dsv4.unpack(pool, FORMAT, 64, torch.float32).sum(-1) + plain[1].sum(-1)


def arguments() -> tuple[Tensor, ...]:
    angle = torch.rand(4, 16)
    pool, plain = torch.zeros(12, 66, dtype=torch.uint8), torch.randn(2, 12, 64)
    return pool, plain, torch.randn(4, 64), torch.rand(64), angle.cos(), angle.sin(), torch.tensor([3, -1, 0, 5])


def compare(compiled: Callable[..., Tensor]) -> None:
    args = arguments()
    ours, eager = [a.clone() for a in args], [a.clone() for a in args]
    torch.testing.assert_close(compiled(*ours), step(*eager))
    for have, want in zip(ours, eager, strict=True):
        torch.testing.assert_close(have, want)
    assert not torch.equal(ours[0], args[0]) and not torch.equal(ours[1], args[1])


def test_functionalised_graph_writes_the_same_bytes() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    with torch.no_grad():
        compare(torch.compile(step, backend=aot_autograd(fw_compiler=keep), fullgraph=True))
    names = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert sum("auto_functionalized" in n for n in names) == 3
    assert not any(n in ("dsv4.store_rows.default", "dsv4.norm_rope_store.default") for n in names)


def test_inductor_stores_in_place_without_a_clone_of_the_pool() -> None:
    with torch.no_grad():
        compiled = torch.compile(step, backend="inductor", fullgraph=True)
        _, code = run_and_get_code(compiled, *arguments())
        compare(compiled)
    text = "\n".join(code)
    calls = re.findall(r"torch\.ops\.dsv4\.(?:norm_rope_store|store_rows)\.default\(([^,]+),", text)
    assert len(calls) == 3
    assert all(re.match(r"(reinterpret_tensor\()?arg\d+_1", c) for c in calls), calls
    assert "clone" not in text and "copy_" not in text
    assert not re.search(r"empty_strided_cpu\(\((12, 66|2, 12, 64)\)", text), "a buffer of the pool's size"


def test_eager_store_bumps_the_version_of_the_pool() -> None:
    pool = torch.zeros(4, 8)
    before = pool._version
    torch.ops.dsv4.store_rows(pool, torch.ones(1, 8), torch.tensor([2]))
    assert pool._version > before


@pytest.mark.parametrize("name", ["store_rows", "norm_rope_store"])
def test_only_the_pool_is_declared_mutable(name: str) -> None:
    written = [a.name for a in OPS[name].op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["pool"]
