"""Graphs lowered for a GPU, their kernels run in the interpreter."""

import pytest
import torch
from torch import Tensor, nn

import dscompile
from dscompile.lowering.template import triton_templates
from dscompile.ops import OPS
from support.kernels import parameters

TARGETS = ("sm_90a", "sm_100a", "sm_103a")


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(48))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) + x
        return x


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_runs_the_kernels_of_its_target(target: str) -> None:
    model = Norms().eval()
    compiled = torch.compile(model, backend="dsv4", options={"target": target, "inductor": False})
    with dscompile.collect() as report:
        for rows in (3, 5):
            x = torch.randn(rows, 48)
            torch.testing.assert_close(compiled(x), model(x))
    assert report.graphs[0].kernel_counts() == {("dsv4::rms_norm", "rms_norm"): 2}
    assert hasattr(torch.ops.dsv4_triton, f"rms_norm_{target}")


def test_what_no_template_fits_runs_its_reference() -> None:
    """One template refuses rows that are too long; the operation is inlined and the report says why."""

    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.dsv4.rms_norm(x, None, 1e-6, "fp32")

    x = torch.randn(2, 65537)
    with dscompile.collect() as report:
        got = torch.compile(Long(), backend="dsv4", options={"target": "sm_103a", "inductor": False})(x)
    torch.testing.assert_close(got, Long()(x))
    (lowering,) = report.graphs[0].lowerings
    assert lowering.kernel == "reference (inlined)" and "65537" in lowering.reason


def test_every_template_has_the_arguments_of_its_operation() -> None:
    found = triton_templates()
    assert found
    for op, templates in found.items():
        names = [argument.name for argument in OPS[op.removeprefix("dsv4::")].op._schema.arguments]
        for template in templates:
            assert parameters(template) == names, template.name
