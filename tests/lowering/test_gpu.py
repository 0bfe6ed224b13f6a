"""Lowering for a GPU that is not here: what the graph becomes, and what happens if it is run all the same."""

import pytest
import torch
from torch import nn

import dscompile
from dscompile.lowering.gpu import WrongDeviceError, config_for
from dscompile.targets import get_target
from dscompile.templates.triton.record import TritonTemplate, config


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.dsv4.rms_norm(x, None, 1e-6, "fp32")


def test_running_it_on_the_cpu_is_an_error_that_says_what_to_do() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Norm(), backend="dsv4", options={"target": "sm_103a", "inductor": False})
    with torch.no_grad(), dscompile.collect() as report:
        with pytest.raises(WrongDeviceError, match=r"rms_norm was lowered for sm_103a \(GB300\).*on cpu.*'target'"):
            compiled(torch.randn(2, 8))
    assert report.graphs[0].kernel_counts() == {("dsv4::rms_norm", "rms_norm"): 1}


def test_sizes_that_no_config_serves_are_said_once_and_named() -> None:
    template = TritonTemplate(
        "nothing", "dsv4::rms_norm", Norm.forward, lambda sizes, target: [config(4), config(8)],
        check=lambda config, sizes, target: f"{config.num_warps} warps are too few",
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"nothing has no config for N=2, D=8 on sm_90a \(4 warps are too few; 8 "):
        assert config_for(template, {"N": 2, "D": 8}, "float32,-", get_target("sm_90a")) is None
