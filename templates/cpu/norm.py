"""RMSNorm and RoPE on the CPU. The norm is plain PyTorch that Inductor fuses with its neighbours; RoPE's interleaved
pairs make poor vector code there, so it is a call of its own."""

from __future__ import annotations

import struct

from torch import Tensor

from dscompile.ops import OPS
from dscompile.templates.cpu import native
from dscompile.templates.cpu.native import ELEMENT
from dscompile.templates.cpu.record import CpuTemplate

_PROBLEM = struct.Struct("=20q")
_AXES = 4


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, mode: str) -> Tensor:
    """`dsv4::rms_norm`, as its reference says: one reduction and one pointwise pass."""
    out: Tensor = OPS["rms_norm"].reference(x, weight, eps, mode)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """`dsv4::rope`: x [..., D]; cos, sin broadcastable to [..., R / 2] -> [..., D]."""
    fits = (
        1 <= x.dim() <= _AXES + 1
        and x.dtype in ELEMENT
        and x.shape[-1] > 0
        and cos.shape == sin.shape
        and 1 <= cos.dim() <= x.dim()
        and 2 * cos.shape[-1] <= x.shape[-1]
        and all(c in (1, n) for c, n in zip(reversed(cos.shape[:-1]), reversed(x.shape[:-1])))
    )
    kernel = native.function("rope", "rope_rows", "pi", x.dtype) if fits else None
    if kernel is None:
        reference: Tensor = OPS["rope"].reference(x, cos, sin, inverse)
        return reference
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin, wide = native.angles(cos, sin, x.dtype)
    out = x.new_empty(x.shape)
    pad, cos_pad = _AXES + 1 - x.dim(), _AXES + 1 - cos.dim()
    cos_steps = [0 if size == 1 else step for size, step in zip(cos.shape[:-1], cos.stride()[:-1])]
    problem = _PROBLEM.pack(
        x.data_ptr(), *[1] * pad, *x.shape[:-1], *[0] * pad, *x.stride()[:-1], *[0] * cos_pad, *cos_steps,
        cos.data_ptr(), sin.data_ptr(), wide, x.shape[-1], cos.shape[-1], int(inverse), out.data_ptr(),
    )  # fmt: skip
    kernel(problem, native.threads())
    return out


TEMPLATES: tuple[CpuTemplate, ...] = (
    CpuTemplate("rms_norm", "dsv4::rms_norm", "inline", rms_norm),
    CpuTemplate("rope", "dsv4::rope", "opaque", rope),
)
