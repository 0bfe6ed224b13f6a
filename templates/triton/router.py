"""Choice of experts: one product, scores, and the k largest of them, the lowest index first among equals.

    sums of logits, shared among programs -> per token: add up, score, choose, weigh

As in `hc`, fp32 weights are the sum of three bf16 numbers each, so bf16 tokens need no fp32 product. The logits of a
token are a fraction of its row; the second kernel finds them in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscompile.targets import Target
from dscompile.templates.triton.device.hc import add_product
from dscompile.templates.triton.hc import PIECES
from dscompile.templates.triton.launching import launch
from dscompile.templates.triton.record import Config, Meta, Sizes, TritonTemplate, config

SCORES = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}
MOST_EXPERTS = 1024
# One warp a token: reductions need no shared memory.
_CHOOSE = config(1, 1)


@triton.jit
def router_logits_kernel(
    x, x_stride, weight, w_stride, partial, N,
    D: tl.constexpr, EXPERTS: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partial fp32 [splits, N, EXPERTS]: what SPAN columns add to the logits."""
    # Programs with the same tokens are neighbours: the tokens come from memory once.
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    split = tl.program_id(2)
    alive, real = token < N, expert < EXPERTS
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, SPAN, BLOCK_D):
        column = split * SPAN + start + tl.arange(0, BLOCK_D)
        at = x + token[:, None] * x_stride + column[None, :]
        there = weight + expert[None, :].to(tl.int64) * w_stride + column[:, None]
        if D % BLOCK_D == 0 and D % SPAN == 0:
            left = tl.load(at, mask=alive[:, None], other=0.0)
            right = tl.load(there, mask=real[None, :], other=0.0)
        else:
            left = tl.load(at, mask=alive[:, None] & (column < D)[None, :], other=0.0)
            right = tl.load(there, mask=real[None, :] & (column < D)[:, None], other=0.0)
        total = add_product(total, left, right, PIECES)
    at = partial + (split.to(tl.int64) * N + token)[:, None] * EXPERTS + expert[None, :]
    tl.store(at, total, mask=alive[:, None] & real[None, :])


@triton.jit
def stepped(value, KIND: tl.constexpr):
    """Rounded to KIND, kept in fp32."""
    return value.to(KIND).to(tl.float32)


@triton.jit
def scores_of(logits, inside, SCORE: tl.constexpr, KIND: tl.constexpr):
    """fp32 [E] -> fp32 [E]; every function rounds to KIND, as PyTorch does in that type."""
    logits = stepped(logits, KIND)
    if SCORE == 0:
        # log1p(z) = log(1 + z), off by the rounding of 1 + z, which is known; z <= e^20.
        z = tl.exp(tl.where(logits > 20.0, 0.0, logits))
        one = 1.0 + z
        small = one == 1.0
        softplus = tl.where(small, z, tl.log(one) * (z / tl.where(small, 1.0, one - 1.0)))
        softplus = tl.where(logits > 20.0, logits, softplus)
        return stepped(tl.sqrt_rn(stepped(softplus, KIND)), KIND)
    elif SCORE == 1:
        return stepped(1.0 / (1.0 + tl.exp(-logits)), KIND)
    else:
        shifted = tl.where(inside, logits, float("-inf"))
        shifted = tl.exp(shifted - tl.max(shifted, 0))
        return stepped(shifted / tl.sum(shifted, 0), KIND)


@triton.jit
def sort_keys(value, index):
    """fp32 and int32 -> int64, larger for a larger value (NaN on top, as in torch.sort), then for a lower index."""
    value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
    bits = tl.where(value != value, 0x7FFFFFFF, value.to(tl.int32, bitcast=True))
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def router_choose_kernel(
    partial, bias, forced, weights, indices, N, norm_eps, scale,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A token a program: adds up `partial` in the order of the splits, then scores, choice and weights [N, K]."""
    KIND: tl.constexpr = weights.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < EXPERTS
    logits = tl.zeros((BLOCK_E,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = partial + (split * N + token) * EXPERTS + expert
        logits += tl.load(at, mask=inside, other=0.0)
    scores = scores_of(logits, inside, SCORE, KIND)
    rank = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.float32)
    if forced is not None:
        picked = tl.load(forced + token * K + rank, mask=rank < K, other=-1).to(tl.int64)
        for j in tl.static_range(K):
            index = tl.sum(tl.where(rank == j, picked, 0), 0)
            chosen = tl.where(rank == j, tl.sum(tl.where(inside & (expert == index), scores, 0.0), 0), chosen)
    else:
        ranked = scores
        if bias is not None:
            offset = tl.load(bias + expert, mask=inside, other=0.0)
            ranked = scores + offset.to(tl.float32)
            if offset.dtype == KIND:
                ranked = stepped(ranked, KIND)
        nothing = tl.full((BLOCK_E,), -(2**63), tl.int64)
        keys = tl.where(inside, sort_keys(ranked, expert), nothing)
        picked = tl.zeros((BLOCK_K,), tl.int64)
        for j in tl.static_range(K):
            largest = tl.max(keys, 0)
            hit = keys == largest
            keys = tl.where(hit, nothing, keys)
            picked = tl.where(rank == j, 0x7FFFFFFF - (largest & 0x7FFFFFFF), picked)
            chosen = tl.where(rank == j, tl.sum(tl.where(hit, scores, 0.0), 0), chosen)
    if NORMALIZE:
        total = stepped(stepped(tl.sum(chosen, 0), KIND) + norm_eps, KIND)
        chosen = stepped(chosen / total, KIND)
    at = token * K + rank
    tl.store(weights + at, (chosen * scale).to(KIND), mask=rank < K)
    tl.store(indices + at, picked, mask=rank < K)


def router(
    x: Tensor, weight: Tensor, bias: Tensor | None, forced_indices: Tensor | None, top_k: int, score_fn: str,
    normalize: bool, norm_eps: float, scale: float, fp32: bool, *, config: Config, target: Target,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`dsv4::router`: x [N, D], weight [E, D] -> weights [N, k] (fp32, or x.dtype if not fp32), indices int64 [N, k].

    A forced index outside [0, E) gets weight 0 and stays what it is; the reference raises.
    """
    tokens, size = x.shape
    experts = weight.shape[0]
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    forced = None if forced_indices is None else forced_indices.contiguous()
    pieces = PIECES[weight.dtype] if x.dtype == torch.bfloat16 else 0
    # A product in fp32 keeps its operands in registers.
    block_t, block_e, most = (config["BLOCK_T"], config["BLOCK_E"], config["BLOCK_D"]) if pieces else (16, 32, 32)
    block_d = max(16, min(most, triton.next_power_of_2(size)))
    span = block_d * triton.cdiv(size, block_d * config["SPLITS"])
    splits = triton.cdiv(size, span)
    partial = x.new_empty((splits, tokens, experts), dtype=torch.float32)
    grid = (triton.cdiv(experts, block_e), triton.cdiv(tokens, block_t), splits)
    launch(
        router_logits_kernel, grid, x, x.stride(0), weight, weight.stride(0), partial, tokens,
        config=config, D=size, EXPERTS=experts, SPAN=span,
        PIECES=pieces, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_D=block_d,
    )  # fmt: skip
    weights = x.new_empty((tokens, top_k), dtype=torch.float32 if fp32 else x.dtype)
    indices = x.new_empty((tokens, top_k), dtype=torch.int64)
    launch(
        router_choose_kernel, (tokens,), partial, bias, forced, weights, indices, tokens, norm_eps, scale,
        config=_CHOOSE, EXPERTS=experts, K=top_k, SCORE=SCORES[score_fn], NORMALIZE=normalize, SPLITS=splits,
        BLOCK_E=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(top_k),
    )  # fmt: skip
    return weights, indices


def _configs(sizes: Sizes, target: Target) -> Iterable[Config]:
    tokens = sizes["N"]
    few = [config(4, 3, BLOCK_T=16, BLOCK_E=e, BLOCK_D=128, SPLITS=s) for e, s in ((32, 10), (32, 4), (64, 4))]
    some = [config(4, 3, BLOCK_T=64, BLOCK_E=64, BLOCK_D=64, SPLITS=s) for s in (4, 1)]
    many = [config(8, 3, BLOCK_T=128, BLOCK_E=128, BLOCK_D=d, SPLITS=1) for d in (64, 32)]
    if tokens <= 64:
        yield from (*few, *some)
    elif tokens <= 1024:
        yield from (*some, *few)
    else:
        yield from (*many, *reversed(some))


def _check(config: Config, sizes: Sizes, target: Target) -> str | None:
    pieces = 6 if sizes["weight_bytes"] == 4 else 0  # three bf16 tiles beside the fp32 one
    each = config["BLOCK_E"] * (sizes["weight_bytes"] * config.num_stages + pieces)
    need = config["BLOCK_D"] * (each + config.num_stages * config["BLOCK_T"] * sizes["x_bytes"])
    if need <= target.smem_bytes_per_block:
        return None
    return f"{need} bytes of shared memory, allowed: {target.smem_bytes_per_block}"


def _applies(meta: Meta) -> str | None:
    experts, size = meta["weight"].shape
    if experts > MOST_EXPERTS:
        return f"{experts} experts, allowed: 1 to {MOST_EXPERTS}"
    return None if size > 0 else "tokens without a value"


TEMPLATES = (TritonTemplate("router", "dsv4::router", router, _configs, _check, _applies),)
