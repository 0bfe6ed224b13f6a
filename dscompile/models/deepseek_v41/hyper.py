"""Hyper-connections with a delayed pre-mix (model_v41 2.1 and 2.2): n residual streams instead of one.

Every sublayer mixes the streams three ways: `pre` weighs them into its input, `post` spreads its output over them, and
`comb`, a doubly stochastic matrix, moves them among each other. A sublayer's input uses the `pre` of the one before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscompile.models.deepseek_v41.config import DeepseekV41Config
from dscompile.models.deepseek_v41.linear import frozen


def hc_mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """streams [..., n, D], fn [(2 + n) * n, n * D] float32 -> float32 [..., (2 + n) * n].

    The flattened streams times fn, divided by their root mean square after the product.
    """
    v = streams.flatten(-2).float()
    return F.linear(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Logits [..., n, n] -> nearly doubly stochastic: softmax, columns, then iters - 1 times rows, columns."""
    c = logits.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def hc_split(mix: Tensor, scale: Tensor, base: Tensor, n: int, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """mix [..., (2 + n) * n], scale [3], base [(2 + n) * n] -> pre and post [..., n], comb [..., n, n]; float32."""
    pre = torch.sigmoid(mix[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mix[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mix[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, sinkhorn(logits, iters, eps)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [..., n, D], pre [..., n] float32 -> sum_j pre[j] * streams[j], [..., D] in the streams' dtype."""
    return (pre.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """y [..., D], streams [..., n, D], post [..., n], comb [..., n, n] -> new streams, cast once from float32.

    out[j] = post[j] * y + sum_i comb[i, j] * streams[i]: the sum runs over comb's first index.
    """
    moved = torch.matmul(comb.transpose(-1, -2), streams.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + moved).to(streams.dtype)


class HyperMix(nn.Module):
    """The mix of one sublayer: `fn`, `base` and `scale`, all float32."""

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        n = config.hc_mult
        self.fn = frozen((2 + n) * n, n * config.hidden_size, dtype=torch.float32)
        self.base = frozen((2 + n) * n, dtype=torch.float32)
        self.scale = frozen(3, dtype=torch.float32)
        self.n, self.iters, self.eps = n, config.hc_sinkhorn_iters, config.hc_eps
        self.mix_eps = config.rms_norm_eps

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mix = hc_mix(streams, self.fn, self.mix_eps)
        return hc_split(mix, self.scale, self.base, self.n, self.iters, self.eps)
