"""The end of a hyper-connection: the sublayer's output spread over the streams, the streams mixed."""

from __future__ import annotations

import torch
from torch import Tensor

from dscompile.passes.engine import Pattern


def _search_cast_first(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    dtype = streams.dtype
    moved = torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    return post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + moved


def _replace_cast_first(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.ops.dsv4.hc_post(y, streams, post, comb, False)


def _search_fp32(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    moved = torch.matmul(comb.transpose(-1, -2), streams.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + moved).to(streams.dtype)


def _replace_fp32(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.ops.dsv4.hc_post(y, streams, post, comb, True)


INPUTS = {"y": "act[*B D]", "streams": "act[*B n D]", "post": "f32[*B n]", "comb": "f32[*B n n]"}

HC_POST_FP32 = Pattern(
    name="hc_post.fp32", family="mhc", dialect="common", search=_search_fp32, replace=_replace_fp32, inputs=INPUTS,
    ranks=(1, 2), dtypes={"act": (torch.bfloat16, torch.float16)},  # in float32 both forms are one
)  # fmt: skip
HC_POST_CAST_FIRST = Pattern(
    name="hc_post.cast_first", family="mhc", dialect="common", search=_search_cast_first, replace=_replace_cast_first,
    inputs=INPUTS, ranks=(1, 2),
)  # fmt: skip

PATTERNS = (HC_POST_FP32, HC_POST_CAST_FIRST)
