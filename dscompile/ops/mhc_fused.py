"""Hyper-connections between two sublayers as one operation: back into the streams, and on into the next sublayer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dscompile.ops import mhc
from dscompile.ops.cost import Cost, costed
from dscompile.ops.registry import OPS, define


def hc_post_pre(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool, fn: Tensor, scale: Tensor, base: Tensor,
    pre_in: Tensor | None, norm_weight: Tensor | None, mix_eps: float, hc_eps: float, iters: int, norm_eps: float,
    norm_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`hc_post` of the first five arguments, then `hc_pre` of the streams that it gives.

    y [..., D], streams [..., n, D], post [..., n], comb [..., n, n]; the rest as for `hc_pre`. Returns the new streams
    [..., n, D] and x [..., D] in streams.dtype, and pre, post [..., n], comb [..., n, n] in fp32.
    """
    made = mhc.hc_post(y, streams, post, comb, fp32)
    return (
        made,
        *mhc.hc_pre(made, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps, norm_first),
    )


def _fake(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool, fn: Tensor, scale: Tensor, base: Tensor,
    pre_in: Tensor | None, norm_weight: Tensor | None, mix_eps: float, hc_eps: float, iters: int, norm_eps: float,
    norm_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    made = OPS["hc_post"].fake(y, streams, post, comb, fp32)
    rest = OPS["hc_pre"].fake(
        made, fn, scale, base, pre_in, norm_weight, mix_eps, hc_eps, iters, norm_eps, norm_first
    )  # fmt: skip
    return made, *rest


@costed
def _cost(N: Any, n: Any, D: Any, x_bytes: Any = 2, fn_bytes: Any = 4) -> Cost:
    """N tokens: as hc_post and hc_pre, which does not read the streams again."""
    both = OPS["hc_post"].cost(N=N, n=n, D=D, x_bytes=x_bytes)
    both += OPS["hc_pre"].cost(N=N, n=n, D=D, x_bytes=x_bytes, fn_bytes=fn_bytes)
    return both + Cost(-N * n * D * x_bytes, 0, 0)


def _sizes(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fp32: bool, fn: Tensor, *rest: Any
) -> dict[str, Any]:
    sizes: dict[str, Any] = OPS["hc_pre"].sizes(streams, fn)
    return sizes


define(
    "hc_post_pre(Tensor y, Tensor streams, Tensor post, Tensor comb, bool fp32, Tensor fn, Tensor scale, Tensor base, "
    "Tensor? pre_in, Tensor? norm_weight, float mix_eps, float hc_eps, int iters, float norm_eps, bool norm_first) -> "
    "(Tensor streams, Tensor x, Tensor pre, Tensor post, Tensor comb)",
    family="mhc", reference=hc_post_pre, fake=_fake, cost=_cost, sizes=_sizes,
)  # fmt: skip
