"""What a compiler sees: one short chain for every shape, nothing but the input, the same bits when compiled."""

from collections.abc import Callable

import pytest
import torch
from formats.oracle import bits
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dscompile.formats import FORMATS

RELEASE = ["fp8_g32_ue8m0", "fp4_g16_e4m3", "fp4_g32_ue8m0"]


def chain(fn: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """Names of the ATen operations of fn; fails on anything that is not the input or a call."""
    graph = make_fx(fn)(x).graph
    kinds = {node.op for node in graph.nodes}
    assert kinds <= {"placeholder", "call_function", "output"}, kinds
    # `detach` follows every view of another dtype; it says nothing.
    calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in calls if name != "aten.detach.default"]


def functions(name: str) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Each traced function with the maker of its argument from x."""
    fmt = FORMATS[name]
    return {
        "pack": (lambda x: fmt.pack(x), lambda x: x),
        "fake_quant": (lambda x: fmt.fake_quant(x), lambda x: x),
        "unpack": (lambda rows: fmt.unpack(rows, 64, torch.bfloat16), fmt.pack),
    }


@pytest.mark.parametrize("name", RELEASE)
@pytest.mark.parametrize("function", ["pack", "fake_quant", "unpack"])
def test_the_chain_does_not_depend_on_the_shape(name: str, function: str) -> None:
    fn, argument = functions(name)[function]
    shapes = [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 64), (0, 64)]
    chains = [chain(fn, argument(torch.randn(shape, dtype=torch.bfloat16))) for shape in shapes]
    assert all(c == chains[0] for c in chains)


@pytest.mark.parametrize(
    ("name", "function", "length"),
    [
        ("fp8_g32_ue8m0", "pack", 19),
        ("fp8_g32_ue8m0", "fake_quant", 17),
        ("fp8_g32_ue8m0", "unpack", 18),
        ("fp4_g16_e4m3", "pack", 36),
        ("fp4_g16_e4m3", "fake_quant", 22),
        ("fp4_g16_e4m3", "unpack", 25),
        ("fp4_g32_ue8m0", "pack", 38),
        ("fp4_g32_ue8m0", "fake_quant", 23),
        ("fp4_g32_ue8m0", "unpack", 32),
    ],
)
def test_the_chain_stays_short(name: str, function: str, length: int) -> None:
    fn, argument = functions(name)[function]
    assert len(chain(fn, argument(torch.randn(2, 3, 64, dtype=torch.bfloat16)))) == length


ROWS = [name for name, fmt in FORMATS.items() if fmt.page.order == "rows"]


@pytest.mark.parametrize("name", ROWS)
def test_traced_with_symbolic_sizes(name: str) -> None:
    """Only sizes besides the input, also with dynamic=True; no float of a record becomes an input."""
    fmt = FORMATS[name]
    dim = 2 * max(fmt.group, 2) + fmt.tail
    seen: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _example: list[Tensor]) -> Callable[..., object]:
        seen.append(gm)
        return gm.forward

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = FORMATS[name].pack(x)
        return rows, fmt.unpack(rows, dim), fmt.fake_quant(x)

    torch._dynamo.reset()  # every case compiles the same code
    compiled = torch.compile(both, backend=backend, fullgraph=True, dynamic=True)
    for lead in ((2, 3), (4, 5)):
        x = torch.randn(*lead, dim)
        for got, right in zip(compiled(x), both(x)):
            assert torch.equal(bits(got), bits(right))
    (gm,) = seen
    inputs = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
    assert not any(isinstance(value, float | torch.SymFloat) for value in inputs)
    assert not any(node.op == "get_attr" for node in gm.graph.nodes)


@pytest.mark.slow
def test_compiled_by_inductor_bit_for_bit() -> None:
    """The sign and the codes of a NaN's group are free; everything else equals eager, bf16 and float32 input alike."""
    names = [*RELEASE, "fp8_g128_fp32"]
    x = torch.randn(6, 128) * torch.logspace(-30, 30, 6)[:, None]
    x[0, :64], x[1, 3], x[4, 100] = -0.0, float("inf"), float("nan")

    def everything(x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        out = []
        for name in names:
            rows = FORMATS[name].pack(x)
            out.append((rows, FORMATS[name].unpack(rows, 128, torch.bfloat16), FORMATS[name].fake_quant(x)))
        return out

    compiled = torch.compile(everything, fullgraph=True)
    for dtype in (torch.bfloat16, torch.float32):
        for name, right, got in zip(names, everything(x.to(dtype)), compiled(x.to(dtype))):
            clean = [0, 2, 3, 5]
            assert torch.equal(right[0][clean], got[0][clean]), name
            for a, b in zip(right[1:], got[1:]):
                assert torch.equal(a.isnan(), b.isnan()), name
                assert torch.equal(bits(a.nan_to_num(nan=1.0)), bits(b.nan_to_num(nan=1.0))), name
