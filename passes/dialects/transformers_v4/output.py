"""The grouped output projection: one matrix per group of heads, then one linear map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.engine import Pattern


def _search(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    groups, width = o.shape[-2:]
    matrices = wo_a.transpose(1, 2)
    low = torch.bmm(o.reshape(-1, groups, width).transpose(0, 1), matrices).transpose(0, 1)
    return F.linear(low.reshape(*o.shape[:-2], -1), wo_b)


def _replace(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    return torch.ops.dsv4.grouped_output(o, wo_a, wo_b)


GROUPED_OUTPUT = Pattern(
    name="grouped_output.bmm", family="output", dialect="transformers_v4", search=_search, replace=_replace,
    inputs={"o": "act[b t G W]", "wo_a": "act[G R W]", "wo_b": "act[M G*R]"}, key=torch.ops.aten.bmm.default, share=0.8,
)  # fmt: skip

PATTERNS = (GROUPED_OUTPUT,)
