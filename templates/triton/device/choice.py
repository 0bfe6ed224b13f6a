"""Scores of experts and the choice of the best for each token."""

import triton
import triton.language as tl


@triton.jit
def stepped(value, KIND: tl.constexpr):
    """Rounded to KIND, kept in fp32."""
    return value.to(KIND).to(tl.float32)


@triton.jit
def scores_of(logits, inside, SCORE: tl.constexpr, KIND: tl.constexpr):
    """fp32 [T, E] -> fp32 [T, E]; every function rounds to KIND, as PyTorch does in that type."""
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
        shifted = tl.exp(shifted - tl.max(shifted, 1, keep_dims=True))
        return stepped(shifted / tl.sum(shifted, 1, keep_dims=True), KIND)


@triton.jit
def sort_keys(value):
    """fp32 -> int32 in the same order, NaN on top as in torch.sort, -0 equal to 0; -2^31 is below all."""
    value = tl.where(value == 0.0, 0.0, value)
    bits = tl.where(value != value, 0x7FFFFFFF, value.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def picked_out(scores, hit):
    """The one score of a row that is hit, or 0: fp32 [T, 1]. As a sum of integers, which a warp adds up at once."""
    return tl.sum(tl.where(hit, scores.to(tl.int32, bitcast=True), 0), 1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def choose_experts(
    partial, bias, forced, weights, indices, token, N, norm_eps, scale,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, SPLITS: tl.constexpr,
    T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """token [T]: adds up `partial` in the order of the splits, then scores, choice and weights [N, K]."""
    KIND: tl.constexpr = weights.dtype.element_ty
    alive = (token < N)[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = expert < EXPERTS
    logits = tl.zeros((T, BLOCK_E), tl.float32)
    for split in tl.static_range(SPLITS):
        at = partial + (split * N + token[:, None]) * EXPERTS + expert
        logits += tl.load(at, mask=alive & inside, other=0.0)
    scores = scores_of(logits, inside, SCORE, KIND)
    rank = tl.arange(0, BLOCK_K)[None, :]
    real = alive & (rank < K)
    at = token[:, None] * K + rank
    chosen = tl.zeros((T, BLOCK_K), tl.float32)
    if forced is not None:
        picked = tl.load(forced + at, mask=real, other=-1).to(tl.int64)
        for j in tl.static_range(K):
            index = tl.sum(tl.where(rank == j, picked, 0), 1, keep_dims=True)
            chosen = tl.where(rank == j, picked_out(scores, inside & (expert == index)), chosen)
    else:
        ranked = scores
        if bias is not None:
            offset = tl.load(bias + expert, mask=inside, other=0.0)
            ranked = scores + offset.to(tl.float32)
            if offset.dtype == KIND:
                ranked = stepped(ranked, KIND)
        keys = tl.where(inside, sort_keys(ranked), -(2**31))
        picked = tl.zeros((T, BLOCK_K), tl.int64)
        for j in tl.static_range(K):
            largest = tl.max(keys, 1, keep_dims=True)
            best = tl.min(tl.where(keys == largest, expert, BLOCK_E), 1, keep_dims=True)
            hit = expert == best
            keys = tl.where(hit, -(2**31), keys)
            picked = tl.where(rank == j, best.to(tl.int64), picked)
            chosen = tl.where(rank == j, picked_out(scores, hit), chosen)
    if NORMALIZE:
        total = stepped(stepped(tl.sum(chosen, 1, keep_dims=True), KIND) + norm_eps, KIND)
        chosen = stepped(chosen / total, KIND)
    tl.store(weights + at, (chosen * scale).to(KIND), mask=real)
    tl.store(indices + at, picked, mask=real)
