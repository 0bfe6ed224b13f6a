"""The grouped output projection (model_v41 2.7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscompile.passes.dialects.common.units import with_unit_sizes
from dscompile.passes.engine import Pattern


def _project(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    return F.linear(torch.einsum("btgd,grd->btgr", o, wo_a).flatten(2), wo_b)


def _grouped(o: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    return torch.ops.dsv4.grouped_output(o, wo_a, wo_b)


def _project_stored(o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor) -> Tensor:
    low = torch.einsum("btgd,grd->btgr", o, wo_a).flatten(2)
    return torch.ops.dsv4.linear_packed(low, wo_b, wo_b_scale)  # type: ignore[no-any-return]


def _grouped_stored(o: Tensor, wo_a: Tensor, wo_b: Tensor, wo_b_scale: Tensor) -> Tensor:
    return torch.ops.dsv4.grouped_output_packed(o, wo_a, wo_b, wo_b_scale)  # type: ignore[no-any-return]


_BASE = (
    Pattern(
        "output.einsum", "output", "deepseek_v41", _project, _grouped,
        inputs={"o": "act[b t g d]", "wo_a": "act[g r d]", "wo_b": "act[m g*r]"},
        key=torch.ops.aten.bmm.default, share=0.75,
    ),
    Pattern(
        "output.stored", "output", "deepseek_v41", _project_stored, _grouped_stored,
        inputs={"o": "act[b t g d]", "wo_a": "act[g 32*r d]", "wo_b": "e4m3[32*m g*32*r]", "wo_b_scale": "u8[m g*r]"},
        key=torch.ops.dsv4.linear_packed.default, share=0.75,
    ),
)  # fmt: skip

PATTERNS = tuple(variant for pattern in _BASE for variant in with_unit_sizes(pattern))
