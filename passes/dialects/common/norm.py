"""RMSNorm in its three roundings, written out with float32 statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern


def _normed(x: Tensor, eps: float) -> Tensor:
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def _search_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * _normed(x, eps)).to(x.dtype)


def _replace_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.dsv4.rms_norm(x, weight, eps, "fp32")


def _search_before_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * _normed(x, eps).to(x.dtype)


def _replace_before_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.dsv4.rms_norm(x, weight, eps, "cast_before_weight")


def _search_scale_cast(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)


def _replace_scale_cast(x: Tensor, eps: float) -> Tensor:
    return torch.ops.dsv4.rms_norm(x, None, eps, "scale_cast")


EPS = 1.2345e-5

RMS_NORM_FP32 = Pattern(
    name="rms_norm.fp32", family="norm", dialect="common", search=_search_fp32, replace=_replace_fp32,
    inputs={"x": "act[*B D]", "weight": "w[D]"}, scalars={"eps": EPS},
)  # fmt: skip

RMS_NORM_CAST_BEFORE_WEIGHT = Pattern(
    name="rms_norm.cast_before_weight", family="norm", dialect="common", search=_search_before_weight,
    replace=_replace_before_weight, inputs={"x": "act[*B D]", "weight": "w[D]"}, scalars={"eps": EPS},
    dtypes={"act": (torch.bfloat16, torch.float16)},  # in float32 it is the same as "fp32"
)  # fmt: skip

RMS_NORM_SCALE_CAST = Pattern(
    name="rms_norm.scale_cast", family="norm", dialect="common", search=_search_scale_cast, replace=_replace_scale_cast,
    inputs={"x": "act[*B D]"}, scalars={"eps": EPS},
)  # fmt: skip

#: The weighted forms contain the weightless one (in float32 exactly), so they come first.
PATTERNS = (RMS_NORM_FP32, RMS_NORM_CAST_BEFORE_WEIGHT, RMS_NORM_SCALE_CAST)
